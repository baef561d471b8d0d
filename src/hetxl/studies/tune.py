"""DET's learning rate and weight decay, chosen on the validation split before any other head is trained."""

import dataclasses
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
"""Multiples of the preset's learning rate; the search goes on beyond an end that is the best."""
WEIGHT_DECAYS = (0.01, 0.1, 0.5)
SEED = 1000
"""Of the tuning runs: none of those that are compared."""
FURTHEST = 8.0


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
    tried = {factor: nll(factor * config.learning_rate, decay) for factor in LEARNING_RATES}
    while True:
        best = min(tried, key=tried.__getitem__)
        beyond = best * 2 if best == max(tried) else best / 2 if best == min(tried) else best
        if beyond in tried or not 1 / FURTHEST <= beyond <= FURTHEST:
            break
        tried[beyond] = nll(beyond * config.learning_rate, decay)
    rate = best * config.learning_rate
    decays = {decay: tried[best]}
    decays |= {other: nll(rate, other) for other in WEIGHT_DECAYS if other not in decays}
    chosen = min(decays, key=decays.__getitem__)
    return Tuned(rate, chosen, list(trials.values()))
