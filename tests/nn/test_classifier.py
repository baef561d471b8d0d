import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from hetxl.nn import build_head
from hetxl.nn.classifier import GetLogits, as_classifier, factory_options, is_plain_linear


class Renamed(nn.Linear):
    pass


class Changed(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


def test_what_counts_as_linear():
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


def test_a_new_classifier():
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
