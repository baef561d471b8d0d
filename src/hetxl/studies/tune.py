"""DET's learning rate and weight decay, chosen on the validation split before any other head is trained."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hetxl.data.dataset import Dataset
from hetxl.data.describe import Description
from hetxl.studies.runs import without_test
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json
from hetxl.training.progress import Narrator
from hetxl.training.train import train

LEARNING_RATES = (0.5, 1.0, 2.0)
"""Multiples of the preset's learning rate."""
WEIGHT_DECAYS = (0.01, 0.1, 0.5)
REACH = 8.0
"""Both searches go on beyond an end that is the best, in factors of two, up to this multiple of where they began."""
SEED = 1000
"""Of the tuning runs: none of those that are compared."""


class Trial(NamedTuple):
    """One run of the search."""

    learning_rate: float
    weight_decay: float
    nll: float


class Tuned(NamedTuple):
    """What was chosen, and all that was tried."""

    learning_rate: float
    weight_decay: float
    trials: list[Trial]


def tune_det(
    config: TrainConfig, directory: Path, dataset: Dataset, description: Description, narrator: Narrator
) -> Tuned:
    """The learning rate first, then the weight decay at the best of them, each by validation NLL.

    Args:
        config: of the setting; its head, seed and directory are replaced.
        directory: of the runs; those that are finished are not trained again.
        dataset: the test split is taken away, so that no choice can see it.
        description: of the dataset, shown already.
        narrator: tells how far it is.
    """
    blind = without_test(dataset)
    trials: dict[tuple[float, float], Trial] = {}

    def nll(learning_rate: float, weight_decay: float) -> float:
        if (learning_rate, weight_decay) in trials:
            return trials[learning_rate, weight_decay].nll
        place = directory / f"lr{learning_rate:g}-wd{weight_decay:g}"
        one = dataclasses.replace(
            config,
            head="det",
            seed=SEED,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            out=str(place),
        )
        label = f"DET, learning rate {learning_rate:g}, weight decay {weight_decay:g}"
        run = train(one, dataset=blind, narrator=narrator, label=label, description=description)
        found = float(read_json(run.path / "result.json")["metrics"]["validation"]["nll"])
        trials[learning_rate, weight_decay] = Trial(learning_rate, weight_decay, found)
        return found

    decay = config.weight_decay
    rate = _lowest(
        lambda rate: nll(rate, decay), [factor * config.learning_rate for factor in LEARNING_RATES], beyond_both=True
    )
    chosen = _lowest(lambda other: nll(rate, other), sorted({decay, *WEIGHT_DECAYS}), beyond_both=False)
    return Tuned(rate, chosen, list(trials.values()))


def _lowest(cost: Callable[[float], float], values: Sequence[float], beyond_both: bool) -> float:
    """The value of the least cost; an end that is the best is stepped over, until it no longer is, or `REACH` is met.

    Args:
        cost: of a value.
        values: to begin with, from small to large.
        beyond_both: whether to step over the lower end too.
    """
    tried = {value: cost(value) for value in values}
    while True:
        best = min(tried, key=tried.__getitem__)
        beyond = best * 2 if best == max(tried) else best / 2 if beyond_both and best == min(tried) else best
        if beyond in tried or not values[0] / REACH <= beyond <= values[-1] * REACH:
            return best
        tried[beyond] = cost(beyond)
