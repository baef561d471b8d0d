"""Build a dataset from inputs and labels as read: match the classes, and draw the splits that are missing."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from hetxl_train.data.dataset import SPLITS, Dataset, InputSpec, Split
from hetxl_train.data.labels import Labels, RawLabels, match_classes, some

UNSPLIT = ""  # key of data that comes without splits
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test"}
SPLIT_NAMES |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""Names of the splits in files, directories and columns."""

HELD_OUT = 0.1  # the share of the training rows that each missing split gets

Inputs = TypeVar("Inputs")


class Part(NamedTuple):
    """Inputs and their labels."""

    inputs: Any  # an array of features [n, D], an `ImageSource` or texts
    labels: RawLabels | None  # of the rows of this part; None for inputs without labels
    rows: np.ndarray | None = None  # the inputs that belong to this part; None for all


class Parts(NamedTuple):
    """What was read: inputs of a kind in parts by split, names for their ids, and notes for the reader."""

    kind: Literal["features", "image", "text"]
    by_split: dict[str, Part]
    class_names: Sequence[str] | None = None
    notes: Sequence[str] = ()


class Plan(NamedTuple):
    """How to build a dataset."""

    seed: int = 0  # the seed of the split, if one is drawn
    classes: Sequence[str] | None = None  # class names of a trained run, or None to use those of the data
    whole: bool = False  # use data without splits as one test split; without `classes`, draw none beside others either


def split_name(path: str | Path, value: Any, number: int) -> str:
    """Return the split that a table's row names by `value`; errors name the row by its number, counted from 1."""
    split = SPLIT_NAMES.get(str(value).strip().lower())
    if split is None:
        raise ValueError(
            f"{path}, row {number} (counted from 1) has the split {value!r}; use train, validation or test"
        )
    return split


def split_in_name(file: str) -> str:
    """Return the split in the name of a file, such as train-00000.tar or test.csv; `UNSPLIT` if there is none."""
    words = re.split(r"[^a-z]+", PurePosixPath(file).stem.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), UNSPLIT)


def split_parts(whole: Part, names: Iterable[str]) -> dict[str, Part]:
    """Return the rows of each split, in ascending order, from the split that each row names."""
    codes = np.fromiter((SPLITS.index(name) for name in names), dtype=np.int8)
    by_split = {name: np.flatnonzero(codes == code).astype(row_type(len(codes))) for code, name in enumerate(SPLITS)}
    return {
        split: Part(whole.inputs, None if whole.labels is None else whole.labels.subset(rows), rows)
        for split, rows in by_split.items()
        if len(rows)
    }


def choose_part(parts: Mapping[str, Inputs], path: Path, split: str) -> Inputs:
    """Return the part for a split: the rows of that split, else those without a split."""
    for key in (split, UNSPLIT):
        if key in parts:
            return parts[key]
    raise ValueError(f"{path} holds {some(parts)} rows, but none for {split}")


def assemble(
    name: str,
    input: InputSpec,
    parts: Mapping[str, tuple[Inputs, RawLabels]],
    make: Callable[[Inputs, Labels, np.ndarray | None], Split],
    plan: Plan,
    class_names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Dataset:
    """Build a dataset from the parts that were read.

    These are inputs and labels by split; rows without a split, under `UNSPLIT`, become training rows. `make` makes a
    split of inputs, the labels of its rows, and the numbers of these rows (None for all). Class names, if any, come in
    the order of the ids.
    """
    parts = dict(parts)
    if UNSPLIT in parts:
        key = "test" if plan.whole and len(parts) == 1 else "train"
        if key in parts:
            raise ValueError(f"{name} has {key} rows and rows without a split; name the split of every row")
        parts[key] = parts.pop(UNSPLIT)
    for split, (_, raw) in parts.items():
        if len(raw) == 0:
            raise ValueError(f"{raw.source} has no rows for the split {split!r}")
    if "train" not in parts and plan.classes is None and not plan.whole:
        raise ValueError(f"{name} has no training rows, found {some(parts)}")
    names, labels = match_classes({split: raw for split, (_, raw) in parts.items()}, class_names, plan.classes)
    splits = {split: make(inputs, labels[split], None) for split, (inputs, _) in parts.items()}
    if "train" in parts:
        source = parts["train"][1].source
        if len(labels["train"].ids) == 0:
            raise ValueError(f"{source} has no label in any row")
        if len(names) < 2 and not labels["train"].multi:
            raise ValueError(f"{source} has a single class, {some(names)}; a classifier needs two or more")
        drawn = plan.classes is not None or not plan.whole
        missing = [split for split in SPLITS if split not in parts and drawn]
        if missing:
            rows = split_rows(labels["train"], len(names), missing, plan.seed)
            for split in ("train", *missing):
                splits[split] = make(parts["train"][0], labels["train"].subset(rows[split]), rows[split])
            notes = (*notes, f"{' and '.join(missing)}: a tenth of the training rows each, drawn with seed {plan.seed}")
        if missing == ["test"] and parts["validation"][1].source != source:
            note = (
                f"validation rows are from {parts['validation'][1].source}, but test rows from {source}: if its labels "
            )
            notes = (*notes, f"{note}are noisier, so are those that the results are measured on; give --test as well")
    ordered = {split: splits[split] for split in SPLITS if split in splits}
    return Dataset(name, input, names, ordered, notes=tuple(notes))


def row_type(count: int) -> type[np.integer]:
    """Return the integer type for the numbers of this many rows: four bytes if these suffice."""
    return np.uint32 if count <= 2**32 else np.int64


def split_rows(
    labels: Labels, num_classes: int, names: Sequence[str] = ("validation", "test"), seed: int = 0
) -> dict[str, np.ndarray]:
    """Return the rows, ascending [n_split], of "train" and of the splits named, a tenth of all for each of these.

    The rows are shuffled by the seed and divided. Every class with at least two rows keeps one in "train": if all of
    them were drawn for other splits, the first one is moved back. A class with one row is not moved.

    Peak memory is the shuffled rows and the sorted parts, in four-byte integers: about 1 GB for 100 million rows.
    """
    count = len(labels)
    size = max(1, round(HELD_OUT * count))
    held = size * len(names)
    if count - held < 1:
        raise ValueError(f"{count} rows are too few to draw {' and '.join(names)} rows from; give these as files")
    order = np.arange(count, dtype=row_type(count))
    np.random.default_rng(seed).shuffle(order)
    # The first held-out row of each class of several rows with none in train goes back.
    total = labels.counts(num_classes)
    indices, classes = labels.entries(order[:held])
    missing = (total >= 2) & (np.bincount(classes, minlength=num_classes) == total)
    candidates = np.flatnonzero(missing[classes])
    back = np.zeros(held, dtype=bool)
    back[indices[candidates[np.unique(classes[candidates], return_index=True)[1]]]] = True
    parts = {"train": np.concatenate((order[held:], order[:held][back]))}
    for number, name in enumerate(names):
        part = slice(number * size, (number + 1) * size)
        parts[name] = order[part][~back[part]]
        if len(parts[name]) == 0:
            raise ValueError(f"{count} rows of {num_classes} classes leave none for {name}; give it as a file")
    return {name: np.sort(rows) for name, rows in parts.items()}
