"""Options of a search for τ, and the runs of each method."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl._checks import integer_at_least, one_of
from hetxl_train.config import TrainConfig
from hetxl_train.runner import PlannedRun
from hetxl_train.search.bayes import HIGH, LOW, SAMPLERS
from hetxl_train.temperature_methods import FOLLOWING, METHODS, SEARCHES

GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)
"""The values of τ that the paper tries."""


@dataclass(frozen=True)
class Search:
    """Options of a search for τ."""

    method: str = "grid"  # of `METHODS`
    grid: Sequence[float] = GRID  # values of τ that `grid` tries
    trials: int = 30  # runs of `bayes` in all
    parallel: int = 5  # runs of `bayes` that are suggested at a time
    sampler: str = "auto"  # of `bayes`: "auto", "gp" or "tpe"
    storage: str | None = None  # of `bayes`, see `hetxl_train.search.bayes.open_storage`
    folds: int = 3  # 3 to choose on the validation split; 2 to choose on the test split, for the paper's check only
    retrain: bool = False  # whether a search ends with one more run at the chosen τ, on training and validation rows
    held_out: float = 0.0  # share of each batch that `bilevel` and `gradient` validate on; 0 for the validation split
    jobs: int | None = None  # runs at a time; None for as many as cores and memory allow

    def __post_init__(self):
        one_of("method", self.method, METHODS)
        one_of("sampler", self.sampler, SAMPLERS)
        for name in ("trials", "parallel"):
            integer_at_least(name, getattr(self, name), 1)
        if self.jobs is not None:
            integer_at_least("jobs", self.jobs, 1)
        if self.folds not in (2, 3):
            raise ValueError(f"folds must be 3, or 2 to choose on the test split, found {self.folds}")
        if not self.grid or any(not 0 < tau < math.inf for tau in self.grid) or len(set(self.grid)) < len(self.grid):
            raise ValueError(f"grid must hold different positive numbers, at least one, found {list(self.grid)}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be in [0, 1), found {self.held_out}")
        if self.held_out and self.method not in FOLLOWING:
            raise ValueError(f"held_out is for {' and '.join(FOLLOWING)}, found method = {self.method}")
        for name, value in (("folds = 2", self.folds == 2), ("retrain", self.retrain)):
            if value and self.method not in SEARCHES:
                raise ValueError(f"{name} is for {' and '.join(SEARCHES)}, found method = {self.method}")
        if self.folds == 2 and self.retrain:
            raise ValueError("folds = 2 and retrain exclude each other: the validation split was not chosen on")
        for method, properties in METHODS.items():
            for name in properties.options:
                default = type(self).__dataclass_fields__[name].default
                if getattr(self, name) != default and self.method != method:
                    raise ValueError(f"{name} is for method = {method}, found {self.method}")

    @property
    def single_training(self) -> bool:
        """Return whether the method takes one run."""
        return not METHODS[self.method].search

    @property
    def needs_validation(self) -> bool:
        """Return whether the method needs validation rows."""
        return METHODS[self.method].validation and not self.held_out

    @property
    def label(self) -> str:
        """Return the name in tables."""
        variants = {" (2 folds)": self.folds == 2, " (+ retrain)": self.retrain}
        variants |= {f" ({100 * self.held_out:.1f} %)": self.held_out > 0, " (val)": self.method == "gradient"}
        return METHODS[self.method].title + next((text for text, applies in variants.items() if applies), "")

    @property
    def split(self) -> str:
        """Return the split on which τ is chosen."""
        return "test" if self.folds == 2 else "validation"


def lengthened(config: TrainConfig, share: float) -> TrainConfig:
    """Lengthen a run by the held-out share of each batch, as in the paper: by 12.5 % for 12.5 %."""
    if not share:
        return config
    if config.steps is not None:
        return dataclasses.replace(config, steps=round(config.steps * (1 + share)))
    assert config.epochs is not None
    return dataclasses.replace(config, epochs=config.epochs * (1 + share))


def trial_at(config: TrainConfig, temperature: float, name: str, directory: Path, data: str) -> PlannedRun:
    """Return a run with a fixed τ."""
    options = {"temperature": f"{temperature:.6g}", "temperature_method": "train", "temperature_held_out": 0.0}
    return PlannedRun(name, dataclasses.replace(config, **options, out=str(directory / name)), data)  # pyright: ignore[reportArgumentType]


def grid_trials(config: TrainConfig, search: Search, directory: Path, data: str) -> list[PlannedRun]:
    """Return one run for each τ of the grid."""
    return [trial_at(config, tau, f"tau-{tau:g}", directory, data) for tau in search.grid]


def single_trial(config: TrainConfig, search: Search, directory: Path, data: str) -> PlannedRun:
    """Return the run of a method that takes only one."""
    if not METHODS[search.method].learned:
        scaled = directory / f"{search.method}-fitted" if search.method == "posthoc" else None
        return dataclasses.replace(trial_at(config, 1.0, search.method, directory, data), scaled=scaled)
    name = search.method if not search.held_out else f"{search.method}-{search.held_out:g}"
    learned = dataclasses.replace(
        lengthened(config, search.held_out),
        temperature="learned",
        temperature_method=search.method,
        temperature_held_out=search.held_out,
        out=str(directory / name),
    )
    return PlannedRun(name, learned, data)


def about(config: TrainConfig) -> dict[str, Any]:
    """Return the options that all trials of a search share, to identify a shared study."""
    own = {
        "out",
        "device",
        "workers",
        "keep",
        "log_every",
        "tensorboard",
        "loggers",
        "temperature",
        "temperature_method",
    }
    values = {key: value for section in config.to_dict().values() for key, value in section.items()}
    return {key: value for key, value in values.items() if key not in own} | {"low": LOW, "high": HIGH}
