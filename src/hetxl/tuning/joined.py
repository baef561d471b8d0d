"""Training and validation rows as one split, for the last training of a search."""

import dataclasses

import numpy as np
import torch

from hetxl.data.dataset import Dataset, Fetched, Shown, Split
from hetxl.data.labels import Labels


class Joined(Split):
    """The rows of one split, then those of another.

    Args:
        first: n rows.
        second: m rows of the same kind.
    """

    def __init__(self, first: Split, second: Split):
        if first.labels.multi != second.labels.multi:
            raise ValueError("first and second must both have one label a row, or both lists of them")
        self.first, self.second = first, second
        self.workers = first.workers or second.workers
        self.labels = _joined(first.labels, second.labels)

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b] in their order, each from where it is; those that cannot be read are left out."""
        rows, count = np.asarray(rows), len(self.first)
        inside = rows < count
        parts = []
        for split, chosen, shift in ((self.first, inside, 0), (self.second, ~inside, count)):
            places = np.flatnonzero(chosen)
            if len(places):
                own = None if seeds is None else np.asarray(seeds)[places]
                parts.append((split.fetch(rows[places] - shift, own), shift))
        if len(parts) == 1:
            [(found, shift)] = parts
            return Fetched(found.inputs, found.rows + shift, found.broken)
        inputs = torch.cat([found.inputs for found, _ in parts if len(found.rows)] or [parts[0][0].inputs])
        read = np.concatenate([found.rows + shift for found, shift in parts])
        broken = [item for found, _ in parts for item in found.broken]
        order = _places(read, rows)
        return Fetched(inputs[torch.from_numpy(order)], read[order], broken)

    def show(self, row: int) -> Shown:
        """As the split that the row is of shows it."""
        count = len(self.first)
        return self.first.show(row) if row < count else self.second.show(row - count)


def _places(read: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where each row that was read is, in the order in which rows were asked for; a row may be asked for twice."""
    sorted_read = np.argsort(read, kind="stable")
    wanted = np.argsort(rows, kind="stable")
    kept = wanted[np.isin(rows[wanted], read)]
    return sorted_read[np.argsort(kept, kind="stable")]


def _joined(first: Labels, second: Labels) -> Labels:
    ids = np.concatenate((np.asarray(first.ids), np.asarray(second.ids)))
    if first.offsets is None or second.offsets is None:
        return Labels(ids)
    return Labels(ids, np.concatenate((first.offsets, np.asarray(second.offsets)[1:] + first.offsets[-1])))


def with_validation_joined(dataset: Dataset) -> Dataset:
    """The data with its validation rows among the training rows, and no validation split."""
    if "validation" not in dataset.splits:
        raise ValueError(f"data {dataset.name!r} has no validation split to train on as well")
    splits: dict[str, Split] = {"train": Joined(dataset.splits["train"], dataset.splits["validation"])}
    if "test" in dataset.splits:
        splits["test"] = dataset.splits["test"]
    return dataclasses.replace(dataset, splits=splits)
