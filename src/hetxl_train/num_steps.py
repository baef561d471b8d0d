"""The number of steps of a classifier's run."""

import dataclasses

from hetxl.optim import DEFAULTS
from hetxl_train.backbones import trained_part
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import Dataset

ENOUGH_STEPS = DEFAULTS["network"].steps
"""Default number of steps: one epoch over a few thousand rows would barely move the weights."""
MOST_EPOCHS = 50.0
"""Limit of the epochs for that, on small data that a network could memorise."""
LEAST_STEPS = DEFAULTS["head"].steps
"""For a head alone, whatever the number of epochs: its prior keeps it from overfitting (lab/docs/experiments.md)."""


def epochs_for(config: TrainConfig, dataset: Dataset) -> float:
    """Return the number of epochs of a run without `steps`."""
    if config.epochs is not None:
        return config.epochs
    one_step = config.batch_size / max(_rows(dataset), 1)
    epochs = min(ENOUGH_STEPS * one_step, MOST_EPOCHS)
    if trained_part(config, dataset.input) == "head":
        epochs = max(epochs, LEAST_STEPS * one_step)
    return max(1.0, epochs)


def steps_for(config: TrainConfig, dataset: Dataset) -> int:
    """Return the number of steps of a run on this data."""
    return config.steps or max(1, round(epochs_for(config, dataset) * _rows(dataset) / config.batch_size))


def with_length(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """Return the configuration with its length on this data filled in."""
    return config if config.steps is not None else dataclasses.replace(config, epochs=epochs_for(config, dataset))


def describe_length(config: TrainConfig, dataset: Dataset) -> str:
    """Return the length of a run in words."""
    steps = steps_for(config, dataset)
    epochs = steps * config.batch_size / max(_rows(dataset), 1)
    return f"{steps:,} steps of {config.batch_size:,}, {epochs:.3g} epochs"


def _rows(dataset: Dataset) -> int:
    return len(dataset.splits["train"])
