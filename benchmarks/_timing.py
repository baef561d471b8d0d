"""What the benchmarks share: times that can be compared, and the machine they were taken on."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved_medians(tasks: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each task.

    The tasks take turns, so that whatever else the machine does meanwhile falls on all of them alike; one round before
    the first counted one warms them up.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            if repeat > 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> str:
    """The kind of machine and the torch version, for the caption of a table."""
    return f"one core of an {platform.machine()} CPU, torch {torch.__version__.split('+')[0]}, float32"
