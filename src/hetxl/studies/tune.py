"""DET's learning rate and weight decay, chosen on the validation split before any other head is trained."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hetxl.data.dataset import Dataset
from hetxl.data.describe import Description
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json
from hetxl.training.progress import Narrator
from hetxl.training.tasks import Task, run_tasks

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
    config: TrainConfig,
    directory: Path,
    dataset: Dataset,
    description: Description,
    narrator: Narrator,
    jobs: int | None = None,
) -> Tuned:
    """The learning rate first, then the weight decay at the best of them, each by validation NLL.

    Args:
        config: of the setting; its head, seed and directory are replaced.
        directory: of the runs; those that are finished are not trained again.
        dataset: the test split is taken away, so that no choice can see it.
        description: of the dataset, shown already.
        narrator: tells how far it is.
        jobs: trainings at a time, as for `run_tasks`.
    """
    trials: dict[tuple[float, float], Trial] = {}

    def task(learning_rate: float, weight_decay: float) -> Task:
        chosen = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        place = directory / f"lr{learning_rate:g}-wd{weight_decay:g}"
        one = dataclasses.replace(config, head="det", seed=SEED, out=str(place), **chosen)
        label = f"DET, learning rate {learning_rate:g}, weight decay {weight_decay:g}"
        return Task(one, label, blind=True)

    def losses(wanted: Sequence[tuple[float, float]]) -> list[float]:
        new = {both: task(*both) for both in wanted if both not in trials}
        run_tasks(list(new.values()), dataset, description, jobs=jobs, narrator=narrator)
        for both, one in new.items():
            metrics = read_json(one.place / "result.json")["metrics"]["validation"]
            trials[both] = Trial(*both, float(metrics["nll"]))
        return [trials[both].nll for both in wanted]

    decay = config.weight_decay
    rates = [factor * config.learning_rate for factor in LEARNING_RATES]
    rate = _lowest(lambda some: losses([(one, decay) for one in some]), rates, beyond_both=True)
    decays = sorted({decay, *WEIGHT_DECAYS})
    chosen = _lowest(lambda some: losses([(rate, one) for one in some]), decays, beyond_both=False)
    return Tuned(rate, chosen, list(trials.values()))


def _lowest(costs: Callable[[Sequence[float]], Sequence[float]], values: Sequence[float], beyond_both: bool) -> float:
    """The value of the least cost; an end that is the best is stepped over, until it no longer is, or `REACH` is met.

    Args:
        costs: of some values.
        values: to begin with, from small to large.
        beyond_both: whether to step over the lower end too.
    """
    tried = dict(zip(values, costs(values), strict=True))
    while True:
        best = min(tried, key=tried.__getitem__)
        beyond = best * 2 if best == max(tried) else best / 2 if beyond_both and best == min(tried) else best
        if beyond in tried or not values[0] / REACH <= beyond <= values[-1] * REACH:
            return best
        (tried[beyond],) = costs([beyond])
