"""Reading the rows of an evaluation, in worker processes where a row is slow to read."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hetxl.data.dataset import Fetched, Split

Reader = Callable[[Iterable[np.ndarray]], Iterable[Fetched]]


class _Requests(TorchDataset):
    def __init__(self, split: Split, rows: list[np.ndarray]):
        self.split, self.rows = split, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Fetched:
        return self.split.fetch(self.rows[index])


def as_it_is(item: object) -> object:
    """What a loader does with what a worker read."""
    return item


def reader(split: Split, workers: int) -> Reader | None:
    """What reads batches of rows in their order; None to read them in this process."""
    if not split.workers or not workers:
        return None

    def read(batches: Iterable[np.ndarray]) -> Iterable[Fetched]:
        requests = _Requests(split, list(batches))
        return DataLoader(
            requests,
            batch_size=None,
            num_workers=min(workers, len(requests)),
            collate_fn=as_it_is,
            generator=torch.Generator(),  # of the workers' seeds, which nothing uses: torch's own is left alone
        )

    return read
