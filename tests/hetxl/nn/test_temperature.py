import math

import pytest
import torch

from hetxl import FixedTemperature, HetXLHead, LearnedTemperature
from hetxl.nn.temperature import as_temperature


def test_learned_temperature_starts_in_the_middle_of_its_range():
    temperature = LearnedTemperature()
    torch.testing.assert_close(temperature().detach(), torch.tensor(2.525))
    assert temperature().shape == ()


@pytest.mark.parametrize("init", [0.06, 1.0, 1.25, 4.9])
def test_learned_temperature_starts_at_init(init):
    torch.testing.assert_close(LearnedTemperature(init=init, dtype=torch.float64)().item(), init)


@pytest.mark.parametrize("raw", [-1e4, -3.0, 0.0, 3.0, 1e4])
def test_the_formula_and_its_bounds(raw):
    temperature = LearnedTemperature(0.1, 3.0, dtype=torch.float64)
    torch.nn.init.constant_(temperature.raw, raw)
    expected = (3.0 - 0.1) / (1 + math.exp(-raw)) + 0.1 if raw > -700 else 0.1
    tau = temperature()
    torch.testing.assert_close(tau.item(), expected)
    assert 0.1 <= tau <= 3.0
    tau.backward()
    assert temperature.raw.grad is not None
    assert torch.isfinite(temperature.raw.grad)


@pytest.mark.parametrize("init", [0.05, 5.0, 7.0, 0.01])
def test_init_outside_the_range(init):
    with pytest.raises(ValueError, match=rf"init must lie strictly between low=0.05 and high=5, found {init:g}"):
        LearnedTemperature(init=init)


@pytest.mark.parametrize(
    ("low", "high", "message"), [(2.0, 1.0, "low must be below high"), (-1.0, 1.0, "low must be pos")]
)
def test_bounds_that_make_no_range(low, high, message):
    with pytest.raises(ValueError, match=message):
        LearnedTemperature(low, high)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_fixed_temperature_is_positive(value):
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        FixedTemperature(value)


def test_numbers_and_modules_are_taken():
    assert as_temperature(2)() == 2.0
    learned = LearnedTemperature()
    assert as_temperature(learned) is learned
    with pytest.raises(TypeError, match="temperature must be a positive number, found 'warm'"):
        as_temperature("warm")  # pyright: ignore[reportArgumentType]


def test_half_precision_parameters_give_a_float32_temperature():
    assert LearnedTemperature().to(torch.bfloat16)().dtype == torch.float32


def test_a_scalar_in_a_state_dict_is_taken():
    temperature = LearnedTemperature(dtype=torch.float64)
    temperature.load_state_dict({"raw": torch.tensor(0.7, dtype=torch.float64)})
    assert temperature.raw.item() == 0.7
    temperature.load_state_dict(temperature.state_dict())


@pytest.mark.parametrize("word", ["auto", "learned"])
def test_temperature_words_raise_outside_training(word):
    with pytest.raises(ValueError, match=rf"found '{word}'.*TrainConfig"):
        HetXLHead(4, 3, temperature=word)
