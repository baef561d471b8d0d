"""A learned τ beside the loss: its prior and its hold."""

import math

import pytest
import torch
from torch import nn

from hetxl.nn import FixedTemperature, LearnedTemperature
from hetxl.training.temperature import add_prior, forget, hold, is_held
from support.training import small


@pytest.mark.parametrize(("share", "held"), [(0.0, 0), (0.05, 5), (0.5, 50), (1.0, 100)])
def test_steps_that_are_held(share, held):
    config = small(temperature_hold=share)
    assert [is_held(step, 100, config) for step in range(100)] == [step < held for step in range(100)]


@pytest.mark.parametrize("init", [0.3, 1.0, 2.525])
def test_the_gradient_of_the_prior(init):
    temperature = LearnedTemperature(init=init)
    temperature.raw.grad = torch.tensor([0.5])
    add_prior(temperature, 3.0)
    slope = (init - temperature.low) * (temperature.high - init) / (temperature.high - temperature.low)
    expected = 3.0 * 2 * math.log(init) / init * slope
    assert float(temperature.raw.grad) == pytest.approx(0.5 + expected, abs=1e-5)
    temperature.raw.grad = None
    add_prior(temperature, 3.0)
    assert temperature.raw.grad is not None
    assert float(temperature.raw.grad) == pytest.approx(expected, abs=1e-5)


def test_a_prior_needs_something_that_is_learned():
    add_prior(FixedTemperature(2.0), 1.0)
    temperature = LearnedTemperature().requires_grad_(False)
    add_prior(temperature, 1.0)
    assert temperature.raw.grad is None


def test_what_is_held_does_not_move_and_leaves_no_trace():
    temperature, other = LearnedTemperature(init=2.0), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([*temperature.parameters(), other], lr=0.1, weight_decay=0.0)
    forget(temperature, optimizer)  # before any step there is nothing to forget
    for parameter in (temperature.raw, other):
        parameter.grad = torch.ones(1)
    hold(temperature)
    optimizer.step()
    forget(temperature, optimizer)
    assert temperature().item() == pytest.approx(2.0)
    assert other.item() == pytest.approx(0.9)
    assert all((value == 0).all() for value in optimizer.state[temperature.raw].values())
    assert float(optimizer.state[other]["step"]) == 1
