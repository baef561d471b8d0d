"""Parts of a dataset, by name: some classes are held out of training, to be learned later from a few examples.

"known:5"    all classes but every fifth one
"unknown:5"  every fifth class, renumbered
"""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from hetxl_train.data.dataset import Dataset, PartSplit, Split
from hetxl_train.data.labels import Labels

KINDS: tuple[Literal["known"], Literal["unknown"]] = ("known", "unknown")


class View(NamedTuple):
    """The choice of classes."""

    kind: str  # "known" or "unknown"
    every: int  # one in this many classes is unknown


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
        splits[name] = PartSplit(split, rows, Labels(renamed[rows]))
    return dataclasses.replace(
        dataset,
        class_names=[dataset.class_names[index] for index in chosen],
        splits=splits,
        best_nll=None,
        notes=(*dataset.notes, f"classes: {text}"),
    )
