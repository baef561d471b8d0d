"""Features with their noise, as a classifier gets them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from hetxl import HetHead, HetXLHead
from hetxl.classifiers import LinearClassifier
from hetxl.functional import Affine, Targets, Weights, reference
from hetxl.nn import build_head
from hetxl.nn.classifier import GetLogits, as_classifier, factory_options, is_plain_linear


class Renamed(nn.Linear):
    pass


class Changed(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


def test_is_plain_linear_rejects_other_forwards():
    assert is_plain_linear(nn.Linear(2, 3))
    assert is_plain_linear(Renamed(2, 3))
    assert is_plain_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))
    assert not is_plain_linear(Changed(2, 3))
    assert not is_plain_linear(nn.Sequential(nn.Linear(2, 3)))
    assert not is_plain_linear(lambda features: features)


def test_get_logits_sees_a_plain_batch():
    shapes = []

    def double(features):
        shapes.append(tuple(features.shape))
        return 2 * features

    features = torch.randn(2, 3, 4, 5)
    assert torch.equal(GetLogits(double, 5)(features), 2 * features)
    assert shapes == [(24, 5)]


def test_get_logits_checks_what_comes_back():
    with pytest.raises(ValueError, match=r"logits of shape \[2, 7\] for features \[2, 5\], found \[2, 5\]"):
        GetLogits(lambda features: features, 7)(torch.randn(2, 5))


def test_parameters_beside_a_classifier_follow_it():
    linear = nn.Linear(2, 3, dtype=torch.bfloat16, device="meta")
    assert factory_options(linear, None, None) == {"device": torch.device("meta"), "dtype": torch.bfloat16}
    assert factory_options(linear, "cpu", torch.float32) == {"device": "cpu", "dtype": torch.float32}
    assert factory_options(lambda x: x, None, None) == {"device": None, "dtype": None}


def test_new_classifier_is_linear_with_the_initial_bias():
    options = {"bias": True, "bias_init": -10.0, "device": None, "dtype": torch.float64}
    classifier = as_classifier(None, 4, 5, **options)
    assert is_plain_linear(classifier)
    assert classifier.weight.shape == (5, 4)
    assert torch.equal(classifier.bias, torch.full((5,), -10.0, dtype=torch.float64))


def test_a_layer_with_hooks_is_called():
    logging = nn.Linear(2, 3)
    handle = logging.register_forward_hook(lambda module, inputs, output: None)
    assert not is_plain_linear(logging)
    handle.remove()
    assert is_plain_linear(logging)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("head", ["det", "het", "het-xl"])
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    ],
    ids=["spectral_norm", "weight_norm", "pruned weight", "pruned bias"],
)
def test_weights_that_a_hook_computes_are_trained(change, head):
    torch.manual_seed(0)
    layer = change(nn.Linear(4, 3).double())
    model = build_head(head, 4, 3, rank=2, classifier=layer, temperature=1.0)
    features, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(features, labels).backward()
        optimizer.step()
    assert not any(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())
    model.eval()
    torch.testing.assert_close(model.predict(features, method="deterministic").probs, layer(features).softmax(-1))


def noisy_of(head, features, **options):
    return head._noisy_features(features, 6, None, torch.Generator().manual_seed(0), None, None, **options)


def test_noise_passes_through_the_classifier_only_in_het_xl():
    features = torch.randn(3, 4, dtype=torch.float64)
    for head in (HetXLHead(4, 9, rank=2, dtype=torch.float64), HetHead(4, 9, rank=2, dtype=torch.float64)):
        noisy, affine = noisy_of(head, features), Affine(head.classifier.weight, head.classifier.bias)
        samples = noisy.through(affine).sample(noisy.z)
        draws = noisy.noise.draw(noisy.z)
        moved = (
            affine(features.unsqueeze(1) + draws) if isinstance(head, HetXLHead) else draws + affine(features)[:, None]
        )
        torch.testing.assert_close(samples, moved)


def test_losses_log_probabilities_and_predictions_are_those_of_the_distribution():
    head, features = HetXLHead(4, 9, rank=2, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    noisy, ids = noisy_of(head, features), torch.tensor([0, 8, 3])
    logits = noisy.through(Affine(head.classifier.weight, head.classifier.bias))
    expected = reference.mc_log_probs(logits, noisy.z, temperature=noisy.temperature, link="softmax", order="samples")
    classifier = LinearClassifier(4, 9, dtype=torch.float64)
    classifier.load_state_dict(head.classifier.state_dict())
    torch.testing.assert_close(classifier.log_probs(noisy), expected)
    loss = classifier.nll(noisy, Targets(ids=ids), "sum", Weights())
    torch.testing.assert_close(loss, -expected[torch.arange(3), ids].sum())
    torch.testing.assert_close(classifier.predict(noisy, "mc", None, 0.0).log_probs, expected)


def test_a_prediction_without_samples_draws_none():
    head, features = HetXLHead(4, 9, rank=2), torch.randn(3, 4)
    assert noisy_of(head, features, drawn=False).z is None
    assert noisy_of(head, features).z.shape == (3, 6, 3)


def test_a_flat_batch_and_some_of_its_examples():
    features = torch.randn(2, 3, 4, dtype=torch.float64)
    for covariance in ("efficient", "low_rank"):
        for residual in ("rank1", "diagonal"):
            head = HetXLHead(4, 9, rank=2, covariance=covariance, residual=residual, dtype=torch.float64)
            noisy = noisy_of(head, features)
            flat, affine = noisy.flat(), Affine(head.classifier.weight, head.classifier.bias)
            expected = noisy.through(affine).sample(noisy.z).flatten(0, 1)
            torch.testing.assert_close(flat.through(affine).sample(flat.z), expected)
            few = flat.of_examples(torch.tensor([5, 0]))
            torch.testing.assert_close(few.through(affine).sample(few.z), expected[[5, 0]])
            rows, bias = affine.weight[[8, 1]], affine.bias[[8, 1]]
            torch.testing.assert_close(few.logits_at(rows, bias), expected[[5, 0], :, [8, 1]])
            # through two layers in one go, and one after the other
            first, second = torch.randn(3, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
            at_once = few.through(Affine(second @ first)).sample(few.z)
            torch.testing.assert_close(few.projected(first).through(Affine(second)).sample(few.z), at_once)


def test_normals_shared_by_a_batch():
    head, features = HetXLHead(4, 9, rank=2), torch.randn(2, 3, 4)
    flat = head._noisy_features(features, 6, None, None, torch.randn(5, 3), None).flat()
    assert flat.z.shape == (6, 5, 3)
