"""Adaptive softmax under noise: torch's own without it, the plain average of samples with it."""

import pickle

import pytest
import torch

from hetxl import DetHead, HetHead, HetXLHead
from hetxl.classifiers import AdaptiveClassifier, adaptive

B, D, K = 9, 16, 40
CUTOFFS = [6, 15]
DOUBLE = {"dtype": torch.float64}


def setting(counts=None, head_bias=False, **options):
    torch.manual_seed(0)
    classifier = AdaptiveClassifier(D, K, CUTOFFS, counts=counts, head_bias=head_bias, div_value=2.0, **DOUBLE)
    head = HetXLHead(D, K, rank=3, temperature=1.3, noise_init=1.0, classifier=classifier, **DOUBLE, **options)
    targets = torch.tensor([0, 5, 6, 14, 15, 39, 39, 2, 20])
    size = head.covariance.size
    return head, torch.randn(B, D, **DOUBLE), targets, torch.randn(B, 5, size, **DOUBLE)


@pytest.mark.parametrize("head_bias", [False, True])
def test_adaptive_classifier_without_noise_equals_torchs(head_bias):
    classifier = AdaptiveClassifier(D, K, CUTOFFS, head_bias=head_bias, **DOUBLE)
    head = DetHead(D, K, classifier=classifier, **DOUBLE)
    features, targets = torch.randn(B, D, **DOUBLE), torch.randint(K, (B,))
    torch.testing.assert_close(classifier(features), classifier.engine.log_prob(features))
    torch.testing.assert_close(head.loss(features, targets), classifier.engine(features, targets).loss)
    torch.testing.assert_close(head(features), classifier.engine.log_prob(features))
    torch.testing.assert_close(head.predict(features).log_probs, classifier.engine.log_prob(features))


@pytest.mark.parametrize("residual", ["rank1", "diagonal"])
@pytest.mark.parametrize("covariance", ["efficient", "low_rank", "full"])
def test_loss_and_gradients_are_those_of_the_averaged_samples(covariance, residual):
    head, features, targets, noise = setting(covariance=covariance, residual=residual, head_bias=True)
    parameters = dict(head.named_parameters())
    assert head.covariance is not None
    moved = features.unsqueeze(1) + head.covariance(features).draw(noise)
    engine = head.classifier.engine
    top = (engine.head(moved) / 1.3).log_softmax(-1)
    parts = [top[..., :6]]
    parts += [(tail(moved) / 1.3).log_softmax(-1) + top[..., 6 + i, None] for i, tail in enumerate(engine.tail)]
    plain = -torch.cat(parts, -1).exp().mean(1).log()[torch.arange(B), targets].mean()
    loss = head.loss(features, targets, noise=noise)
    torch.testing.assert_close(loss, plain)
    gradients, expected = (torch.autograd.grad(value, list(parameters.values())) for value in (loss, plain))
    for name, first, second in zip(parameters, gradients, expected, strict=True):
        torch.testing.assert_close(first, second, msg=name)


def test_loss_and_predictions_agree():
    head, features, targets, noise = setting()
    losses = head.loss(features, targets, "none", noise=noise)
    torch.testing.assert_close(losses, -head(features, noise=noise)[torch.arange(B), targets])
    prediction = head.predict(features, noise=noise)
    torch.testing.assert_close(losses, -prediction.log_probs[torch.arange(B), targets])
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(B, **DOUBLE))
    few = head.predict(features, 3, noise=noise)
    torch.testing.assert_close(few.probs, prediction.probs.topk(3).values)
    torch.testing.assert_close(few.entropy, prediction.entropy)
    head.memory_budget = 1  # one example at a time
    torch.testing.assert_close(head.predict(features, noise=noise).probs, prediction.probs)


def test_classes_are_ordered_by_their_counts():
    counts = torch.randperm(K)
    head, features, targets, noise = setting(counts)
    classifier = head.classifier
    assert isinstance(classifier, AdaptiveClassifier)
    positions = classifier.places
    assert positions[counts.argmax()] == 0
    assert positions[counts.argmin()] == K - 1
    in_order = HetXLHead(
        D, K, rank=3, temperature=1.3, classifier=AdaptiveClassifier(D, K, CUTOFFS, div_value=2.0, **DOUBLE), **DOUBLE
    )
    state = {name: value for name, value in head.state_dict().items() if name != "classifier.places"}
    in_order.load_state_dict(state, strict=False)
    torch.testing.assert_close(head(features, noise=noise), in_order(features, noise=noise)[:, positions])
    torch.testing.assert_close(
        head.loss(features, targets, noise=noise), in_order.loss(features, positions[targets], noise=noise)
    )


def test_weights_ignored_examples_and_shapes():
    head, features, targets, noise = setting()
    targets[3] = -100
    weight = torch.rand(B, **DOUBLE)
    losses = head.loss(features, targets, "none", weight=weight, noise=noise)
    assert losses[3] == 0
    expected = losses.sum() / (weight.sum() - weight[3])
    torch.testing.assert_close(head.loss(features, targets, weight=weight, noise=noise), expected)
    shaped = head.loss(features.view(3, 3, D), targets.view(3, 3), "none", noise=noise.view(3, 3, 5, -1))
    torch.testing.assert_close(shaped.flatten(), head.loss(features, targets, "none", noise=noise))
    smoothed = head.loss(features, targets, label_smoothing=0.1, noise=noise)
    assert smoothed > head.loss(features, targets, noise=noise) * 0.5


def test_adaptive_classifier_rejects_invalid_options():
    with pytest.raises(ValueError, match=r"cutoffs must rise within 1 to 39, found \[5, 5\]"):
        AdaptiveClassifier(D, K, [5, 5])
    with pytest.raises(ValueError, match=r"leaves no features for the last of 3 clusters, from 16"):
        AdaptiveClassifier(D, K, [5, 10, 20])
    with pytest.raises(ValueError, match="noise must go through it"):
        HetHead(D, K, classifier=AdaptiveClassifier(D, K, [5]))
    wrong = HetXLHead(D, K, link="sigmoid", classifier=AdaptiveClassifier(D, K, [5]))
    for use in (lambda: wrong.loss(torch.randn(1, D), torch.zeros(1, K)), lambda: wrong(torch.randn(1, D))):
        with pytest.raises(ValueError, match='is for link="softmax"'):
            use()
    with pytest.raises(ValueError, match='is for link="softmax"'):
        wrong.predict(torch.randn(1, D))
    with pytest.raises(ValueError, match=r"counts must have shape \[40\], found \[2\]"):
        AdaptiveClassifier(D, K, [5], counts=torch.ones(2))


def test_more_examples_than_half_precision_counts():
    torch.manual_seed(0)
    head = DetHead(D, K, classifier=AdaptiveClassifier(D, K, CUTOFFS, div_value=2.0))
    features, targets = torch.randn(259, D).bfloat16(), torch.randint(K, (259,))
    with torch.autocast("cpu", torch.bfloat16):
        mean, each = (head.loss(features, targets, reduction) for reduction in ("mean", "none"))
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, each.mean())


@pytest.mark.parametrize("batch", [3, 0])
def test_every_parameter_has_a_gradient_for_any_labels(batch):
    head, features, _, _ = setting(head_bias=True)
    head.loss(features[:batch], torch.zeros(batch, dtype=torch.int64)).backward()  # none in a cluster
    assert [name for name, value in head.named_parameters() if value.grad is None] == []
    assert all(value.grad.isfinite().all() for value in head.parameters())


def test_class_order_survives_the_meta_device():
    counts = torch.arange(K)
    head = HetXLHead(D, K, classifier=AdaptiveClassifier(D, K, CUTOFFS, counts=counts, device="meta"), device="meta")
    head.to_empty(device="cpu")
    head.reset_parameters()
    assert head.classifier.places.tolist() == list(range(K))[::-1]
    assert head.loss(torch.randn(B, D), torch.randint(K, (B,))).isfinite()


def test_a_prediction_can_be_pickled():
    head, features, _, _ = setting()
    prediction = head.predict(features, top_k=3)
    again = pickle.loads(pickle.dumps(prediction))
    assert torch.equal(again.probs, prediction.probs)
    torch.testing.assert_close(again.covariance, prediction.covariance)


def test_methods_without_samples_keep_to_the_memory_budget(monkeypatch):
    head, features, _, _ = setting()
    seen, joined = [], adaptive.joined
    monkeypatch.setattr(adaptive, "joined", lambda parts, shape: seen.append(len(parts)) or joined(parts, shape))
    budget = 2 * 4 * 8 * K * (head.covariance.size + 1)  # two examples, four copies of that many float64
    for method, expected in (("mean_field", 5), ("deterministic", 1)):
        head.memory_budget = None
        whole = head.predict(features, method=method)
        head.memory_budget = budget
        parts = head.predict(features, method=method)
        torch.testing.assert_close(parts.probs, whole.probs)
        assert seen.pop() == expected
