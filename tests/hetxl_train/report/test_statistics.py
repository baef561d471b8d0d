import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl_train.report.statistics import mean, paired_test, two_sided_p

# Two-sided critical values of tables of Student's t.
KNOWN = [
    (12.7062047, 1, 0.05),
    (63.6567412, 1, 0.01),
    (4.30265273, 2, 0.05),
    (2.22813885, 10, 0.05),
    (3.16927267, 10, 0.01),
    (2.04227246, 30, 0.05),
    (1.98397152, 100, 0.05),
    (636.619249, 1, 0.001),
]


@pytest.mark.parametrize(("t", "freedom", "p"), KNOWN)
def test_p_values_match_published_tables(t, freedom, p):
    assert two_sided_p(t, freedom) == pytest.approx(p, rel=1e-6)
    assert two_sided_p(-t, freedom) == two_sided_p(t, freedom)


@given(t=st.floats(0, 1e6))
def test_one_and_two_degrees_have_closed_forms(t):
    assert two_sided_p(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, abs=1e-12)
    assert two_sided_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)


@given(t=st.floats(0, 30))
def test_many_degrees_are_almost_normal(t):
    assert two_sided_p(t, 1e9) == pytest.approx(math.erfc(t / math.sqrt(2)), rel=1e-3, abs=1e-12)


def test_no_and_infinite_difference():
    assert two_sided_p(0, 5) == pytest.approx(1, abs=1e-14)
    assert two_sided_p(math.inf, 5) == 0


def test_a_mean_and_its_error():
    average = mean([1.0, 2.0, 3.0, 4.0])
    assert average.value == 2.5
    assert average.error == pytest.approx(math.sqrt(5 / 3) / 2)
    assert mean([7.0]) == (7.0, None, 1)


def test_paired_test_has_known_values():
    # Differences 1, 2, 3: mean 2, standard error 1/√3, t = 2√3 with 2 degrees.
    test = paired_test([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert test.difference == 2
    assert test.error == pytest.approx(1 / math.sqrt(3))
    assert test.p == pytest.approx(1 - math.sqrt(12 / 14))


def test_pairs_without_spread_and_single_pairs():
    assert paired_test([1.0, 2.0], [0.5, 1.5]).p == 0
    assert paired_test([1.0, 2.0], [1.0, 2.0]).p == 1
    assert paired_test([1.0], [0.5]) == (0.5, None, None, 1)


def test_invalid_input_raises():
    with pytest.raises(ValueError, match="at least one"):
        mean([])
    with pytest.raises(ValueError, match="same length, found 1 and 2"):
        paired_test([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="freedom must be at least 1, found 0"):
        two_sided_p(1.0, 0)
