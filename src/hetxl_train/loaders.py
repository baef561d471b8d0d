"""Read rows: their order in training, the division of batches into parts, and the rows of an evaluation.

Worker processes prefetch data that is slow to read.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hetxl._checks import integer_at_least
from hetxl._seeds import derive_seed, splitmix64
from hetxl.functional import LabelLists
from hetxl_train.data.dataset import Fetched, Split

Feed = Iterator[tuple[Fetched, Tensor | LabelLists]]
Reader = Callable[[Iterable[np.ndarray]], Iterable[Fetched]]
ROUNDS = 6


class Order:
    """A random order of n rows for every epoch: a Feistel network over the numbers below the next power of four,
    applied until the result is below n. Nothing is stored, so an epoch of 100 million rows needs no memory, and a run
    resumes in the middle of it immediately.

        naive: np.random.default_rng((seed, epoch)).permutation(n)[start:stop]
    """

    def __init__(self, rows: int, seed: int):
        self.rows, self.seed = integer_at_least("rows", rows, 1), seed
        bits = max(2, int(rows - 1).bit_length())
        self.half = np.uint64((bits + 1) // 2)
        self.mask = np.uint64((1 << int(self.half)) - 1)

    def of(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at positions start..stop of the endless sequence of epochs, and a seed for each.

        Returns:
            rows: [stop − start] int64
            seeds: [stop − start] int64, for augmentation, different for the same row in each epoch.
        """
        places = np.arange(start, stop, dtype=np.int64)
        epochs = places // self.rows
        rows = np.empty(len(places), dtype=np.int64)
        seeds = np.empty(len(places), dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            rows[inside] = self._permuted(places[inside] % self.rows, int(epoch))
            key = np.uint64(derive_seed(self.seed, int(epoch), 1))
            seeds[inside] = (splitmix64(rows[inside].astype(np.uint64) ^ key) >> np.uint64(1)).astype(np.int64)
        return rows, seeds

    def _permuted(self, places: np.ndarray, epoch: int) -> np.ndarray:
        if self.rows == 1:
            return np.zeros_like(places)
        keys = [np.uint64(derive_seed(self.seed, epoch, 2, number)) for number in range(ROUNDS)]
        values = self._network(places.astype(np.uint64), keys)
        outside = values >= np.uint64(self.rows)
        while outside.any():  # at most four times as many numbers as rows, so a few iterations
            values[outside] = self._network(values[outside], keys)
            outside = values >= np.uint64(self.rows)
        return values.astype(np.int64)

    def _network(self, values: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        left, right = values >> self.half, values & self.mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) & self.mask)
        return (left << self.half) | right


@dataclass(frozen=True)
class Parts:
    """The division of a step's batch: part `accumulated · processes + rank` of equal size goes to `rank`.

    One process that accumulates 2n parts therefore sees the same parts as two processes that accumulate n.
    """

    batch_size: int
    accumulate: int
    rank: int = 0
    processes: int = 1

    def __post_init__(self):
        if self.batch_size % self.count:
            product = f"{self.accumulate} × {self.processes}"
            raise ValueError(
                f"batch_size must be a multiple of accumulate × processes = {product}, found {self.batch_size}"
            )

    @property
    def count(self) -> int:
        """Return the number of parts of a step, over all processes."""
        return self.accumulate * self.processes

    def difference(self, processes: int, accumulate: int) -> str:
        """Describe what differs from a run with other numbers of processes and accumulated parts; empty if nothing."""
        if (processes, accumulate) == (self.processes, self.accumulate):
            return ""
        change = (
            f", in {self.processes} × {self.accumulate} (processes × accumulate) instead of {processes} × {accumulate}"
        )
        if processes * accumulate == self.count:
            return f"{change}: equal up to the rounding of sums"
        return f"{change}: noise and dropout are drawn for each part of a batch, so other draws follow from here"

    def part(self, accumulated: int) -> int:
        """Return the index of this process's part within the step."""
        return accumulated * self.processes + self.rank

    def places(self, step: int, accumulated: int) -> tuple[int, int]:
        """Return the start and stop of the part in the endless sequence of examples."""
        size = self.batch_size // self.count
        start = step * self.batch_size + self.part(accumulated) * size
        return start, start + size


class _Items(TorchDataset):
    """A dataset of the results of a function of the index."""

    def __init__(self, get: Callable[[Any], Any]):
        self.get = get

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)


def _part(split: Split, order: Order, parts: Parts, index: int) -> tuple[Fetched, Tensor | LabelLists]:
    """Return this process's part by its index since the first step."""
    rows, seeds = order.of(*parts.places(*divmod(index, parts.accumulate)))
    fetched = split.fetch(rows, seeds)
    return fetched, split.labels.take(fetched.rows)


def batches(
    split: Split, order: Order, parts: Parts, first_step: int, steps: int, workers: int = 0, pin: bool = False
) -> Feed:
    """Yield the parts of this process from a step on, with their targets; workers prefetch data that is slow to read.

    `pin` puts inputs into pinned memory, so that copies to a CUDA device are asynchronous.
    """
    part = functools.partial(_part, split, order, parts)
    indices = range(first_step * parts.accumulate, steps * parts.accumulate)
    if not split.workers or not workers:
        return map(_pinned, map(part, indices)) if pin else map(part, indices)
    return iter(_loader(part, indices, workers, prefetch_factor=4, pin_memory=pin))


def _pinned(item: tuple[Fetched, Tensor | LabelLists]) -> tuple[Fetched, Tensor | LabelLists]:
    fetched, targets = item
    return fetched._replace(inputs=fetched.inputs.pin_memory()), targets


def blocks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Split rows into blocks of a size; the last block may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def reader(split: Split, workers: int) -> Reader:
    """Return a function that reads batches of rows in order, in worker processes if reading is slow."""
    if not split.workers or not workers:
        return functools.partial(map, split.fetch)

    def read(requests: Iterable[np.ndarray]) -> Iterable[Fetched]:
        rows = list(requests)
        return _loader(split.fetch, rows, min(workers, len(rows)))

    return read


def to_device(targets: Tensor | LabelLists, device: torch.device) -> Tensor | LabelLists:
    """Return targets on a device."""
    if isinstance(targets, Tensor):
        return targets.to(device)
    values = None if targets.values is None else targets.values.to(device)
    return LabelLists(targets.examples.to(device), targets.classes.to(device), values, targets.batch)


def _loader(get: Callable[[Any], Any], indices: Sequence[Any], workers: int, **options: Any) -> DataLoader:
    return DataLoader(
        _Items(get),
        batch_size=None,
        sampler=indices,
        num_workers=workers,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # for unused seeds of workers, to keep torch's random state
        **options,
    )


def _unchanged(item: object) -> object:
    return item
