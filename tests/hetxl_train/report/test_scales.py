import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl_train.report.scales import Axis, downsample, log_ticks, nice_ticks, thin


def test_ticks_are_round():
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert nice_ticks(4.19, 4.31, 5) == [4.2, 4.225, 4.25, 4.275, 4.3]
    assert nice_ticks(0, 20_000) == [0, 5000, 10_000, 15_000, 20_000]
    assert nice_ticks(3, 3) == [3]


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6), count=st.integers(2, 8))
def test_ticks_lie_inside_and_are_few(low, span, count):
    ticks = nice_ticks(low, low + span, count)
    slack = 1e-6 * (abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)
    assert len(ticks) <= count + 1
    assert ticks == sorted(set(ticks))


@given(low=st.floats(1e-6, 1e6), ratio=st.floats(1.01, 1e12))
def test_log_ticks_lie_inside_and_are_few(low, ratio):
    ticks = log_ticks(low, low * ratio)
    assert all(low * 0.999 <= tick <= low * ratio * 1.001 for tick in ticks)
    assert len(ticks) <= 8


def test_log_ticks_are_powers_of_ten_over_decades_and_round_steps_within_one():
    assert log_ticks(1, 1e6) == [1, 10, 100, 1000, 1e4, 1e5, 1e6]
    assert log_ticks(1.1e6, 2.6e6) == [1.5e6, 2e6, 2.5e6]


def test_axis_positions_are_clamped_to_the_plot():
    axis = Axis("x").scale([0, 10], (100, 200), margin=0)
    assert (axis.position(0), axis.position(5), axis.position(10)) == (100, 150, 200)
    assert (axis.position(-3), axis.position(30)) == (100, 200)  # never outside
    ratios = Axis("x", log=True).scale([1, 100], (0, 100), margin=0)
    assert ratios.position(10) == pytest.approx(50)
    assert ratios.position(-5) == 0


@pytest.mark.parametrize("values", [[], [3.0], [0.0], [float("nan"), 2.0], [5.0, 5.0]])
@pytest.mark.parametrize("log", [False, True])
def test_axes_of_few_or_odd_values_still_have_an_extent(values, log):
    axis = Axis("x", log=log).scale(values, (0, 100))
    assert axis.low < axis.high
    assert 0 <= axis.position(3.0) <= 100
    assert not log or axis.low > 0


def test_ends_that_are_given_are_kept():
    axis = Axis("x", low=0.0, high=1.0).scale([0.2, 0.4], (0, 1))
    assert (axis.low, axis.high) == (0, 1)
    flat = Axis("x", low=0.0).scale([0.0, 0.0], (0, 1))  # bars of nothing still stand on zero
    assert flat.low == 0 < flat.high


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), limit=st.integers(4, 50))
def test_downsampling_keeps_ends_and_extremes(values, limit):
    indices = downsample(values, limit)
    assert len(indices) <= limit or len(values) <= limit
    assert indices == sorted(set(indices))
    assert {0, len(values) - 1} <= set(indices)
    assert min(values[index] for index in indices) == min(values)
    assert max(values[index] for index in indices) == max(values)


def test_thinning_keeps_the_ends():
    assert thin(range(10), 20) == list(range(10))
    assert thin(range(101), 3) == [0, 50, 100]
    assert len(thin(range(1000), 40)) == 40
