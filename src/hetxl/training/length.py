"""How long a training is."""

import dataclasses

from hetxl.data.dataset import Dataset
from hetxl.training.backbones import backbone_name
from hetxl.training.config import TrainConfig

ENOUGH_STEPS = 1000
"""Where nobody says how long: one pass over a few thousand rows would end with the weights that it began with."""
MOST_PASSES = 50.0
"""For which small data is not passed over more often than this, where a network could learn it by heart."""
LEAST_STEPS = 500
"""Of a head alone: 50 passes over a few hundred rows leave it near its start (docs/experiments.md)."""


def passes_of(config: TrainConfig, dataset: Dataset) -> float:
    """How often a training without `steps` goes through its rows.

    Args:
        config: of the training.
        dataset: with a training split.
    """
    if config.epochs is not None:
        return config.epochs
    one_step = config.batch_size / max(_rows(dataset), 1)
    passes = min(ENOUGH_STEPS * one_step, MOST_PASSES)
    if config.frozen or backbone_name(config, dataset.input) == "none":
        passes = max(passes, LEAST_STEPS * one_step)
    return max(1.0, passes)


def steps_of(config: TrainConfig, dataset: Dataset) -> int:
    """How many steps a training has on this data."""
    return config.steps or max(1, round(passes_of(config, dataset) * _rows(dataset) / config.batch_size))


def with_length(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """The same with the length that it has on this data."""
    return config if config.steps is not None else dataclasses.replace(config, epochs=passes_of(config, dataset))


def told_length(config: TrainConfig, dataset: Dataset) -> str:
    """In words."""
    steps = steps_of(config, dataset)
    passes = steps * config.batch_size / max(_rows(dataset), 1)
    return f"{steps:,} steps of {config.batch_size:,}, {passes:.3g} times the data"


def _rows(dataset: Dataset) -> int:
    return len(dataset.splits["train"])
