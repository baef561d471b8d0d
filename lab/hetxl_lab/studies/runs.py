"""Runs of the studies. The directory of a run is named by its options, so that studies share common runs.

`run_missing` trains several at a time.
"""

import dataclasses
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl._checks import one_of
from hetxl._files import read_json, write_json
from hetxl.registry import HEAD_LABELS, METRIC_NAMES
from hetxl_lab.studies.class_subsets import apply_view, check_view
from hetxl_train.config import ContrastiveConfig, TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import open_data
from hetxl_train.data.pairs import Pairs
from hetxl_train.formatting import rough_duration
from hetxl_train.process_pool import check_jobs
from hetxl_train.rescale import rescale
from hetxl_train.runner import PlannedRun, cached_dataset, data_source, fitting_jobs, jobs_for, result_line, run_each
from hetxl_train.runs import NOT_PART_OF_THE_RUN, check_same
from hetxl_train.tasks.contrastive import ContrastiveTask
from hetxl_train.training import train

DIVERGED = "diverged.json"  # written by a run whose loss did not stay finite, which is also a result
CACHE = Path("runs") / "studies" / "cache"  # runs of all studies except those on pairs
FORMER = {"noise_scale": 1.0, "flip_rate": 0.0}
"""Defaults that options had before they could be left open, which published runs have: their names stay."""
RESCALED = "rescaled"  # subdirectory of a run, for the same head rescaled to the validation split


@dataclass(frozen=True)
class StudyRun:
    """One run of a study; the directory among its options is ignored."""

    config: TrainConfig
    view: str = ""  # the part of the data to use, see `hetxl_lab.studies.class_subsets`; empty for all
    blind: bool = False  # whether to remove the test split before the run starts
    rescaled: bool = False  # whether to rescale the head to the validation split afterwards

    def __post_init__(self):
        check_view(self.view)

    @property
    def key(self) -> str:
        """Return a name from the options that differ from their defaults, so that a new option changes no name."""
        published = all(getattr(self.config, name) == value for name, value in FORMER.items())
        left_out = {*NOT_PART_OF_THE_RUN, *(FORMER if published else ())}
        options = {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
            if field.name not in left_out and getattr(self.config, field.name) != field.default
        }
        blind = {"blind": True} if self.blind else {}
        text = json.dumps({**options, **blind, "view": self.view}, sort_keys=True)
        data = Path(self.config.data.partition(":")[0]).stem or "data"
        return f"{data}-{self.config.head}-seed{self.config.seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def title(self) -> str:
        """Return a description in one line."""
        return f"{self.config.data} {HEAD_LABELS[self.config.head]} seed {self.config.seed}"

    @property
    def source(self) -> tuple[Any, ...]:
        """Return the options that determine the data; runs with the same source can share it."""
        return (*data_source(self.config), self.view)

    def open(self) -> Dataset:
        """Open the data, including the test split."""
        return apply_view(open_data(self.config), self.view)


SWAPS = (0.0, 0.2, 0.4)  # shares of the training pairs whose texts are swapped
PLACEMENTS = ("before", "after", "both", "none")  # when to normalise embeddings; the first is the default
PAIR_SAMPLES = 22  # draws of the sampled zero-shot evaluation, as in the paper


def swap_setting(head: str, swap: float) -> str:
    """Return the name of a head with a share of the texts swapped."""
    return f"{head}-swap{round(100 * swap)}"


def placement_setting(placement: str) -> str:
    """Return the name of HET-XL on clean pairs with a placement of the normalisation."""
    return swap_setting("het-xl", 0.0) if placement == PLACEMENTS[0] else f"het-xl-normalize-{placement}"


PAIR_SETTINGS: dict[str, dict[str, Any]] = {
    **{swap_setting(head, swap): {"head": head, "swap": swap} for swap in SWAPS for head in ("det", "het-xl")},
    **{placement_setting(name): {"head": "het-xl", "normalize": name} for name in PLACEMENTS[1:]},
}
"""The options in which the runs on pairs differ, by name."""

PAIR_METRICS: dict[str, tuple[str, ...]] = {
    "zero_shot_top1": ("metrics", "test", "zero_shot", "top1"),
    "zero_shot_top5": ("metrics", "test", "zero_shot", "top5"),
    "nll": ("metrics", "test", "zero_shot", "nll"),
    "unseen_top1": ("metrics", "test", "zero_shot", "unseen_top1"),
    "sampled_top1": ("metrics", "test", "zero_shot_sampled", "top1"),
    "sampled_top5": ("metrics", "test", "zero_shot_sampled", "top5"),
    **{
        f"{split}_{direction}@{k}": ("metrics", split, f"{direction}@{k}")
        for split in ("validation", "test")
        for direction in ("image_to_text", "text_to_image")
        for k in (1, 5, 10)
    },
    "noise_auroc": ("swaps", "noise_auroc"),
    "distance_auroc": ("swaps", "distance_auroc"),
}
"""Where each is in result.json."""


@dataclass(frozen=True)
class PairRun:
    """One run of a study on pairs. With the same seed, towers, order and swaps are the same in all settings."""

    setting: str  # identifies the run within its seed: a name of `PAIR_SETTINGS`, or of the study
    config: ContrastiveConfig
    blind: bool = False  # whether to remove the test split before the run starts

    @property
    def key(self) -> str:
        """Return the name of the run's directory."""
        return f"{self.setting}-seed{self.config.seed}"

    @property
    def title(self) -> str:
        """Return a description in one line."""
        return f"{self.config.data} {HEAD_LABELS[self.config.head]} ({self.setting}) seed {self.config.seed}"

    @property
    def source(self) -> tuple[Any, ...]:
        """Return the options that determine the data; runs with the same source can share it."""
        names = ("data", "data_seed", "swap", "swap_within", "image", "image_size")
        return tuple(getattr(self.config, name) for name in names)

    def open(self) -> Pairs:
        """Open the data, including the test split."""
        return ContrastiveTask.open(self.config)


@dataclass(frozen=True)
class PairBench:
    """Pairs with the options of their runs."""

    data: str  # as for `hetxl contrastive train`; empty where the user has to name it
    options: Mapping[str, Any] = field(default_factory=dict)  # beyond the defaults

    def run(self, setting: str, seed: int) -> PairRun:
        """Return the run of a setting of `PAIR_SETTINGS` with a seed, which is also that of the swaps."""
        one_of("setting", setting, PAIR_SETTINGS)
        if not self.data:
            raise ValueError("data must be set: this profile of the studies on pairs has none of its own")
        values: dict[str, Any] = {"eval_samples": PAIR_SAMPLES, **self.options, **PAIR_SETTINGS[setting]}
        return PairRun(setting, ContrastiveConfig(**{**values, "data": self.data, "seed": seed, "data_seed": seed}))


AnyRun = StudyRun | PairRun


@dataclass(frozen=True)
class RunCache:
    """The directory of all runs of the studies."""

    root: Path

    def directory(self, run: AnyRun) -> Path:
        """Return the directory of a run."""
        return self.root / run.key

    def done(self, run: AnyRun) -> bool:
        """Return whether a run has ended or diverged; raise if its directory has a run with other options."""
        directory = self.directory(run)
        # The name has only options that differ from their defaults, and the defaults may have changed.
        if (directory / "config.json").exists():
            config: Any = run.config
            check_same(config, directory)
        names = ["result.json"]
        if isinstance(run, StudyRun) and run.rescaled:
            names.append(f"{RESCALED}/result.json")
        return all((directory / name).exists() for name in names) or (directory / DIVERGED).exists()

    def result(self, run: AnyRun) -> dict[str, Any] | None:
        """Return the result of a run; None if its loss did not stay finite."""
        directory = self.directory(run)
        if (directory / "result.json").exists():
            return read_json(directory / "result.json")
        if (directory / DIVERGED).exists():
            return None
        raise FileNotFoundError(f"{directory} has no result.json: the run has not ended; run the study again")

    def finite_result(self, run: AnyRun, part: str = "") -> dict[str, Any]:
        """Return the result of a required run, or of a directory below it such as `RESCALED`; raise if it diverged."""
        result = self.result(run)
        if result is None:
            raise FloatingPointError(f"{run.title}: {read_json(self.directory(run) / DIVERGED)['message']}")
        return read_json(self.directory(run) / part / "result.json") if part else result

    @contextmanager
    def turn(self, run: AnyRun) -> Iterator[None]:
        """Lock a run against other processes; wait for one that holds the lock."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / f"{run.key}.lock", "w") as file:
            try:
                import fcntl
            except ImportError:  # Windows has no lock: users must not run two studies at once
                yield
                return
            fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it if this process is killed
            yield


def run_missing(
    runs: Sequence[AnyRun], cache: RunCache, *, jobs: int | None = None, console: Console | None = None
) -> float:
    """Train what the cache does not have, each run once; return the seconds it took. A study that was stopped resumes.

    `jobs` run at a time, one thread each, or fewer if memory is short; None for one per core or
    accelerator, 1 for this process only.
    """
    check_jobs(jobs)
    console = console or Console()
    begin = time.perf_counter()
    distinct = {run.key: run for run in runs}
    left = [run for run in distinct.values() if not cache.done(run)]
    if distinct:
        console.say(f"{len(distinct)} runs, {len(distinct) - len(left)} of them done before; in {cache.root}")
    if left:
        jobs = _with_room(left, jobs_for(len(left), None, jobs, left[0].config.device), console)
    run_each(functools.partial(run_single, cache=cache), left, jobs=jobs, console=console)
    return time.perf_counter() - begin


def _with_room(runs: Sequence[AnyRun], jobs: int, console: Console) -> int:
    """Return how many runs fit in memory at a time, estimated if all of them are on the same data."""
    own = [run for run in runs if isinstance(run, StudyRun)]
    if min(jobs, len(runs)) <= 1 or len(own) < len(runs) or len({run.source for run in own}) > 1:
        return jobs
    dataset, _ = cached_dataset(own[0].source, own[0].open)
    return fitting_jobs([PlannedRun(run.title, run.config) for run in own], dataset, jobs, console)


def run_single(run: AnyRun, cache: RunCache) -> str:
    """Train one run, unless another process has trained it meanwhile; describe its result in one line."""
    directory = cache.directory(run)
    with cache.turn(run):
        if not cache.done(run):
            try:
                _train(run, directory)
            except FloatingPointError as error:
                write_json(directory / DIVERGED, {"message": str(error)})
        # The weights are in model.safetensors; the optimiser states of hundreds of runs would fill a disk.
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    result = cache.result(run)
    if result is None:
        return "the loss did not stay finite"
    if isinstance(run, PairRun):
        return f"{ContrastiveTask.summary(result)}, {rough_duration(result['train_seconds'])}"
    return result_line(result, cache.finite_result(run, RESCALED) if run.rescaled else None)


_pairs: dict[tuple[Any, ...], Pairs] = {}


def _opened(source: tuple[Any, ...], open_pairs: Callable[[], Pairs]) -> Pairs:
    """Return the pairs of a source, those of the last one without opening them again."""
    if source not in _pairs:
        _pairs.clear()
        _pairs[source] = open_pairs()
    return _pairs[source]


def _train(run: AnyRun, directory: Path) -> None:
    quiet = Console(quiet=True)
    if isinstance(run, PairRun):
        pairs = _opened(run.source, run.open)
        if run.blind:
            splits = {name: split for name, split in pairs.splits.items() if name != "test"}
            pairs = dataclasses.replace(pairs, splits=splits)
        train(dataclasses.replace(run.config, out=str(directory), keep=1), dataset=pairs, console=quiet)
        return
    dataset, description = cached_dataset(run.source, run.open)
    if run.blind:
        dataset = dataset.without("test")
    config = dataclasses.replace(run.config, out=str(directory), keep=1)
    trained = train(config, dataset=dataset, console=quiet, description=description)
    if run.rescaled:
        rescale(trained, directory / RESCALED, dataset, quiet)


def over_seeds(results: Iterable[Mapping[str, Any]], split: str = "test") -> dict[str, Any]:
    """Return the metrics of runs that differ in their seeds, as in result.json, as lists in the order of the seeds."""
    runs = sorted(results, key=lambda run: run["seed"])
    values: dict[str, Any] = {name: [run["metrics"][split][name] for run in runs] for name in METRIC_NAMES}
    values["validation_nll"] = [run["metrics"]["validation"]["nll"] for run in runs]
    values["train_seconds"] = [run["train_seconds"] for run in runs]
    values["steps"] = runs[0]["steps"]
    values["temperature"] = [run["temperature"] for run in runs]
    values["noise_scale"] = [run.get("noise_scale", 1.0) for run in runs]  # absent from older results
    values["parameters"] = runs[0]["parameters"]["total"]
    values["seeds"] = [run["seed"] for run in runs]
    return values


def pair_values(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the metrics of runs on pairs that differ in their seeds, as lists; those that a run lacks are left out."""
    lists = {metric: [_at(result, keys) for result in results] for metric, keys in PAIR_METRICS.items()}
    return {metric: values for metric, values in lists.items() if None not in values}


def _at(result: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        result = result.get(key) if isinstance(result, Mapping) else None
    return result
