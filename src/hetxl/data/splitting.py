"""Validation and test rows for data that has none of its own."""

from collections.abc import Sequence

import numpy as np

from hetxl.data.labels import Labels
from hetxl.functional import LabelLists

HELD_OUT = 0.1
"""The share of the rows that each split gets which has to be taken from the training rows."""


def row_type(count: int) -> type[np.integer]:
    """The integers that number so many rows: of four bytes where these are enough."""
    return np.uint32 if count <= 2**32 else np.int64


def split_rows(
    labels: Labels, num_classes: int, wanted: Sequence[str] = ("validation", "test"), seed: int = 0
) -> dict[str, np.ndarray]:
    """Part rows into "train" and the splits wanted, a tenth of the rows for each.

    The rows are shuffled by the seed and cut. Every class that has two rows or more keeps one in "train": where all of
    them were drawn for the others, the first goes back. A class with one row is left where it fell.

    It holds the shuffled rows and the sorted parts, each in integers of four bytes: about 1 GB for 100 million rows.

    Args:
        labels: of the rows.
        num_classes: K
        wanted: the splits to make beside "train".
        seed: the same seed gives the same split.

    Returns:
        [n_split] row numbers in ascending order, for "train" and each wanted split.
    """
    count = len(labels)
    size = max(1, round(HELD_OUT * count))
    held = size * len(wanted)
    if count - held < 1:
        raise ValueError(f"{count} rows are too few to take {' and '.join(wanted)} rows from; give these as files")
    order = np.arange(count, dtype=row_type(count))
    np.random.default_rng(seed).shuffle(order)
    back = _needed_in_train(labels, num_classes, order[:held])
    parts = {"train": np.concatenate((order[held:], order[:held][back]))}
    for number, name in enumerate(wanted):
        part = slice(number * size, (number + 1) * size)
        parts[name] = order[part][~back[part]]
        if len(parts[name]) == 0:
            raise ValueError(f"{count} rows of {num_classes} classes leave none for {name}; give it as a file")
    return {name: np.sort(rows) for name, rows in parts.items()}


def _needed_in_train(labels: Labels, num_classes: int, held: np.ndarray) -> np.ndarray:
    """Which of the held-out rows go back, [held] bool: the first of each class that has more rows and none in train."""
    total = labels.counts(num_classes)
    places, classes = _entries(labels, held)
    missing = (total >= 2) & (np.bincount(classes, minlength=num_classes) == total)
    candidates = np.flatnonzero(missing[classes])
    _, first = np.unique(classes[candidates], return_index=True)
    back = np.zeros(len(held), dtype=bool)
    back[places[candidates[first]]] = True
    return back


def _entries(labels: Labels, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The labels of some rows: which of the rows, and which class."""
    targets = labels.take(rows)
    if isinstance(targets, LabelLists):
        return targets.examples.numpy(), targets.classes.numpy()
    return np.arange(len(rows)), targets.numpy()
