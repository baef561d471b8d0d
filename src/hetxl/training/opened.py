"""Datasets that a process keeps open: of many trainings in a row most are on the same."""

from collections.abc import Callable, Hashable
from typing import Any

from hetxl.data import Description, describe
from hetxl.data.dataset import Dataset
from hetxl.training.config import TrainConfig

KEPT = 3
"""How many, the last ones."""
_open: dict[Hashable, tuple[Dataset, Description]] = {}


def source_of(config: TrainConfig) -> tuple[Any, ...]:
    """The options that the data of a training depends on: trainings of the same source can share it."""
    return tuple(value for name, value in config.to_dict()["data"].items() if name != "workers")


def opened(source: Hashable, open_it: Callable[[], Dataset]) -> tuple[Dataset, Description]:
    """A dataset and the description of it, opened unless it is open already.

    Args:
        source: what tells it from others.
        open_it: called where it is not among the last ones.
    """
    if source not in _open:
        while len(_open) >= KEPT:
            _open.pop(next(iter(_open)))
        dataset = open_it()
        _open[source] = (dataset, describe(dataset))
    return _open[source]
