"""Measure the time and the peak memory of steps; peaks on Linux only.

A process may reuse freed memory, which hides a later peak, so every peak is measured in a new process. It is the
kernel's high-water mark, reset just before the step, so no peak between samples is missed.
"""

import ctypes
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from _cases import THREADS, Case, Method, prepare


def interleaved_medians(
    tasks: Mapping[str, Callable[[], object]], repeats: int, *, least: int = 1, limit: float | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the median seconds of each task.

    The tasks take turns, so that other load on the machine affects all of them alike. One round before the first
    counted round is a warm-up.

    Args:
        tasks: to time, by name.
        repeats: number of rounds that count.
        least: number of rounds whatever the limit.
        limit: seconds for all rounds together; no round starts that would end later. If three rounds or fewer fit, the
            cost of the warm-up is negligible in them, and the first of them counts as well.
        clock: clock of a task's seconds; None for elapsed time.
    """
    rounds: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(rounds) <= repeats:
        rounds.append({name: seconds_of(task, clock or time.perf_counter) for name, task in tasks.items()})
        spent = time.perf_counter() - begin
        if limit is not None and len(rounds) >= least and spent + spent / len(rounds) > limit:
            break
    cut_short = len(rounds) <= min(3, repeats)
    counted = rounds if cut_short else rounds[1:]
    return {name: statistics.median(row[name] for row in counted) for name in tasks}


def seconds_of(task: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a task takes."""
    start = clock()
    task()
    return clock() - start


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(own.ru_utime + own.ru_stime for own in usage)


def machine(threads: int = 1) -> str:
    """Return the kind of machine and the torch version, for the caption of a table."""
    cores = "one core" if threads == 1 else f"{threads} cores"
    return f"{cores} of an {platform.machine()} CPU, torch {torch.__version__.split('+')[0]}, float32"


MEGABYTE = 1e6


def peak_bytes(case: Case) -> int:
    """Measure the peak resident memory of a case in a new process, beyond that before the step.

    For a loss or a prediction, parameters and inputs exist before the step. A training step is measured as a whole,
    with parameters, gradients and the optimiser's state.
    """
    # The processes are forks of a server that has only imported the package, so they start fast and without the
    # allocations of this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetxl.profiling"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(_measure, case).result()


def _measure(case: Case) -> int:
    torch.set_num_threads(THREADS)
    prepare(case.tiny())()
    whole = case.task == "train"
    if whole:
        before = reset_peak()
        step = prepare(case)
        step()  # the first step creates the optimiser's state
    else:
        step = prepare(case)
        before = reset_peak()
    step()
    return status("VmHWM") - before


def reset_peak() -> int:
    """Release freed memory, reset the high-water mark to the remaining memory, and return that in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """Return a field of /proc/self/status in bytes; not ru_maxrss, which a new process inherits from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a benchmark run; the symbols are those of the documentation.

    Attributes:
        D: feature size.
        K: classes.
        S: the samples of the paper's evaluation.
        small_batch: B where the samples-first evaluation must still fit.
        batch: B of a usual step.
        image_batch: B of the whole training step.
        pixels: side of its images.
        growth_classes: K of the measure of growth, rising.
        growth_features: its D.
        growth_samples: its S.
        growth_batch: its B.
        top_k_classes: K of the trained head.
        top_k_features: its D.
        top_k_steps: training steps.
        top_k_batch: B of its predictions.
        curve_samples: S of the two figures, rising.
        repeats: rounds of a timing, at most.
        least: rounds of a timing that has a bar, at least.
        limit: seconds of a timing.
        curve_limit: seconds of one cell of the figures.
    """

    D: int = 2048
    K: int = 21_843
    S: int = 1000
    small_batch: int = 8
    batch: int = 64
    image_batch: int = 4
    pixels: int = 224
    growth_classes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    growth_features: int = 256
    growth_samples: int = 16
    growth_batch: int = 32
    top_k_classes: int = 8192
    top_k_features: int = 256
    top_k_steps: int = 200
    top_k_batch: int = 32
    curve_samples: tuple[int, ...] = (1, 4, 16, 64, 256, 1000)
    repeats: int = 9
    least: int = 3
    limit: float = 30.0
    curve_limit: float = 10.0


FULL = Sizes()
QUICK = Sizes(
    D=64,
    K=500,
    S=100,
    small_batch=4,
    batch=8,
    image_batch=2,
    pixels=32,
    growth_classes=(500, 1000, 2000),
    growth_features=32,
    growth_batch=4,
    top_k_classes=500,
    top_k_features=32,
    top_k_steps=20,
    top_k_batch=4,
    curve_samples=(1, 10, 100),
    repeats=2,
    limit=2.0,
    curve_limit=1.0,
)


class Meter:
    """Times and peak memory of cases.

    Args:
        sizes: sizes of the run.
        say: called with the name of each measurement.
    """

    def __init__(self, sizes: Sizes, say: Callable[[str], None]):
        self.sizes = sizes
        self.say = say
        self._seconds: dict[tuple[Case, ...], list[float]] = {}
        self._peaks: dict[Case, int] = {}

    def seconds(self, *cases: Case, with_bar: bool = True) -> list[float]:
        """Return the median seconds of cases that take turns; those without a bar get less time."""
        if cases not in self._seconds:
            least, limit = (self.sizes.least, self.sizes.limit) if with_bar else (1, self.sizes.curve_limit)
            tasks = {str(number): prepare(case) for number, case in enumerate(cases)}
            self._seconds[cases] = self.time(tasks, least, limit)
        return self._seconds[cases]

    def time(self, tasks: dict[str, Callable[[], object]], least: int, limit: float) -> list[float]:
        """Return the median seconds of tasks that take turns."""
        return list(interleaved_medians(tasks, self.sizes.repeats, least=least, limit=limit).values())

    def by_methods(self, case: Case, methods: Sequence[Method], with_bar: bool = True) -> list[float]:
        """Return the median seconds of the same step with several methods."""
        return self.seconds(*(case.by(method) for method in methods), with_bar=with_bar)

    def peak(self, case: Case) -> int:
        """Return the peak bytes of a step, in a separate process."""
        if case not in self._peaks:
            self._peaks[case] = peak_bytes(case)
        return self._peaks[case]
