"""τ fitted after the training on rows that were held out of it, and measured on others."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl.data.dataset import Split
from hetxl.data.synthetic import FeatureSplit
from hetxl.evaluation.evaluate import evaluate
from hetxl.evaluation.metrics import summarise
from hetxl.evaluation.records import Records
from hetxl.functional import LabelLists
from hetxl.nn import FixedTemperature, Head
from hetxl.training.features import feature_batches
from hetxl.training.order import derive
from hetxl.training.progress import Narrator
from hetxl.training.run import Trained

LOW, HIGH = 0.25, 4.0
"""Where τ is looked for."""
PRECISE = 0.01
"""How exactly, relatively: the loss is flat at its minimum."""
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
            temperatures.append(fit(model.head, features[torch.from_numpy(some)], inside.labels.take(some), seed))
            model.head.temperature = FixedTemperature(temperatures[-1])
            part = FeatureSplit(features[torch.from_numpy(measured)], inside.labels.subset(measured))
            options: dict[str, Any] = {"seed": seed, "device": device, "confusions": False}
            records.append(evaluate(lambda inputs: inputs, model.head, part, progress=_silent, **options).records)
            bar.to(sum(map(len, records)))
    counts = None if trained.class_counts is None else np.asarray(trained.class_counts)
    metrics = summarise(Records.concatenate(records), counts)
    return {**before, "metrics": {"validation": metrics}, "temperature": math.fsum(temperatures) / 2}


@torch.no_grad()
def fit(head: Head, features: Tensor, targets: Tensor | LabelLists, seed: int) -> float:
    """The τ within `LOW` and `HIGH` with the lowest loss; the head's own is left as it was.

    Args:
        head: in evaluation mode.
        features: [n, D]
        targets: of the n examples.
        seed: of the draws, the same ones for every τ.
    """
    kept = head.temperature

    def loss(log_temperature: float) -> float:
        head.temperature = FixedTemperature(math.exp(log_temperature))
        generator = torch.Generator(features.device).manual_seed(seed)
        return float(head.loss(features, targets, generator=generator))

    try:
        return math.exp(golden_section(loss, math.log(LOW), math.log(HIGH), PRECISE))
    finally:
        head.temperature = kept


def golden_section(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Where a function with one minimum between two places has it, to within a width."""
    share = (math.sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - share * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + share * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _silent(done: int, total: int) -> None:
    """Instead of a second bar."""
