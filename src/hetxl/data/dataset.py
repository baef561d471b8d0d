"""What training and evaluation ask of data, whatever it was read from."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from hetxl.data.labels import Labels

InputKind = Literal["features", "tokens", "image"]
SPLITS = ("train", "validation", "test")


class Broken(NamedTuple):
    """An example that could not be read: where it is, and why."""

    path: str
    reason: str


class Fetched(NamedTuple):
    """Some rows of a split.

    Attributes:
        inputs: [b, ...]: features float32, tokens int64 or images float32.
        rows: [b] int64, which rows they are; rows that could not be read are left out.
        broken: those that were.
    """

    inputs: Tensor
    rows: np.ndarray
    broken: Sequence[Broken] = ()


class Shown(NamedTuple):
    """An example as a reader would recognise it: a text, a picture, or both.

    Attributes:
        text: of the example.
        image: the path of a picture.
        pixels: [H, W] or [H, W, 3] uint8, a picture that has no file of its own.
    """

    text: str | None = None
    image: str | None = None
    pixels: np.ndarray | None = None


@dataclass(frozen=True)
class InputSpec:
    """What a backbone gets.

    Attributes:
        kind: "features" [D], "tokens" [C] (ids of the C tokens before the one to predict) or "image" [3, H, W], grey
            ones [1, H, W].
        shape: of one example.
        vocabulary: how many token ids there are; 0 unless the kind is "tokens".
    """

    kind: InputKind
    shape: tuple[int, ...]
    vocabulary: int = 0


class Split(ABC):
    """Examples with their labels. Rows are read when they are asked for, many at a time, in any order.

    Reading has no state: the same rows and seeds give the same inputs, in this process or a worker's.

    Attributes:
        labels: of all rows.
        workers: whether reading is slow enough (pictures) to be done in worker processes.
    """

    labels: Labels
    workers: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows.

        Args:
            rows: [b] int64
            seeds: [b] int64, one for each row, for augmentation; None for none, as in evaluation.
        """

    def show(self, row: int) -> Shown:
        """One example for a reader; nothing unless the data has something to show."""
        return Shown()


@dataclass(frozen=True)
class Dataset:
    """Splits of the same classes.

    Attributes:
        name: for titles.
        input: what a backbone gets.
        class_names: K of them.
        splits: by the names in `SPLITS`; "train" may be missing in data that is only predicted.
        best_nll: the lowest test loss that any model can reach, where that is known.
        notes: what a reader should know: what was left out, how it was split.
    """

    name: str
    input: InputSpec
    class_names: Sequence[str]
    splits: dict[str, Split]
    best_nll: float | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def num_classes(self) -> int:
        """K"""
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        """Whether examples have any number of labels."""
        return any(split.labels.multi for split in self.splits.values())

    def without(self, name: str) -> "Dataset":
        """The same without a split, so that no choice can see it."""
        return dataclasses.replace(self, splits={key: split for key, split in self.splits.items() if key != name})
