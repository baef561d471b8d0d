"""Options that depend on what is trained: one rule for the command, comparisons, searches and studies."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._seeds import derive_seed
from hetxl.optim import DEFAULTS, PRIOR, PRIORS, Flips, choose_prior, estimate_flips
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
PRIOR_STEPS, SMALL_HEAD = 200, 2**20
"""Steps for each of the priors, and the weights up to which they may take half as many as the run together, without
noise; those of larger heads take a tenth. Runs of a few steps take `PRIOR`."""


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


@torch.no_grad()
def prior_of(
    config: TrainConfig, model: Model, splits: dict[str, Split], num_classes: int, link: str, steps: int
) -> Flips:
    """Return the prior variance of the logits that is best on held-out rows, for features as the head gets them.

    With it comes the share of the labels that are flipped, as the configuration has it, or else estimated on training
    rows: labels of the validation split may be better.
    """
    small = num_classes * model.head.in_features <= SMALL_HEAD
    each = min(PRIOR_STEPS, steps // ((2 if small else 10) * len(PRIORS)))
    limit = PRIOR_ROWS if link == "softmax" else min(PRIOR_ROWS, max(1, PRIOR_ENTRIES // num_classes))
    train, held_out = splits["train"], splits.get("validation", splits["train"])
    rows, judges = spread_rows(len(train), limit), spread_rows(len(held_out), min(limit, PRIOR_HELD_OUT))
    if held_out is train:
        judges, rows = rows[::10], np.delete(rows, np.s_[::10])
    too_large = config.batch_size * num_classes > PRIOR_ENTRIES  # all logits of a batch would be in memory at once
    if each < 10 or too_large or not len(rows) or not len(judges):
        return Flips(config.flip_rate or 0.0, config.prior or PRIOR)
    device, standardize = model.device, model.head.standardize or nn.Identity()
    fetched = [(split, split.fetch(chosen)) for split, chosen in ((train, rows), (held_out, judges))]
    pairs = [
        (
            standardize(model.backbone(batch.inputs.to(device))),
            _dense(split.labels, batch.rows, num_classes, link).to(device),
        )
        for split, batch in fetched
    ]
    options: dict[str, Any] = {"steps": each, "batch_size": config.batch_size, "seed": derive_seed(config.seed, 17)}
    with torch.enable_grad():
        prior = config.prior
        if prior is None:
            losses = choose_prior(
                *pairs[0], *pairs[1], num_classes, link=link, flip_rate=config.flip_rate or 0.0, **options
            )
            prior = min(losses, key=losses.__getitem__)
        # ε goes with class ids, which smoothing and mixing replace, and with a τ that the same loss trains.
        soft = config.label_smoothing or config.mixup or config.cutmix or config.temperature_method != "train"
        if config.flip_rate is not None or link != "softmax" or soft:
            return Flips(config.flip_rate or 0.0, prior)
        own, judged = (pairs[0], pairs[1]) if held_out is train else _divided(*pairs[0])
        flips = estimate_flips(*own, *judged, num_classes, prior=prior, **options)
    return flips if config.prior is None else flips._replace(prior=config.prior)


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
