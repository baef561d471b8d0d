import pytest

from hetxl.report.statistics import PairedTest
from hetxl.studies.verdicts import against, agree, change, holds, insensitive, lower_in, same, sign, within

LOWER, HIGHER = PairedTest(-0.0123, 0.001, 0.0004, 3), PairedTest(0.0123, 0.002, 0.03, 3)
UNSURE, SINGLE = PairedTest(-0.01, 0.02, 0.6, 3), PairedTest(-0.01, None, None, 1)


def test_differences_of_rows():
    test = against({"nll": [1.0, 2.0]}, {"nll": [1.5, 2.5]})
    assert test.difference == -0.5
    assert against(None, {"nll": [1.0]}) is None
    assert against({"x": [2.0]}, {"x": [1.0]}, "x").difference == 1.0


def test_signs():
    assert [sign(test) for test in (LOWER, HIGHER, UNSURE, SINGLE, None)] == [-1, 1, 0, None, None]


def test_words():
    assert change(LOWER) == "lower by 0.012 ± 0.001 (p < 0.001)"
    assert change(HIGHER, 2, 100, " %") == "higher by 1.23 ± 0.20 % (p = 0.030)"
    assert change(SINGLE) == "lower by 0.010"
    assert change(PairedTest(0.0004, 0.1, 0.9, 3)) == "the same"
    assert change(None) == "not known, as a loss did not stay finite"


def test_counting():
    assert lower_in([LOWER, HIGHER, UNSURE, None]) == (2, 1, 1)


def test_conclusions():
    assert holds(True, "x is y") == "The paper's conclusion, that x is y, holds here."
    assert holds(False, "x is y", "z") == "The paper's conclusion, that x is y, does not hold here: z."
    assert holds(None, "x is y").startswith(
        "The numbers here do not decide whether the paper's conclusion holds, that x"
    )


def test_agreement():
    assert agree([-1, 0, None], -1) is True
    assert agree([-1, 1], -1) is False
    assert agree([0, None], -1) is None
    assert agree([1, 0], 1) is True


@pytest.mark.parametrize(
    ("differences", "found"),
    [
        ([PairedTest(0.009, 0.0001, 0.001, 3)], True),  # significant, and too small to matter
        ([PairedTest(0.02, 0.001, 0.001, 3)], False),
        ([PairedTest(0.02, 0.02, 0.4, 3)], None),
        ([PairedTest(0.0, 0.1, 1.0, 3), PairedTest(-0.02, 0.001, 0.001, 3)], False),
        ([None], None),
        ([], None),
    ],
)
def test_no_difference_needs_a_margin(differences, found):
    assert insensitive(differences, {"nll": [1.0, 1.0]}) is found
    assert insensitive(differences, None) is None
    assert "1%" in within()


def test_the_same_within_a_margin():
    small = PairedTest(0.001, 0.001, 0.4, 3)
    assert same([small], 0.01)
    assert same([small, HIGHER], 0.01) is False
    assert same([small], 0.002) is None  # its interval is wider
    assert same([PairedTest(0.0123, 0.0001, 0.001, 3)], 0.02)  # it counts, and is small
    assert same([small, UNSURE], 0.02) is None
    assert same([SINGLE], 0.02) is None
    assert same([small, None], 0.01) is None
    assert same([None, HIGHER], 0.01) is False
    assert same([], 0.01) is None
