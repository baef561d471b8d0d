"""Inputs and labels as read, put together to a dataset: classes matched, missing splits made."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hetxl.data.classes import RawLabels, match_classes, some
from hetxl.data.dataset import SPLITS, Dataset, InputSpec, Split
from hetxl.data.labels import Labels
from hetxl.data.splitting import split_rows

UNSPLIT = ""
"""Key of data that comes without splits."""

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
"""What files, folders and columns call the splits."""

Inputs = TypeVar("Inputs")


def split_name(path: Path, value: Any, number: int) -> str:
    """The split that a row of a table names.

    Args:
        path: of the table, for errors.
        value: what stands in the column.
        number: of the row, counted from 1.
    """
    found = SPLIT_NAMES.get(str(value).strip().lower())
    if found is None:
        raise ValueError(
            f"{path}, row {number} (counted from 1) has the split {value!r}; use train, validation or test"
        )
    return found


class Plan(NamedTuple):
    """How to put a dataset together.

    Attributes:
        seed: of the split, where one is made.
        classes: class names of a trained run, or None to take the data's.
        whole: data without splits is one test split instead of being parted.
    """

    seed: int = 0
    classes: Sequence[str] | None = None
    whole: bool = False


def assemble(
    name: str,
    input: InputSpec,
    parts: Mapping[str, tuple[Inputs, RawLabels]],
    make: Callable[[Inputs, Labels, np.ndarray | None], Split],
    plan: Plan,
    class_names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Dataset:
    """A dataset of the parts that were read.

    Args:
        name: for titles.
        input: what a backbone gets.
        parts: inputs and labels by split; under `UNSPLIT` what comes without one, which counts as training rows.
        make: a split of some inputs, with the labels of its rows, and which rows they are (None for all).
        plan: how.
        class_names: names that come with the data, in the order of its ids.
        notes: what the reading found.
    """
    parts = dict(parts)
    if UNSPLIT in parts:
        key = "test" if plan.whole and len(parts) == 1 else "train"
        if key in parts:
            raise ValueError(f"{name} has rows without a split beside its {key} rows; name the split of all")
        parts[key] = parts.pop(UNSPLIT)
    for split, (_, raw) in parts.items():
        if len(raw) == 0:
            raise ValueError(f"{raw.source} has no rows for the split {split!r}")
    if "train" not in parts and plan.classes is None:
        raise ValueError(f"{name} has no training rows, found {some(parts)}")
    names, labels = match_classes({split: raw for split, (_, raw) in parts.items()}, class_names, plan.classes)
    splits = {split: make(inputs, labels[split], None) for split, (inputs, _) in parts.items()}
    if "train" in parts:
        _check_train(parts["train"][1].source, labels["train"], names)
        missing = [split for split in SPLITS if split not in parts]
        if missing:
            rows = split_rows(labels["train"], len(names), missing, plan.seed)
            for split in ("train", *missing):
                splits[split] = make(parts["train"][0], labels["train"].subset(rows[split]), rows[split])
            notes = (*notes, f"{' and '.join(missing)}: a tenth of the training rows each, drawn with seed {plan.seed}")
    ordered = {split: splits[split] for split in SPLITS if split in splits}
    return Dataset(name, input, names, ordered, notes=tuple(notes))


def _check_train(source: str, labels: Labels, names: Sequence[str]) -> None:
    if len(labels.ids) == 0:
        raise ValueError(f"{source} has no label in any row")
    if len(names) < 2 and not labels.multi:
        raise ValueError(f"{source} has a single class, {some(names)}; a classifier needs two or more")
