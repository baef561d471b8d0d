"""How long a training is."""

import dataclasses

from hetxl.training.config import TrainConfig

LEAST_STEPS = 1000
"""Where nobody says how long: one pass over a few thousand rows would end with the weights that it began with."""
MOST_PASSES = 50.0
"""For which small data is not passed over more often than this."""


def passes_of(config: TrainConfig, rows: int) -> float:
    """How often a training without `steps` goes through this many rows.

    Args:
        config: of the training.
        rows: of its training split.
    """
    if config.epochs is not None:
        return config.epochs
    return max(1.0, min(LEAST_STEPS * config.batch_size / max(rows, 1), MOST_PASSES))


def steps_of(config: TrainConfig, rows: int) -> int:
    """How many steps a training has on this many rows."""
    return config.steps or max(1, round(passes_of(config, rows) * rows / config.batch_size))


def with_length(config: TrainConfig, rows: int) -> TrainConfig:
    """The same with the length that it has on this many rows."""
    return config if config.steps is not None else dataclasses.replace(config, epochs=passes_of(config, rows))


def told_length(config: TrainConfig, rows: int) -> str:
    """In words."""
    steps = steps_of(config, rows)
    return f"{steps:,} steps of {config.batch_size:,}, {steps * config.batch_size / max(rows, 1):.3g} times the data"
