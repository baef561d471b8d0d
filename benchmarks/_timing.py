"""What the benchmarks share: times that can be compared, and the machine they were taken on."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved_medians(
    tasks: Mapping[str, Callable[[], object]], repeats: int, *, least: int = 1, limit: float | None = None
) -> dict[str, float]:
    """Median seconds of each task.

    The tasks take turns, so that whatever else the machine does meanwhile falls on all of them alike; one round before
    the first counted one warms them up.

    Args:
        tasks: what to time, by name.
        repeats: how many rounds count.
        least: how many rounds there are at least, whatever the limit.
        limit: seconds for all rounds together: none starts that would not end in time. If that leaves three rounds or
            fewer they are long ones, beside which warming up is nothing, and the first of them counts as well.
    """
    rounds: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(rounds) <= repeats:
        rounds.append({name: _seconds(task) for name, task in tasks.items()})
        spent = time.perf_counter() - begin
        if limit is not None and len(rounds) >= least and spent + spent / len(rounds) > limit:
            break
    cut_short = len(rounds) <= min(3, repeats)
    counted = rounds if cut_short else rounds[1:]
    return {name: statistics.median(row[name] for row in counted) for name in tasks}


def _seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def machine(threads: int = 1) -> str:
    """The kind of machine and the torch version, for the caption of a table."""
    cores = "one core" if threads == 1 else f"{threads} cores"
    return f"{cores} of an {platform.machine()} CPU, torch {torch.__version__.split('+')[0]}, float32"
