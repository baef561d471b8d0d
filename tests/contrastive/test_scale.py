import math

import pytest
import torch

from hetxl.contrastive import LogitScale
from hetxl.contrastive.scale import _BoundedExp


def test_starts_where_it_is_told():
    scale = LogitScale(3.0)
    assert scale().item() == pytest.approx(3.0)
    assert [name for name, _ in scale.named_parameters()] == ["raw"]
    assert scale.raw.item() == pytest.approx(math.log(3.0))
    assert "maximum=100" in repr(scale)


def test_gradient_below_the_bound():
    raw = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: _BoundedExp.apply(t, 2.0), raw)


def test_beyond_the_bound_it_stays_there_and_can_come_back():
    scale = LogitScale(5.0, maximum=10.0)
    scale.raw.data.fill_(math.log(20.0))
    value = scale()
    assert value.item() == pytest.approx(10.0)
    (further,) = torch.autograd.grad(-scale(), scale.raw)
    assert float(further) == 0  # a step would carry t further up
    (back,) = torch.autograd.grad(scale(), scale.raw)
    assert float(back) == pytest.approx(10.0)


def test_training_up_does_not_run_away_and_training_down_returns_at_once():
    scale = LogitScale(9.0, maximum=10.0)
    optimiser = torch.optim.SGD(scale.parameters(), lr=0.01)
    for _ in range(50):
        optimiser.zero_grad()
        (-scale()).backward()
        optimiser.step()
    assert scale.raw.item() < math.log(10.0) + 0.2
    assert scale().item() == pytest.approx(10.0)
    for _ in range(5):
        optimiser.zero_grad()
        scale().backward()
        optimiser.step()
    assert scale().item() < 10.0


def test_clamping_in_place_is_that_of_clip():
    scale = LogitScale(2.0, maximum=50.0)
    scale.raw.data.fill_(9.0)
    scale.clamp_()
    assert scale.raw.item() == pytest.approx(math.log(50.0))
    scale.raw.data.fill_(-1.0)
    scale.clamp_()
    assert scale.raw.item() == 0


def test_half_precision_parameters_give_a_wide_scale():
    assert LogitScale(3.0, dtype=torch.bfloat16)().dtype == torch.float32
    assert LogitScale(3.0, dtype=torch.float64)().dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": 0.0}, "init must be positive"),
        ({"init": 3.0, "maximum": math.inf}, "maximum must be positive and finite"),
        ({"init": 30.0, "maximum": 10.0}, "init must be at most maximum=10"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LogitScale(**options)
