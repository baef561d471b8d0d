"""The moving average of the weights."""

import pytest
import torch
from torch import nn

from hetxl.training.average import MovingAverage


def trained(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)).to(dtype)
    model[1].requires_grad_(False)
    return model


def change(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def test_against_a_naive_loop():
    model, decay = trained(), 0.95
    average = MovingAverage(model, decay)
    expected = {
        name: value.detach().double().clone() for name, value in model.named_parameters() if value.requires_grad
    }
    assert set(average.values) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for step in range(200):
        change(model, step)
        average.update(model, step)
        current = min(decay, (1 + step) / (10 + step))
        for name, value in model.named_parameters():
            if name in expected:
                expected[name] = current * expected[name] + (1 - current) * value.detach().double()
                torch.testing.assert_close(average.values[name].double(), expected[name], rtol=1e-5, atol=1e-6)


def test_applied_and_restored():
    model = trained()
    average = MovingAverage(model, 0.9)
    change(model, 1)
    average.update(model, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with average.applied(model):
        for name, value in model.named_parameters():
            assert torch.equal(value, average.values.get(name, before[name]))
        assert not torch.equal(model[0].weight, before["0.weight"])
    with pytest.raises(RuntimeError, match="inside"), average.applied(model):
        raise RuntimeError("inside")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.requires_grad


def test_float32_whatever_the_weights_are():
    model = trained(torch.bfloat16)
    average = MovingAverage(model, 0.999)
    change(model, 0)
    average.update(model, 10**6)
    assert all(value.dtype == torch.float32 for value in average.values.values())
    with average.applied(model):
        assert model[0].weight.dtype == torch.bfloat16


def test_loaded():
    model = trained()
    average, other = MovingAverage(model, 0.9), MovingAverage(trained(), 0.9)
    other.load(average.values)
    assert all(torch.equal(value, average.values[name]) for name, value in other.values.items())
    change(model, 3)
    average.update(model, 0)
    assert not torch.equal(other.values["0.weight"], average.values["0.weight"])
    with pytest.raises(KeyError):
        other.load({})
