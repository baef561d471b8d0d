"""Options that depend on what is trained: one rule for the command, comparisons, searches and studies."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._seeds import derive_seed
from hetxl.optim import DEFAULTS, PRIOR, choose_scaling, estimate_flips, prior_steps
from hetxl.registry import head_entry
from hetxl_train.backbones import trained_part
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import InputSpec, Split
from hetxl_train.data.labels import Labels
from hetxl_train.mixing import dense_rows
from hetxl_train.model import Model

MEASURED_ROWS = 100_000
"""Training rows that mean and deviation of the features are measured on."""
PRIOR_ROWS, PRIOR_HELD_OUT, PRIOR_ENTRIES = 20_000, 5_000, 2**26
"""Rows that the prior is chosen on, rows that it is judged by, and entries of their rows of labels (sigmoid), or of the
logits of a batch."""


def with_defaults(config: TrainConfig, spec: InputSpec) -> TrainConfig:
    """Return the configuration with the options filled in that depend on what is trained; the prior stays open."""
    rule = DEFAULTS[part := trained_part(config, spec)]
    linear = config.classifier == "linear"
    noisy = head_entry(config.head).noise and linear and config.temperature_method == "train"
    # Only a prior on a head alone replaces weight decay; classifiers that see few classes at a time have none.
    decay = 0.01 if rule.weight_decay is None and not linear else rule.weight_decay
    decay = 0.0 if decay is None or config.prior is not None else decay
    vectors = (part == "head" or spec.kind == "features") and not config.normalize_features
    values: dict[str, Any] = {
        "learning_rate": rule.learning_rate,
        "noise_learning_rate": rule.noise_learning_rate,
        "noise_start": rule.noise_start if noisy else 0.0,
        "weight_decay": decay,
        "standardize": vectors,
    }
    return dataclasses.replace(
        config, **{name: value for name, value in values.items() if getattr(config, name) is None}
    )


def has_prior(config: TrainConfig, spec: InputSpec) -> bool:
    """Return whether a run has a prior on its head, by its configuration before `with_defaults`."""
    if config.prior is not None:
        return True
    return trained_part(config, spec) == "head" and config.classifier == "linear" and config.weight_decay is None


@torch.no_grad()
def measure_features(model: Model, split: Split) -> None:
    """Measure mean and deviation of the vectors that enter what is trained, on training rows."""
    rows, device = spread_rows(len(split), MEASURED_ROWS), model.device
    batches = (split.fetch(block).inputs.to(device) for block in np.array_split(rows, max(1, len(rows) // 4096)))
    if model.head.standardize is not None:
        model.head.standardize.measure(map(model.backbone, batches))
    elif model.backbone.standardize is not None:
        model.backbone.standardize.measure(batches)


class Fitted(NamedTuple):
    """What a head alone is trained with, as held-out rows decide."""

    prior: float  # variance of the logits
    flip_rate: float  # ε
    deviation: float | None = None  # that all features are divided by; None for each its own


@torch.no_grad()
def fitted_defaults(
    config: TrainConfig,
    model: Model,
    splits: dict[str, Split],
    num_classes: int,
    link: str,
    steps: int,
    *,
    measured: bool = True,
) -> Fitted:
    """Return the prior variance of the logits that is best on held-out rows, and one deviation if that is better.

    With them comes the share of the labels that are flipped, as the configuration has it, or else estimated on training
    rows: labels of the validation split may be better. Features whose scale was not `measured` here keep it.
    """
    each = prior_steps(steps, num_classes * model.head.in_features)
    limit = PRIOR_ROWS if link == "softmax" else min(PRIOR_ROWS, max(1, PRIOR_ENTRIES // num_classes))
    train, held_out = splits["train"], splits.get("validation", splits["train"])
    rows, judges = spread_rows(len(train), limit), spread_rows(len(held_out), min(limit, PRIOR_HELD_OUT))
    if held_out is train:
        judges, rows = rows[::10], np.delete(rows, np.s_[::10])
    too_large = config.batch_size * num_classes > PRIOR_ENTRIES  # all logits of a batch would be in memory at once
    if not each or too_large or not len(rows) or not len(judges):
        return Fitted(config.prior or PRIOR, config.flip_rate or 0.0)
    device, standardize = model.device, model.head.standardize
    fetched = [(split, split.fetch(chosen)) for split, chosen in ((train, rows), (held_out, judges))]
    pairs = [
        (
            (standardize or nn.Identity())(model.backbone(batch.inputs.to(device))),
            _dense(split.labels, batch.rows, num_classes, link).to(device),
        )
        for split, batch in fetched
    ]
    options: dict[str, Any] = {"steps": each, "batch_size": config.batch_size, "seed": derive_seed(config.seed, 17)}
    with torch.enable_grad():
        prior, common = config.prior, None
        if prior is None:
            deviation = standardize.deviation if standardize is not None and measured else None
            rate = config.flip_rate or 0.0
            prior, common = choose_scaling(
                deviation, *pairs[0], *pairs[1], num_classes, link=link, flip_rate=rate, **options
            )
            if deviation is not None and common is not None:
                pairs = [(features * (deviation / common), targets) for features, targets in pairs]
        # ε goes with class ids, which smoothing and mixing replace, and with a τ that the same loss trains.
        soft = config.label_smoothing or config.mixup or config.cutmix or config.temperature_method != "train"
        if config.flip_rate is not None or link != "softmax" or soft:
            return Fitted(prior, config.flip_rate or 0.0, common)
        own, judged = (pairs[0], pairs[1]) if held_out is train else _divided(*pairs[0])
        flips = estimate_flips(*own, *judged, num_classes, prior=prior, **options)
    return Fitted(flips.prior if config.prior is None else config.prior, flips.rate, common)


def _divided(features: Tensor, targets: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return rows with a label, without every tenth, and these."""
    features, targets = features[targets >= 0], targets[targets >= 0]
    judged = torch.arange(len(targets), device=targets.device) % 10 == 0
    return (features[~judged], targets[~judged]), (features[judged], targets[judged])


def spread_rows(rows: int, limit: int) -> np.ndarray:
    """Return at most `limit` of the rows, evenly spread."""
    return np.unique(np.linspace(0, rows - 1, min(rows, limit)).astype(np.int64)) if rows else np.arange(0)


def _dense(labels: Labels, rows: np.ndarray, num_classes: int, link: str) -> Tensor:
    """Return labels as class ids [n], or for the sigmoid link as rows of zeros and ones [n, K]."""
    targets = labels.take(rows)
    return targets if isinstance(targets, Tensor) and link == "softmax" else dense_rows(targets, num_classes)
