"""W φ + b as a classifier of its own, and on unit vectors."""

import pytest
import torch
import torch.nn.functional as F

from hetxl import DetHead, HetHashHead, HetHead, HetXLHead
from hetxl.classifiers import LinearClassifier

D, K = 5, 11
DOUBLE = {"dtype": torch.float64}


def same_weights(head, linear):
    linear.load_state_dict(head.classifier.state_dict())
    return linear


@pytest.mark.parametrize("make", [DetHead, HetHead, HetHashHead, HetXLHead])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_head_over_linear_classifier_equals_head_over_nn_linear(make, link):
    torch.manual_seed(0)
    plain = make(D, K, rank=2, link=link, **DOUBLE)
    own = make(D, K, rank=2, link=link, classifier=LinearClassifier(D, K, **DOUBLE), **DOUBLE)
    assert plain.state_dict().keys() == own.state_dict().keys()
    own.load_state_dict(plain.state_dict())
    features, targets = torch.randn(4, D, **DOUBLE), torch.tensor([0, 3, 10, -100])
    seeded = lambda: torch.Generator().manual_seed(1)  # noqa: E731
    losses = [head.loss(features, targets, generator=seeded()) for head in (plain, own)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, first), (_, second) in zip(plain.named_parameters(), own.named_parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, msg=name)
    assert torch.equal(plain(features, generator=seeded()), own(features, generator=seeded()))
    for top_k in (None, 3):
        probs = [head.predict(features, top_k, generator=seeded()).probs for head in (plain, own)]
        assert torch.equal(*probs)


@pytest.mark.parametrize("normalized", [False, True])
def test_logits_of_a_few_classes(normalized):
    linear = LinearClassifier(D, K, normalized=normalized, **DOUBLE)
    features, classes = torch.randn(2, 3, D, **DOUBLE), torch.randint(K, (2, 3, 4))
    torch.testing.assert_close(linear.logits_of(features, classes), linear(features).gather(-1, classes))


def test_cosine_classifier_equals_scaled_cosine_similarity():
    linear = LinearClassifier(D, K, normalized=True, scale=7.0, **DOUBLE)
    features = 100 * torch.randn(3, D, **DOUBLE)
    expected = 7 * F.cosine_similarity(features.unsqueeze(1), linear.weight, dim=-1)
    torch.testing.assert_close(linear(features), expected)
    head = DetHead(D, K, classifier=linear, **DOUBLE)
    torch.testing.assert_close(head(features), expected.log_softmax(-1))


def test_noise_of_a_cosine_classifier_is_added_after_the_features_are_normalised():
    head = HetXLHead(
        D, K, rank=2, temperature=1.0, classifier=LinearClassifier(D, K, normalized=True, **DOUBLE), **DOUBLE
    )
    features, z = torch.randn(3, D, **DOUBLE), torch.randn(3, 4, 3, **DOUBLE)
    unit = F.normalize(features, dim=-1)
    assert head.covariance is not None
    moved = unit.unsqueeze(1) + head.covariance(unit).draw(z)
    logits = moved @ (F.normalize(head.classifier.weight, dim=-1) * head.classifier.log_scale.exp()).T
    torch.testing.assert_close(head(features, noise=z).exp(), logits.softmax(-1).mean(1))


def test_gradients_reach_every_parameter_of_a_cosine_classifier():
    head = HetXLHead(D, K, rank=2, classifier=LinearClassifier(D, K, normalized=True))
    head.loss(torch.randn(6, D), torch.arange(6)).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_mismatched_sizes_raise():
    with pytest.raises(ValueError, match="maps 5 features to 11 classes, but in_features=5 and num_classes=12"):
        HetXLHead(D, 12, classifier=LinearClassifier(D, K))
    with pytest.raises(ValueError, match="scale must be positive, found 0"):
        LinearClassifier(D, K, normalized=True, scale=0)
    with pytest.raises(TypeError, match=r"features have dtype torch.float32 but the head has torch.float64"):
        HetXLHead(D, K, classifier=LinearClassifier(D, K, **DOUBLE))(torch.randn(1, D))
