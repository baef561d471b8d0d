"""The ways to choose τ: what each trains, and how tables call it."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl.functional._checks import integer_at_least, one_of
from hetxl.training.config import TrainConfig
from hetxl.tuning.bayes import HIGH, LOW, SAMPLERS
from hetxl.tuning.trial import Trial

GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)
"""The paper's."""
SEARCHES = ("grid", "bayes")
FOLLOWING = ("bilevel", "gradient")
METHODS = (*SEARCHES, *FOLLOWING, "train", "posthoc", "fixed")
"""`fixed` is τ = 1: what all others are to be measured against."""
OF_METHOD = {"grid": "grid", "trials": "bayes", "parallel": "bayes", "sampler": "bayes", "storage": "bayes"}
"""Options that only one of them reads."""
NAMES = {
    "grid": "Grid search",
    "bayes": "Bayesian optimization",
    "bilevel": "Luketina et al.",
    "gradient": "Simple gradient",
    "train": "Simple training",
    "posthoc": "Fitted afterwards",
    "fixed": "τ = 1",
}


@dataclass(frozen=True)
class Search:
    """How τ is to be chosen.

    Attributes:
        method: of `METHODS`.
        grid: values of τ that `grid` trains with.
        trials: trainings of `bayes` in all.
        parallel: of them, asked for at a time.
        sampler: of `bayes`: "auto", "gp" or "tpe".
        storage: of `bayes`, see `hetxl.tuning.bayes.open_storage`.
        folds: 3 to choose on the validation split; 2 to choose on the test split, for the paper's check only.
        retrain: whether the chosen τ of a search is trained with once more, on training and validation rows.
        held_out: share of each batch that `bilevel` and `gradient` validate on; 0 for the validation split.
        jobs: trainings at a time; None for as many as there are cores and memory.
    """

    method: str = "grid"
    grid: Sequence[float] = GRID
    trials: int = 30
    parallel: int = 5
    sampler: str = "auto"
    storage: str | None = None
    folds: int = 3
    retrain: bool = False
    held_out: float = 0.0
    jobs: int | None = None

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
        for name, given in (("folds = 2", self.folds == 2), ("retrain", self.retrain)):
            if given and self.method not in SEARCHES:
                raise ValueError(f"{name} is for {' and '.join(SEARCHES)}, found method = {self.method}")
        if self.folds == 2 and self.retrain:
            raise ValueError("folds = 2 and retrain exclude each other: the validation split was not chosen on")
        for name, method in OF_METHOD.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default and self.method != method:
                raise ValueError(f"{name} is for method = {method}, found {self.method}")

    @property
    def single_training(self) -> bool:
        """Whether one training is enough."""
        return self.method not in SEARCHES

    @property
    def needs_validation(self) -> bool:
        """Whether rows have to be kept from training."""
        return self.method in (*SEARCHES, "posthoc") or (self.method in FOLLOWING and not self.held_out)

    @property
    def label(self) -> str:
        """How tables call it."""
        more = ""
        if self.folds == 2:
            more = " (2 folds)"
        elif self.retrain:
            more = " (+ retrain)"
        elif self.held_out:
            more = f" ({100 * self.held_out:.1f} %)"
        elif self.method == "gradient":
            more = " (val)"
        return NAMES[self.method] + more

    @property
    def split(self) -> str:
        """On which τ is chosen."""
        return "test" if self.folds == 2 else "validation"


def lengthened(config: TrainConfig, share: float) -> TrainConfig:
    """As many more passes as a share of each batch is not trained on, as the paper counts them: 12.5 % for 12.5 %.

    Args:
        config: with `steps` or `epochs`.
        share: of each batch.
    """
    if not share:
        return config
    if config.steps is not None:
        return dataclasses.replace(config, steps=round(config.steps * (1 + share)))
    assert config.epochs is not None
    return dataclasses.replace(config, epochs=config.epochs * (1 + share))


def trial_at(config: TrainConfig, temperature: float, name: str, directory: Path, data: str) -> Trial:
    """A training with a fixed τ."""
    options = {"temperature": f"{temperature:.6g}", "temperature_method": "train", "temperature_held_out": 0.0}
    return Trial(name, dataclasses.replace(config, **options, out=str(directory / name)), data)  # pyright: ignore[reportArgumentType]


def grid_trials(config: TrainConfig, search: Search, directory: Path, data: str) -> list[Trial]:
    """One training for each τ."""
    return [trial_at(config, tau, f"tau-{tau:g}", directory, data) for tau in search.grid]


def single_trial(config: TrainConfig, search: Search, directory: Path, data: str) -> Trial:
    """The one training of a method that is no search."""
    if search.method in ("posthoc", "fixed"):
        fixed = trial_at(config, 1.0, search.method, directory, data)
        return dataclasses.replace(fixed, posthoc=search.method == "posthoc")
    method = search.method if search.method in FOLLOWING else "train"
    name = search.method if not search.held_out else f"{search.method}-{search.held_out:g}"
    one = dataclasses.replace(
        lengthened(config, search.held_out),
        temperature="learned",
        temperature_method=method,
        temperature_held_out=search.held_out,
        out=str(directory / name),
    )
    return Trial(name, one, data)


def about(config: TrainConfig) -> dict[str, Any]:
    """What all trials of a search have in common, for those who share it."""
    left_out = {"out", "device", "workers", "keep", "log_every", "tensorboard", "temperature", "temperature_method"}
    values = {key: value for section in config.to_dict().values() for key, value in section.items()}
    return {key: value for key, value in values.items() if key not in left_out} | {"low": LOW, "high": HIGH}
