"""The labels of a split: one class for each row, or any number of them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetxl.functional import LabelLists


@dataclass(frozen=True)
class Labels:
    """Class ids of n rows.

    Attributes:
        ids: [n] int64 for one label each; [m] for all labels of all rows in turn. May be memory-mapped.
        offsets: [n + 1] int64, row i has ids[offsets[i] : offsets[i + 1]]; None for one label each.
    """

    ids: np.ndarray
    offsets: np.ndarray | None = None

    @property
    def multi(self) -> bool:
        """Whether rows have any number of labels."""
        return self.offsets is not None

    def __len__(self) -> int:
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> Tensor | LabelLists:
        """The targets of some rows, as heads take them: ids [b], or lists of them."""
        if self.offsets is None:
            return torch.from_numpy(np.asarray(self.ids[rows], dtype=np.int64))
        starts, stops = self.offsets[rows], self.offsets[np.asarray(rows) + 1]
        counts = stops - starts
        examples = np.repeat(np.arange(len(rows)), counts)
        # Places of the entries: each row's start, counted up.
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        classes = np.asarray(self.ids[np.repeat(starts, counts) + within], dtype=np.int64)
        return LabelLists(torch.from_numpy(examples), torch.from_numpy(classes), None, len(rows))

    def counts(self, num_classes: int) -> np.ndarray:
        """How many rows have each class, [K]; rows without a label (−100) count for none."""
        total = np.zeros(num_classes, dtype=np.int64)
        for start in range(0, len(self.ids), 2**22):  # in pieces: the ids may be on disk
            piece = np.asarray(self.ids[start : start + 2**22])
            total += np.bincount(piece[piece >= 0], minlength=num_classes)
        return total

    def subset(self, rows: np.ndarray) -> "Labels":
        """The labels of some rows as labels of their own."""
        if self.offsets is None:
            return Labels(np.asarray(self.ids[rows], dtype=np.int64))
        lists = self.take(rows)
        assert isinstance(lists, LabelLists)
        counts = self.offsets[np.asarray(rows) + 1] - self.offsets[rows]
        return Labels(lists.classes.numpy(), np.concatenate(([0], np.cumsum(counts))))
