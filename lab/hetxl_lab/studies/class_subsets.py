"""Parts of a dataset, by name: some classes are kept away from training, to be learned from a few examples later.

"known:5"    all classes but every fifth one
"unknown:5"  every fifth class, numbered anew
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from hetxl_train.data.dataset import Dataset, Fetched, Shown, Split
from hetxl_train.data.labels import Labels

KINDS: tuple[Literal["known"], Literal["unknown"]] = ("known", "unknown")


class View(NamedTuple):
    """Which classes."""

    kind: str  # "known" or "unknown"
    every: int  # one in this many classes is unknown


class PartSplit(Split):
    """Rows [n] of another split, with class ids [n] of their own."""

    def __init__(self, source: Split, rows: np.ndarray, ids: np.ndarray):
        self.source, self.rows = source, rows
        self.labels = Labels(np.asarray(ids, dtype=np.int64))
        self.workers = source.workers

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows as the source reads them; rows that cannot be read are left out."""
        rows = np.asarray(rows, dtype=np.int64)
        fetched = self.source.fetch(self.rows[rows], seeds)
        # The source says which of its rows it read; here they have other numbers.
        own = {int(theirs): int(row) for theirs, row in zip(self.rows[rows], rows, strict=True)}
        read = np.array([own[int(theirs)] for theirs in fetched.rows], dtype=np.int64)
        return Fetched(fetched.inputs, read, fetched.unreadable)

    def show(self, row: int) -> Shown:
        """As the source shows it."""
        return self.source.show(int(self.rows[row]))


def check_view(text: str) -> View | None:
    """Return the view of a name, None for an empty one; raise for anything else."""
    if not text:
        return None
    kind, _, number = text.partition(":")
    if kind not in KINDS or not number.isdigit() or int(number) < 2:
        raise ValueError(f"view must be known:N or unknown:N with N at least 2, found {text!r}")
    return View(kind, int(number))


def apply_view(dataset: Dataset, text: str) -> Dataset:
    """Return the part of a dataset with one label for each row that a view names; all of it for an empty name."""
    view = check_view(text)
    if view is None:
        return dataset
    if dataset.multi_label:
        raise ValueError(f"view {text!r} needs data with one label for each row; {dataset.name} has lists of them")
    classes = np.arange(dataset.num_classes)
    unknown = classes % view.every == view.every - 1
    chosen = classes[unknown == (view.kind == "unknown")]
    if not len(chosen):
        raise ValueError(f"view {text!r} leaves none of the {dataset.num_classes} classes of {dataset.name}")
    ids = np.full(dataset.num_classes, -1, dtype=np.int64)
    ids[chosen] = np.arange(len(chosen))
    splits: dict[str, Split] = {}
    for name, split in dataset.splits.items():
        old = np.asarray(split.labels.ids)
        renamed = np.where(old >= 0, ids[np.maximum(old, 0)], -1)  # [n]
        rows = np.flatnonzero(renamed >= 0)
        splits[name] = PartSplit(split, rows, renamed[rows])
    return dataclasses.replace(
        dataset,
        class_names=[dataset.class_names[index] for index in chosen],
        splits=splits,
        best_nll=None,
        notes=(*dataset.notes, f"classes: {text}"),
    )
