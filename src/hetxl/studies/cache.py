"""Trainings of the studies, each in a directory named by its options: the same training is the same run, whichever
study asks for it first."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl.data.dataset import Dataset
from hetxl.studies.pair_trainings import PairTraining
from hetxl.studies.views import apply_view, check_view
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json
from hetxl.training.opened import source_of
from hetxl.training.results import LABELS
from hetxl.training.run import NOT_PART_OF_THE_RUN, check_same
from hetxl.training.tasks import DIVERGED
from hetxl.training.train import open_data

CACHE = Path("runs") / "studies" / "cache"
"""Of the trainings of all studies but those on pairs."""


@dataclass(frozen=True)
class Training:
    """One run that a study needs.

    Attributes:
        config: its options; the directory among them plays no part.
        view: which part of the data it sees, see `hetxl.studies.views`; empty for all of it.
    """

    config: TrainConfig
    view: str = ""

    def __post_init__(self):
        check_view(self.view)

    @property
    def key(self) -> str:
        """A name made of the options that differ from their defaults, so that a new option changes no name."""
        options = {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
            if field.name not in NOT_PART_OF_THE_RUN and getattr(self.config, field.name) != field.default
        }
        text = json.dumps({**options, "view": self.view}, sort_keys=True)
        data = Path(self.config.data.partition(":")[0]).stem or "data"
        return f"{data}-{self.config.head}-seed{self.config.seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return f"{self.config.data} {LABELS[self.config.head]} seed {self.config.seed}"

    @property
    def source(self) -> tuple[Any, ...]:
        """The options that its data depends on: trainings of the same source can share it."""
        return (*source_of(self.config), self.view)

    def open(self) -> Dataset:
        """Its data."""
        return apply_view(open_data(self.config), self.view)

    def check(self, place: Path) -> None:
        """Raise if the run in a directory has other options: its name is made of those that differ from their
        defaults, which may have been others then."""
        if (place / "config.json").exists():
            check_same(self.config, place)


AnyTraining = Training | PairTraining


@dataclass(frozen=True)
class Cache:
    """The directory of all runs of the studies.

    Attributes:
        root: of it.
    """

    root: Path

    def place(self, training: AnyTraining) -> Path:
        """The directory of a training."""
        return self.root / training.key

    def done(self, training: AnyTraining) -> bool:
        """Whether it has ended, well or not; another training in its place is an error."""
        place = self.place(training)
        training.check(place)
        return (place / "result.json").exists() or (place / DIVERGED).exists()

    def result(self, training: AnyTraining) -> dict[str, Any] | None:
        """What it found; None where its loss did not stay finite."""
        place = self.place(training)
        if (place / "result.json").exists():
            return read_json(place / "result.json")
        if (place / DIVERGED).exists():
            return None
        raise FileNotFoundError(f"{place} has no result.json: the training has not ended; run the study again")

    @contextmanager
    def turn(self, training: AnyTraining) -> Iterator[None]:
        """While it lasts no other process works on the training; one that does is waited for."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / f"{training.key}.lock", "w") as file:
            try:
                import fcntl
            except ImportError:  # Windows: two studies at a time are the user's to avoid
                yield
                return
            fcntl.flock(file, fcntl.LOCK_EX)  # the system gives it back if this process is killed
            yield
