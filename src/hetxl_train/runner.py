"""Many runs, each in a directory of its own: one after the other here, or several at a time in processes.

How many run at a time is limited by memory; a process keeps the datasets of its last runs open.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl._files import read_json
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import Description, describe
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import open_data
from hetxl_train.distributed import accelerators, find_device
from hetxl_train.estimate import LARGE
from hetxl_train.formatting import amount, rough_duration
from hetxl_train.loaders import Parts
from hetxl_train.model import build_model, link_of
from hetxl_train.process_pool import check_jobs, default_jobs, parallel_map
from hetxl_train.rescale import rescale
from hetxl_train.runs import check_same
from hetxl_train.tasks.classification import estimate_on
from hetxl_train.training import train

SHARE = 0.8
"""Part of the available memory that all runs together may use."""
CACHED = 3
"""Datasets that a process keeps open."""
_datasets: dict[Hashable, tuple[Dataset, Description]] = {}


@dataclass(frozen=True)
class PlannedRun:
    """One run to be done."""

    name: str  # in tables, or of the trial of a search
    config: TrainConfig  # with a directory that no other run has
    data: str = "whole"  # the rows that a trial sees: of `hetxl_train.search.trial.DATA`
    scaled: Path | None = None  # directory of the same head rescaled to the validation split afterwards

    @property
    def title(self) -> str:
        """Its name in a line of progress."""
        return f"{self.name}, seed {self.config.seed}"

    @property
    def directory(self) -> Path:
        """Its run directory."""
        return Path(str(self.config.out))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do; a run with other options in its directory is an error."""
        if (self.directory / "config.json").exists():
            check_same(self.config, self.directory)
        return all((directory / "result.json").exists() for directory in self.directories)

    @property
    def directories(self) -> list[Path]:
        """Its directory, and that of the same head rescaled, which is the one that counts."""
        return [path for path in (self.directory, self.scaled) if path is not None]


def run_planned(
    runs: Sequence[PlannedRun], dataset: Dataset, description: Description, *, jobs: int | None = None, console: Console
) -> None:
    """Do the runs that are not finished, all on the same data, which other processes open themselves.

    Of `jobs` at a time, one thread each, as many run as fit into memory; None is one on each of several accelerators,
    otherwise one after the other, on all threads.
    """
    check_jobs(jobs)
    if jobs is None and runs and len(devices := accelerators(runs[0].config.device)) > 1:
        jobs = len(devices)
    if jobs is None:
        for run in runs:
            _run(run, dataset, description, console)
        return
    unfinished = [run for run in runs if not run.finished]
    run_each(_run_elsewhere, unfinished, jobs=fitting_jobs(unfinished, dataset, jobs, console), console=console)


def run_each(work: Callable[[Any], str], runs: Sequence[Any], *, jobs: int | None, console: Console) -> None:
    """Do runs of any kind, each with a `title`, and print a line about each.

    `work` does one run and returns its result in words; for the arguments see `parallel_map`. Several accelerators are
    divided among the processes.
    """
    devices = accelerators(runs[0].config.device) if runs else []
    with console.bar("runs", len(runs)) as bar:
        for number, (run, result) in enumerate(parallel_map(work, runs, jobs=jobs, devices=devices), 1):
            console.say(f"[{number}/{len(runs)}] {run.title}: {result}")
            bar.to(number)


def _run(run: PlannedRun, dataset: Dataset, description: Description, console: Console) -> None:
    trained = train(run.config, dataset=dataset, console=console, label=run.name, description=description)
    if run.scaled is not None:
        rescale(trained, run.scaled, dataset, console)


def _run_elsewhere(run: PlannedRun) -> str:
    """Do a run in a process that has not opened its data; return its result in words."""
    dataset, description = cached_dataset(data_source(run.config), lambda: open_data(run.config))
    _run(run, dataset, description, Console(quiet=True))
    scaled = None if run.scaled is None else read_json(run.scaled / "result.json")
    return result_line(read_json(run.directory / "result.json"), scaled)


def result_line(result: Mapping[str, Any], scaled: Mapping[str, Any] | None = None) -> str:
    """Return the content of a run's result.json in words, and that of the same head rescaled."""
    split = "test" if "test" in result["metrics"] else "validation"
    rescaled = "" if scaled is None else f", rescaled {scaled['metrics'][split]['nll']:.3f}"
    return f"{split} NLL {result['metrics'][split]['nll']:.3f}{rescaled}, {rough_duration(result['train_seconds'])}"


def data_source(config: TrainConfig) -> tuple[Any, ...]:
    """Return the options that the data of a run depends on: runs with the same source can share a dataset."""
    own = tuple(value for name, value in config.to_dict()["data"].items() if name != "workers")
    return (*own, config.backbone)  # images are read as the backbone takes them


def cached_dataset(source: Hashable, load: Callable[[], Dataset]) -> tuple[Dataset, Description]:
    """Return a dataset and its description, loaded unless that of the source is among the last `CACHED` ones."""
    if source not in _datasets:
        while len(_datasets) >= CACHED:
            _datasets.pop(next(iter(_datasets)))
        dataset = load()
        _datasets[source] = (dataset, describe(dataset))
    return _datasets[source]


def fitting_jobs(runs: Sequence[PlannedRun], dataset: Dataset, jobs: int, console: Console) -> int:
    """Return how many runs to do at a time, so that as many of the largest fit into memory."""
    jobs = min(jobs, len(runs))
    if jobs <= 1:
        return 1
    # Of each head the run with the largest blocks, which come last: a step of every run would take its time.
    by_size = sorted(runs, key=lambda run: run.config.batch_size * run.config.train_samples * run.config.rank)
    largest = {run.config.head: run for run in by_size}
    needed, label = max((needed_memory(run.config, dataset), run.name) for run in largest.values())
    fitting = jobs_for(len(runs), needed, jobs, runs[0].config.device)
    if fitting < jobs or fitting * needed >= LARGE:
        limited = f" ({jobs} do not fit into memory)" if fitting < jobs else ""
        console.say(f"Runs at a time: {fitting}{limited}, up to {amount(needed)} each, the largest {label}")
    return fitting


def jobs_for(runs: int, needed: int | None, jobs: int | None, device: str = "auto") -> int:
    """Return how many of a number of runs to do at a time.

    Args:
        needed: bytes of one; None if unknown.
        jobs: the most; None for the number of cores, or that of the accelerators.
    """
    if jobs is None:
        jobs = default_jobs() if find_device(device).type == "cpu" else max(1, len(accelerators(device)))
    most = jobs
    available = available_memory()
    if needed and available is not None:
        most = min(most, int(SHARE * available) // needed)
    return max(1, min(most, runs))


def needed_memory(config: TrainConfig, dataset: Dataset) -> int:
    """Return the bytes that a process needs for a run: its peak after trying a step, and what the run adds to that."""
    device = find_device(config.device)
    model = build_model(config, dataset.input, dataset.num_classes, link_of(config, dataset)).to(device)
    parts = Parts(config.batch_size, config.accumulate)
    estimate = estimate_on(config, model, dataset.splits["train"], parts, 1, device)
    if estimate is None:
        return peak_memory()
    added = estimate.memory["the optimiser's moments"] + estimate.memory["the moving average"]
    if config.temperature_method == "bilevel":  # two more tensors like each parameter
        added += 2 * estimate.memory["their gradients"]
    return max(peak_memory(), estimate.total) + added


def peak_memory() -> int:
    """Return the peak bytes of this process; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    # In kilobytes, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available_memory(system: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that can be used without swapping, here and in a container; None if they are not reported."""
    try:
        lines = system.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    free = [int(sizes["MemAvailable"]) * 1024] if "MemAvailable" in sizes else []
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        free += [max(0, int(limit) - used)] if limit.isdecimal() else []
    except (OSError, ValueError):
        pass
    return min(free, default=None)
