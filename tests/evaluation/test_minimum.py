import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl.evaluation.minimum import minimum_between


@pytest.mark.parametrize("place", [-1.0, -0.9, 0.0, 0.123, 1.0])
@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        (lambda x: x**2, 12),
        (abs, 24),  # no parabola fits
        (lambda x: math.cosh(3 * x) + x**3 / 9, 16),
        (lambda x: x**4, 24),
        (lambda x: -1 / (1 + 100 * x**2), 24),
    ],
)
def test_a_minimum_is_found(place, shape, calls):
    called = []
    found = minimum_between(lambda x: called.append(x) or shape(x - place), -1, 1, 0.001)
    # x⁴ is flat where x is small.
    assert shape(found - place) <= shape(0.001) + 1e-12
    assert len(called) <= calls
    assert all(-1 <= x <= 1 for x in called)


@given(st.floats(-1, 1), st.floats(0.1, 30), st.floats(-0.3, 0.3))
def test_a_minimum_is_found_whatever_the_slopes(place, steepness, skew):
    def cost(x):
        return math.log(math.cosh(steepness * (x - place))) * (1 + skew * math.tanh(x - place))

    assert abs(minimum_between(cost, -1, 1, 0.01) - place) <= 0.01
