"""τ fitted after the training on rows that were held out of it, and measured on others."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hetxl.data.dataset import Split
from hetxl.data.synthetic import FeatureSplit
from hetxl.evaluation.evaluate import evaluate
from hetxl.evaluation.metrics import summarise
from hetxl.evaluation.records import Records
from hetxl.evaluation.scaling import fit_temperature
from hetxl.nn import FixedTemperature
from hetxl.training.features import feature_batches
from hetxl.training.order import derive
from hetxl.training.progress import Narrator
from hetxl.training.run import Trained

FITTED = 1000
"""Rows that τ is fitted on, at most."""


def fitted_result(
    trained: Trained, split: Split, rows: np.ndarray, before: Mapping[str, Any], narrator: Narrator
) -> dict[str, Any]:
    """The result of a run with a τ that its training did not see.

    The rows are halved. τ is fitted on one half and the loss measured on the other, and the other way round, so that
    the result is of all rows, like that of the run itself.

    Args:
        trained: the run.
        split: held out of its training.
        rows: of it, [n]
        before: the result of the run itself.
        narrator: shows how far it is.
    """
    model, config = trained.model, trained.run.config
    device = next(model.parameters()).device
    found = list(feature_batches(model.backbone, split, rows, config.workers, device))
    features = torch.cat([part for part, _ in found]).to(device)
    inside = FeatureSplit(features, split.labels.subset(np.concatenate([part for _, part in found])))
    seed = derive(config.seed, 15)
    halves = [np.arange(start, len(inside), 2) for start in (0, 1)]
    records, temperatures = [], []
    with narrator.bar("τ on held-out rows", len(inside)) as bar:
        for fitted, measured in (halves, halves[::-1]):
            some = fitted[:: -(-len(fitted) // FITTED)]
            few = [features[torch.from_numpy(some)]]
            temperatures.append(fit_temperature(model.head, few, inside.labels.take(some), seed=seed))
            model.head.temperature = FixedTemperature(temperatures[-1])
            part = FeatureSplit(features[torch.from_numpy(measured)], inside.labels.subset(measured))
            options: dict[str, Any] = {"seed": seed, "device": device, "confusions": False}
            records.append(evaluate(lambda inputs: inputs, model.head, part, progress=_silent, **options).records)
            bar.to(sum(map(len, records)))
    counts = None if trained.class_counts is None else np.asarray(trained.class_counts)
    metrics = summarise(Records.concatenate(records), counts)
    return {**before, "metrics": {"validation": metrics}, "temperature": math.fsum(temperatures) / 2}


def _silent(done: int, total: int) -> None:
    """Instead of a second bar."""
