"""benchmarks/_against.py: the speed of two checkouts, step by step."""

from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def against(load):
    return load("_against")


def test_a_checkout_against_itself(against):
    rows = list(against.compare(CHECKOUT, against.QUICK, ("predict", "growth"), rounds=3))
    assert [rounds for _, _, rounds in rows] == [3] * (1 + len(against.QUICK.growth_classes))
    assert all(ratio > 0 for _, ratio, _ in rows)


def test_rounds_end_at_the_limit_and_change_who_is_first(against):
    calls = []
    times = {"new": 2.0, "old": 1.0}
    step = {name: lambda name=name: calls.append(name) or times[name] for name in times}
    assert list(against._ratios(step["new"], step["old"], 9, limit=0)) == [2.0] * 3
    assert calls == ["new", "old", "new", "old", "old", "new", "new", "old"]


def test_every_measure_with_a_time_is_compared(against, load):
    assert set(load("_measures").MEASURES) - {"memory"} == set(against.timed_steps(against.QUICK))


def test_a_folder_that_is_no_checkout(against, tmp_path):
    with pytest.raises(ValueError, match=r"--against must be a checkout .*no src/hetxl"):
        against.Worker(tmp_path)
