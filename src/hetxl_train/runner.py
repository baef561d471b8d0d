"""Execute many runs, each in its own directory, sequentially in this process or in parallel in several processes.

Memory limits the number of parallel runs. A process keeps the datasets of its last runs open.
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
"""Share of the available memory that all runs together may use."""
CACHED = 3
"""Number of datasets that a process keeps open."""
_datasets: dict[Hashable, tuple[Dataset, Description]] = {}


@dataclass(frozen=True)
class PlannedRun:
    """A planned run."""

    name: str  # name in tables, or of a trial
    config: TrainConfig  # with a unique directory
    data: str = "whole"  # rows of a trial, one of `hetxl_train.search.trial.DATA`
    scaled: Path | None = None  # directory of the head rescaled to the validation split

    @property
    def title(self) -> str:
        """Return the name in progress lines."""
        return f"{self.name}, seed {self.config.seed}"

    @property
    def directory(self) -> Path:
        """Return the run directory."""
        return Path(str(self.config.out))

    @property
    def finished(self) -> bool:
        """Return whether the run is finished; raise if its directory has a run with other options."""
        if (self.directory / "config.json").exists():
            check_same(self.config, self.directory)
        return all((directory / "result.json").exists() for directory in self.directories)

    @property
    def directories(self) -> list[Path]:
        """Return its directory and that of the rescaled head."""
        return [path for path in (self.directory, self.scaled) if path is not None]


def run_planned(
    runs: Sequence[PlannedRun], dataset: Dataset, description: Description, *, jobs: int | None = None, console: Console
) -> None:
    """Execute the unfinished runs, all on the same data, which other processes open themselves.

    At most `jobs` runs execute at the same time, with one thread each, as many as fit into memory. None means one run
    per accelerator, or one run on all threads.
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
    """Execute runs of any kind, each with a `title`, and print a line for each.

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
    """Execute a run in a process that has not opened its data; return its result in words."""
    dataset, description = cached_dataset(data_source(run.config), lambda: open_data(run.config))
    _run(run, dataset, description, Console(quiet=True))
    scaled = None if run.scaled is None else read_json(run.scaled / "result.json")
    return result_line(read_json(run.directory / "result.json"), scaled)


def result_line(result: Mapping[str, Any], scaled: Mapping[str, Any] | None = None) -> str:
    """Describe the result of a run, and of the rescaled head, in one line."""
    split = "test" if "test" in result["metrics"] else "validation"
    rescaled = "" if scaled is None else f", rescaled {scaled['metrics'][split]['nll']:.3f}"
    return f"{split} NLL {result['metrics'][split]['nll']:.3f}{rescaled}, {rough_duration(result['train_seconds'])}"


def data_source(config: TrainConfig) -> tuple[Any, ...]:
    """Return the options that the data of a run depends on: runs with the same source can share a dataset."""
    own = tuple(value for name, value in config.to_dict()["data"].items() if name != "workers")
    return (*own, config.backbone)  # the backbone determines the preprocessing of images


def cached_dataset(source: Hashable, load: Callable[[], Dataset]) -> tuple[Dataset, Description]:
    """Return a dataset and its description, loaded unless it is among the last `CACHED` datasets."""
    if source not in _datasets:
        while len(_datasets) >= CACHED:
            _datasets.pop(next(iter(_datasets)))
        dataset = load()
        _datasets[source] = (dataset, describe(dataset))
    return _datasets[source]


def fitting_jobs(runs: Sequence[PlannedRun], dataset: Dataset, jobs: int, console: Console) -> int:
    """Return the number of parallel runs, so that this many of the largest fit into memory."""
    jobs = min(jobs, len(runs))
    if jobs <= 1:
        return 1
    # Measure only the last run of each head, which has the largest blocks, because measuring every run takes long.
    by_size = sorted(runs, key=lambda run: run.config.batch_size * run.config.train_samples * run.config.rank)
    largest = {run.config.head: run for run in by_size}
    needed, label = max((needed_memory(run.config, dataset), run.name) for run in largest.values())
    fitting = jobs_for(len(runs), needed, jobs, runs[0].config.device)
    if fitting < jobs or fitting * needed >= LARGE:
        limited = f" ({jobs} do not fit into memory)" if fitting < jobs else ""
        console.say(f"Runs at a time: {fitting}{limited}, up to {amount(needed)} each, the largest {label}")
    return fitting


def jobs_for(runs: int, needed: int | None, jobs: int | None, device: str = "auto") -> int:
    """Return the number of parallel runs.

    Args:
        needed: bytes of one run; None if unknown.
        jobs: maximum; None for the number of cores or accelerators.
    """
    if jobs is None:
        jobs = default_jobs() if find_device(device).type == "cpu" else max(1, len(accelerators(device)))
    most = jobs
    available = available_memory()
    if needed and available is not None:
        most = min(most, int(SHARE * available) // needed)
    return max(1, min(most, runs))


def needed_memory(config: TrainConfig, dataset: Dataset) -> int:
    """Return the bytes of a process for a run: its peak after trying a step, and the memory that the run adds."""
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
    """Return the bytes available without swapping, also in a container; None if unknown."""
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
