import pytest
import torch
from torch import nn

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
