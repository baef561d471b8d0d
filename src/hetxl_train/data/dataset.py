"""The interface of datasets for runs, evaluations and reports, for all kinds of data."""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from torch import Tensor

from hetxl._files import read_arrays, write_arrays
from hetxl_train.data.labels import Labels, printable
from hetxl_train.data.transforms import GREY, ImageTransform, Preprocessing
from hetxl_train.formatting import listed

if TYPE_CHECKING:
    from typing_extensions import Self

InputKind = Literal["features", "tokens", "image", "text"]
SPLITS = ("train", "validation", "test")
MAX_LISTED = 20  # unreadable examples that an error message lists


class Unreadable(NamedTuple):
    """An example that could not be read: its path, and why."""

    path: str
    reason: str


class Fetched(NamedTuple):
    """Rows that were read from a split."""

    inputs: Tensor  # [b, ...]: features float32, tokens int64 or images float32
    rows: np.ndarray  # [b] int64, the numbers of these rows, without those that could not be read
    unreadable: Sequence[Unreadable] = ()


class Shown(NamedTuple):
    """An example to show: a text, an image, or both."""

    text: str | None = None
    image: str | None = None  # the path of an image
    pixels: np.ndarray | None = None  # [H, W] or [H, W, 3] uint8, an image without a file of its own
    encoded: bytes | None = None  # the content of an image file that is part of another file


@dataclass(frozen=True)
class InputSpec:
    """The input of a backbone: features [D], tokens [C] (ids of the C preceding tokens), an image [3, H, W] or
    [1, H, W], or a text of at most [L] token ids, padded with −1.
    """

    kind: InputKind
    shape: tuple[int, ...]  # the shape of one example
    vocabulary: int = 0  # the number of token ids; 0 unless the kind is "tokens" or "text"
    image: Preprocessing | None = None  # how image files become inputs; None for inputs that are not read from images

    @property
    def transform(self) -> ImageTransform:
        """Return the transform of images to these inputs, without augmentation."""
        plain = Preprocessing() if self.shape[0] == 3 else GREY
        return ImageTransform(self.shape[-1], self.image or plain)


class Split(ABC):
    """Examples with their labels. Rows are read on demand, many at a time, in any order.

    Reading has no state: the same rows and seeds give the same inputs, in this process or in a worker.
    """

    labels: Labels
    workers: bool = False  # whether reading is slow enough (images) to be done in worker processes

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b] int64; seeds [b] int64, one for each row, augment them: None for evaluation."""

    def show(self, row: int) -> Shown:
        """Return an example for a reader; empty unless the data has something to show."""
        return Shown()

    def name(self, row: int) -> str | None:
        """Return the path or the text of an example, without reading an image."""
        shown = self.show(row)
        return shown.image or shown.text


class RelabelledSplit(Split):
    """A split with different labels, and the inputs and shown examples of its source."""

    def __init__(self, source: Split, labels: Labels) -> None:
        self.source, self.labels, self.workers = source, labels, source.workers

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows of the source."""
        return self.source.fetch(rows, seeds)

    def show(self, row: int) -> Shown:
        """Return an example of the source."""
        return self.source.show(row)


class PartSplit(Split):
    """Some rows [n] of another split, with the same or different labels."""

    def __init__(self, source: Split, rows: np.ndarray, labels: Labels | None = None):
        self.source, self.rows, self.workers = source, np.asarray(rows, dtype=np.int64), source.workers
        self.labels = source.labels.subset(self.rows) if labels is None else labels

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows as the source reads them; rows that cannot be read are left out."""
        rows = np.asarray(rows, dtype=np.int64)
        fetched = self.source.fetch(self.rows[rows], seeds)
        # Convert the source's row numbers to those of this split.
        own = {int(theirs): int(row) for theirs, row in zip(self.rows[rows], rows, strict=True)}
        read = np.array([own[int(theirs)] for theirs in fetched.rows], dtype=np.int64)
        return Fetched(fetched.inputs, read, fetched.unreadable)

    def show(self, row: int) -> Shown:
        """Show a row as the source does."""
        return self.source.show(int(self.rows[row]))


class Stored:
    """A dataclass of arrays [m] int64, numbers and texts with a .npz file, which records changes of the data."""

    what: ClassVar[str]  # it holds, for errors

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .npz file atomically."""
        write_arrays(Path(path), vars(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Self":
        """Read a file written by `save`."""
        columns: dict[str, type] = {item.name: item.type for item in dataclasses.fields(cls)}  # pyright: ignore
        if not Path(path).is_file():
            raise FileNotFoundError(f"{os.fspath(path)} does not exist; hetxl train writes it")
        try:
            values = read_arrays(Path(path), list(columns))
        except ValueError as error:
            message = f"{os.fspath(path)} holds no {cls.what} ({error}); write it with {cls.__name__}.save"
            raise ValueError(message) from None
        arrays = {name: values[name] for name, kind in columns.items() if kind is np.ndarray}
        if len({array.shape for array in arrays.values()} | {(len(values["rows"]),)}) > 1:
            shapes = ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays.values())
            raise ValueError(f"{os.fspath(path)} must have {listed(list(arrays))} of int64 [m], found {shapes}")
        return cls(**{name: value if name in arrays else value.item() for name, value in values.items()})


@dataclass(frozen=True)
class Dataset:
    """Splits of the same classes."""

    name: str
    input: InputSpec
    class_names: Sequence[str]  # K names
    splits: dict[str, Split]  # by the names in `SPLITS`; data that is only predicted may lack "train"
    best_nll: float | None = None  # the lowest test loss that any model can reach, if known
    notes: Sequence[str] = field(default_factory=tuple)  # for the reader: what was left out, how rows were split
    not_for_training: str | None = None  # why no classifier can learn these labels, and what to use instead

    @property
    def num_classes(self) -> int:
        """K"""
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        """Return whether examples have several labels."""
        return any(split.labels.multi for split in self.splits.values())

    def without(self, name: str) -> "Dataset":
        """Return the dataset without a split, so that no choice can depend on it."""
        return dataclasses.replace(self, splits={key: split for key, split in self.splits.items() if key != name})


class UnreadableExamples:
    """Collect unreadable examples; a few are skipped, too many stop the run.

    At most `share` of the rows may be unreadable, checked after `minimum` rows and by `finish`. The full list is
    written to `path`, if any, by `finish` and before an error.
    """

    def __init__(self, share: float = 0.01, minimum: int = 100, path: Path | None = None) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, found {share}")
        self.share, self.minimum, self.path = share, minimum, path
        self.seen = self.count = 0
        self._by_path: dict[str, Unreadable] = {}

    @property
    def examples(self) -> list[Unreadable]:
        """The unreadable examples so far, each path once."""
        return list(self._by_path.values())

    def add(self, fetched: Fetched) -> None:
        """Count fetched rows; raise a ValueError if too many were unreadable."""
        self.seen += len(fetched.rows) + len(fetched.unreadable)
        self.count += len(fetched.unreadable)
        for example in fetched.unreadable:
            self._by_path.setdefault(example.path, example)
        if self.seen >= self.minimum:
            self._check()

    def state(self) -> dict[str, Any]:
        """Return the counts and the list for JSON, so that a run that resumes counts on."""
        return {"seen": self.seen, "count": self.count, "examples": [list(example) for example in self.examples]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.seen, self.count = int(state["seen"]), int(state["count"])
        self._by_path = {path: Unreadable(path, reason) for path, reason in state["examples"]}

    def finish(self) -> None:
        """Write the list at the end of an epoch; raise a ValueError if too many rows were unreadable."""
        self._write()
        self._check()

    def _check(self) -> None:
        if self.count <= self.share * self.seen:
            return
        self._write()
        lines = [f"{printable(example.path)}: {printable(example.reason)}" for example in self.examples]
        more = [f"and {len(lines) - MAX_LISTED:,} more"] if len(lines) > MAX_LISTED else []
        where = f"; the full list is in {self.path}" if self.path is not None else ""
        raise ValueError(
            f"{self.count:,} of {self.seen:,} examples could not be read, more than {self.share:.1%}{where}. Repair "
            "them or leave them out:\n  " + "\n  ".join([*lines[:MAX_LISTED], *more])
        )

    def _write(self) -> None:
        if self.path is not None and self._by_path:
            lines = (f"{printable(example.path)}\t{printable(example.reason)}\n" for example in self.examples)
            self.path.write_text("".join(lines), encoding="utf-8")
