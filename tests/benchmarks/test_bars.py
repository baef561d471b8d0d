"""benchmarks/_bars.py: bars, their verdicts, and rows of the table."""

import pytest


@pytest.fixture(scope="module")
def bars(load):
    return load("_bars")


@pytest.mark.parametrize(("measured", "verdict"), [(9.9, "fail"), (10, "pass"), (13.9, "pass"), (14, "stretch")])
def test_a_speed_up_must_lie_above(bars, measured, verdict):
    assert bars.Bar(10, 14, at_least=True).verdict(measured) == verdict


@pytest.mark.parametrize(("measured", "verdict"), [(401, "fail"), (400, "pass"), (201, "pass"), (-3, "stretch")])
def test_a_cost_must_lie_below(bars, measured, verdict):
    assert bars.Bar(400, 200, unit="MB").verdict(measured) == verdict


@pytest.mark.parametrize("at_least", [True, False])
def test_what_is_not_a_number_fails(bars, at_least):
    assert bars.Bar(1, at_least=at_least).verdict(float("nan")) == "fail"


def test_without_a_stretch_a_bar_can_only_be_passed(bars):
    assert bars.Bar(1.2).verdict(0.1) == "pass"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (14.26, "×", "14.3×"),
        (1.05, "×", "1.05×"),
        (1234.5, "×", "1,234×"),
        (1234.5, "MB", "1,234 MB"),
        (0.9941, "%", "99.4 %"),
        (2e-4, "", "0.0002"),
    ],
)
def test_amounts_are_short(bars, value, unit, text):
    assert bars.amount(value, unit) == text


def test_a_row_fills_the_header(bars):
    row = bars.Row("loss", 12.0, bars.Bar(10, 14, at_least=True), "1 s against 12 s")
    assert row.cells() == ["loss", "1 s against 12 s", "12×", "≥ 10×", "≥ 14×", "pass"]
    assert len(row.cells()) == len(bars.HEADER)


def test_missed_finds_the_failures(bars):
    good, bad = (bars.Row(name, value, bars.Bar(1.2), "") for name, value in (("good", 1.1), ("bad", 1.3)))
    assert bars.missed([good, bad]) == [bad]
