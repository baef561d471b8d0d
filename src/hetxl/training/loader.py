"""Batches for training: which rows each process reads for each part of a step, read ahead where that is slow."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hetxl.data.dataset import Fetched, Split
from hetxl.functional import LabelLists
from hetxl.training.order import Order
from hetxl.training.reading import as_it_is


@dataclass(frozen=True)
class Parts:
    """How a step's batch is cut: part `accumulated · processes + rank` of equal size goes to `rank`.

    One process that accumulates 2n parts therefore sees the very parts of two processes that accumulate n.
    """

    batch_size: int
    accumulate: int
    rank: int = 0
    processes: int = 1

    def __post_init__(self):
        if self.batch_size % self.count:
            raise ValueError(
                f"batch_size must be a multiple of accumulate × processes = {self.accumulate} × {self.processes}, "
                f"found {self.batch_size}"
            )

    @property
    def count(self) -> int:
        """Parts of a step over all processes."""
        return self.accumulate * self.processes

    def part(self, accumulated: int) -> int:
        """The number of this process's part within the step."""
        return accumulated * self.processes + self.rank

    def places(self, step: int, accumulated: int) -> tuple[int, int]:
        """Where the part starts and stops in the endless sequence of examples."""
        size = self.batch_size // self.count
        start = step * self.batch_size + self.part(accumulated) * size
        return start, start + size


class _Batches(TorchDataset):
    """Item i is this process's i-th part, counted from the first step."""

    def __init__(self, split: Split, order: Order, parts: Parts):
        self.split, self.order, self.parts = split, order, parts

    def __getitem__(self, index: int) -> tuple[Fetched, Tensor | LabelLists]:
        rows, seeds = self.order.of(*self.parts.places(*divmod(index, self.parts.accumulate)))
        fetched = self.split.fetch(rows, seeds)
        return fetched, self.split.labels.take(fetched.rows)


def batches(
    split: Split, order: Order, parts: Parts, first_step: int, steps: int, workers: int = 0
) -> Iterator[tuple[Fetched, Tensor | LabelLists]]:
    """The parts of this process from a step on, with their targets.

    Args:
        split: the training data.
        order: of its rows.
        parts: how batches are cut.
        first_step: to start from.
        steps: how many there are in all.
        workers: processes that read ahead, for data that is slow to read.
    """
    source = _Batches(split, order, parts)
    numbers = range(first_step * parts.accumulate, steps * parts.accumulate)
    if not split.workers or not workers:
        return (source[number] for number in numbers)
    loader = DataLoader(
        source,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=as_it_is,
        prefetch_factor=4,
        generator=torch.Generator(),  # of the workers' seeds, which nothing uses: torch's own is left alone
    )
    return iter(loader)


def to_device(targets: Tensor | LabelLists, device: torch.device) -> Tensor | LabelLists:
    """Targets where the model is."""
    if isinstance(targets, Tensor):
        return targets.to(device)
    values = None if targets.values is None else targets.values.to(device)
    return LabelLists(targets.examples.to(device), targets.classes.to(device), values, targets.batch)
