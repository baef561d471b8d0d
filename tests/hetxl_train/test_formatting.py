import math

import pytest

from hetxl_train import formatting as form


@pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, -math.inf, [1], {}, 10**400, -1e200])
def test_values_that_are_not_finite_numbers_become_none(value):
    assert form.finite(value) is None


def test_finite_numbers_become_floats():
    assert form.finite(3) == 3.0
    assert form.finite(-0.25) == -0.25


@pytest.mark.parametrize(
    ("value", "digits", "sign", "text"),
    [
        (4.2126, 3, False, "4.213"),
        (-0.06, 3, True, "−0.060"),
        (0.03, 2, True, "+0.03"),
        (-0.0001, 2, True, "0.00"),
        (0.0001, 2, True, "0.00"),
        (1234.5, 1, False, "1,234.5"),
        (None, 3, False, "–"),
    ],
)
def test_decimals_are_formatted(value, digits, sign, text):
    assert form.decimal(value, digits, sign=sign) == text


def test_a_mean_with_and_without_its_error():
    assert form.with_error(4.2, 0.011, 2) == "4.20 ± 0.01"
    assert form.with_error(4.2, None, 2) == "4.20"
    assert form.with_error(None, 0.1) == "–"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0000123, "12 µs"),
        (0.0123, "12.3 ms"),
        (0.42, "420 ms"),
        (3.14159, "3.14 s"),
        (75, "75.0 s"),
        (750, "12.5 min"),
        (9000, "2.5 h"),
    ],
)
def test_durations_are_formatted(seconds, text):
    assert form.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "60 s"),
        (90, "2 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
        (86400, "24.0 h"),
    ],
)
def test_rough_durations_are_formatted(seconds, text):
    assert form.rough_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 MB"), (1.6e6, "2 MB"), (999e6, "999 MB"), (1.04e9, "1.0 GB")])
def test_byte_counts_are_formatted(count, text):
    assert form.amount(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (999_999, "999,999"), (1_350_400, "1.35M"), (2.5e9, "2.50B"), (0, "0")]
)
def test_parameter_counts_are_formatted(value, text):
    assert form.short_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (2000, "2,000"),
        (20_000, "20k"),
        (1.5e6, "1.5M"),
        (-3, "−3"),
        (2e-6, "2e−06"),
        (3e9, "3B"),
    ],
)
def test_ticks_are_formatted(value, text):
    assert form.tick(value) == text


def test_p_values_make_no_claim_below_three_decimals():
    assert form.probability(0.0004) == "< 0.001"
    assert form.probability(0.0123) == "0.012"
    assert form.probability(None) == "–"


def test_plurals_lists_and_percentages_are_formatted():
    assert form.plural(1, "seed") == "1 seed"
    assert form.plural(1200, "run") == "1,200 runs"
    assert form.listed([]) == ""
    assert form.listed(["a"]) == "a"
    assert form.listed(["a", "b", "c"]) == "a, b and c"
    assert form.percent(0.1234, 2) == "12.34%"
    assert form.percent(None) == "–"
