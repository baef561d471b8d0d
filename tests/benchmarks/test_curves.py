"""benchmarks/_curves.py: which cells fit the memory budget, and their table."""

import pytest


@pytest.fixture(scope="module")
def curves(load):
    return load("_curves")


def cases(curves, *samples):
    return [curves.Case("samples", 8, 16, 1000, count) for count in samples]


def test_copies_are_the_slope_of_the_peaks(curves):
    low, high = cases(curves, 16, 64)
    peaks = [500e6 + 5 * curves.logits_bytes(case) for case in (low, high)]
    assert curves.copies((low, high), peaks) == pytest.approx(5)


def test_a_step_fits_until_the_budget(curves):
    low, high, largest = cases(curves, 16, 64, 256)
    measured = [(case, 1e6 + 5 * curves.logits_bytes(case)) for case in (low, high)]
    needed = 1e6 + 5 * curves.logits_bytes(largest)
    assert curves.fits(largest, measured, budget=needed + 1)
    assert not curves.fits(largest, measured, budget=needed - 1)


def test_the_first_two_steps_are_always_measured(curves):
    low, high = cases(curves, 16, 64)
    assert curves.fits(high, [(low, 1e15)])


def test_the_table_marks_what_was_left_out(curves):
    cell = curves.Cell(0.25, 3_000_000)
    table = curves.curves_table({8: {"det": [cell], "samples": [curves.Cell()], "hetxl": [cell]}}, [1000])
    assert table.splitlines()[-1] == ("| 8 | 1,000 | 250 | out of memory budget | 250 | 3 | out of memory budget | 3 |")
