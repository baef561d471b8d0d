"""benchmarks/_meter.py: which rounds are run and which count."""

import itertools

import pytest


@pytest.fixture
def timing(load, monkeypatch):
    """The module with a clock that only the tasks below move."""
    module = load("_meter")
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return module, clock


class Clock:
    def __init__(self):
        self.now = 0.0

    def task(self, seconds):
        """A task that takes so long, one number for each time."""
        durations = itertools.cycle(seconds)

        def run():
            self.now += next(durations)

        return run


def test_the_first_round_only_warms_up(timing):
    module, clock = timing
    assert module.interleaved_medians({"a": clock.task([100, 1, 2, 3])}, repeats=3) == {"a": 2}


def test_no_round_starts_that_would_not_end_in_time(timing):
    module, clock = timing
    module.interleaved_medians({"a": clock.task([1]), "b": clock.task([9])}, repeats=20, limit=55)
    assert clock.now == 50


def test_minimum_rounds_run_beyond_the_limit(timing):
    module, clock = timing
    module.interleaved_medians({"a": clock.task([10])}, repeats=20, least=3, limit=5)
    assert clock.now == 30


def test_all_of_few_long_rounds_count(timing):
    module, clock = timing
    assert module.interleaved_medians({"a": clock.task([30, 10, 20])}, repeats=9, least=3, limit=5) == {"a": 20}
