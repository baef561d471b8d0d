"""Train a model with a head: defaults for each kind of model, parameter groups, learning rate schedule, initial bias,
and the prior on a head's weights."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from hetxl._checks import needing, one_of
from hetxl.functional.flips import FlipRate, fit_flip_rate, flipped

SCHEDULES = ("linear", "cosine", "inverse_sqrt", "constant")


@dataclass(frozen=True)
class Defaults:
    """Default hyper-parameters for a kind of model.

    Attributes:
        learning_rate: peak learning rate of AdamW.
        noise_learning_rate: learning rate of the covariance, as a multiple of `learning_rate`.
        noise_start: share of the steps that train without noise; the learning rate schedule restarts after them.
        weight_decay: decoupled weight decay of matrices; None uses a prior on the head's weights instead.
        steps: number of steps on small data.
    """

    learning_rate: float
    noise_learning_rate: float = 1.0
    noise_start: float = 0.0
    weight_decay: float | None = 0.01
    steps: int = 1000


DEFAULTS = {
    "head": Defaults(0.02, noise_learning_rate=0.3, noise_start=0.3, weight_decay=None, steps=2000),
    "network": Defaults(2e-3),
    "backbone": Defaults(1e-4),
}
"""Defaults for a head on fixed, standardised features, for a small network trained from scratch, and for fine-tuning a
published backbone. lab/docs/experiments.md has the measurements."""
NOISE_PRIOR = 30.0
"""Prior variance of the outputs of the covariance's layers; `prior` is the prior variance of the logits."""
PRIORS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Prior variances of the logits that `choose_prior` tries, strongest prior first."""
PRIOR = 30.0
"""Prior variance without held-out rows to choose it on."""
LOGITS = 2**24
"""Maximum number of held-out logits that `choose_prior` keeps in memory."""
PRIOR_STEPS = {2**16: (600, 1.5), 2**20: (200, 0.5), math.inf: (200, 0.1)}
"""By the largest number of weights: steps without noise per prior, and the maximum for all priors together, as a share
of the run's steps."""
ALIKE = 1.25
"""If all deviations differ from their mean by less than this factor, only one scaling is tried."""
MOST_FLIPS = 0.8
"""An estimated share of flipped labels above this is rejected, because the classifier has not learned anything."""


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters to train a model with a head.

    Attributes:
        learning_rate: peak learning rate.
        weight_decay: decoupled weight decay of matrices; τ, biases and norms have none.
        temperature_learning_rate: learning rate of a learned τ, as a multiple of `learning_rate`.
        noise_learning_rate: learning rate of the covariance, as a multiple of `learning_rate`.
        noise_weight_decay: weight decay of the covariance; None for `weight_decay`.
        noise_start: share of the steps that train without noise. The schedule restarts after them.
        warmup: steps of linear warm-up; a value below 1 is a share of all steps.
        warmup_from: learning rate at the first warm-up step.
        schedule: "cosine" or "linear" decay to zero, "inverse_sqrt" decay with 1 / √step, or "constant".
        beta1: AdamW's first decay rate, or the momentum of "sgd".
        beta2: AdamW's second decay rate.
        precision: "float16" scales the gradients, which fused optimiser steps do not support.
        optimizer: "adamw" or "sgd" of torch, or the name of an optimiser of timm, such as "adafactor" or "lion".
        layer_decay: factor by which the learning rate shrinks with each layer of the backbone, from top to bottom.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    temperature_learning_rate: float = 0.1
    noise_learning_rate: float = 1.0
    noise_weight_decay: float | None = None
    noise_start: float = 0.0
    warmup: float = 0.05
    warmup_from: float = 0.0
    schedule: str = "cosine"
    beta1: float = 0.9
    beta2: float = 0.999
    precision: str = "float32"
    optimizer: str = "adamw"
    layer_decay: float = 1.0

    def __post_init__(self):
        one_of("schedule", self.schedule, SCHEDULES)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, found {self.learning_rate}")
        for name in ("weight_decay", "temperature_learning_rate", "noise_learning_rate", "warmup", "warmup_from"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, found {getattr(self, name)}")


def parameter_groups(model: nn.Module, recipe: Recipe, depths: Mapping[str, int] | None = None) -> list[dict]:
    """Group parameters by their learning rate and weight decay; τ, biases and the gains of norms have no weight decay.

    Args:
        depths: for layer-wise decay, the number of layers above a parameter's layer [default: 0].

    Returns:
        Groups for an optimiser, each with "name", "scale" (its multiple of the learning rate) and "names". The
        covariance, and each layer under layer-wise decay, have separate groups if their values differ.
    """
    groups: dict[str, dict[str, Any]] = {
        "decayed": {"weight_decay": recipe.weight_decay, "scale": 1.0},
        "plain": {"weight_decay": 0.0, "scale": 1.0},
        "temperature": {"weight_decay": 0.0, "scale": recipe.temperature_learning_rate},
    }
    apart = recipe.noise_learning_rate != 1 or recipe.noise_weight_decay is not None
    if apart:
        decay = recipe.weight_decay if recipe.noise_weight_decay is None else recipe.noise_weight_decay
        groups["noise decayed"] = {"weight_decay": decay, "scale": recipe.noise_learning_rate}
        groups["noise plain"] = {"weight_decay": 0.0, "scale": recipe.noise_learning_rate}
    for name, group in groups.items():
        group.update(name=name, params=[], names=[])
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "decayed" if parameter.dim() > 1 else "plain"
        # Only the head's temperature; some backbones have parameters of that name.
        if name.startswith(("head.temperature.", "temperature.")):
            kind = "temperature"
        elif apart and name.startswith(("head.covariance.", "covariance.")):
            kind = f"noise {kind}"
        if recipe.layer_decay != 1 and (depth := (depths or {}).get(name, 0)):
            shared, kind = groups[kind], f"{kind}, {depth} below the head"
            scale = shared["scale"] * recipe.layer_decay**depth
            groups.setdefault(kind, {**shared, "scale": scale, "name": kind, "params": [], "names": []})
        groups[kind]["params"].append(parameter)
        groups[kind]["names"].append(name)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(model: nn.Module, recipe: Recipe) -> optim.Optimizer:
    """Return a recipe's optimiser for the parameters of a model."""
    return optimizer_over(parameter_groups(model, recipe), recipe)


def optimizer_over(groups: list[dict], recipe: Recipe) -> optim.Optimizer:
    """Return a recipe's optimiser for groups of parameters. AdamW and SGD use fused steps where torch supports them,
    except with scaled gradients."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda"} and recipe.precision != "float16"
    if recipe.optimizer == "adamw":
        return optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=fused)
    if recipe.optimizer == "sgd":
        # torch has no fused SGD step for DTensors, which are divided among processes.
        fused &= not any(hasattr(parameter, "device_mesh") for group in groups for parameter in group["params"])
        return optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.beta1, fused=fused)
    return _timm_optimizer(groups, recipe)


def _timm_optimizer(groups: list[dict], recipe: Recipe) -> optim.Optimizer:
    with needing(f"optimizer {recipe.optimizer!r} needs timm", "'hetxl[timm]'"):
        from timm.optim import create_optimizer_v2, list_optimizers
    if recipe.optimizer not in (known := list_optimizers()):
        near = difflib.get_close_matches(recipe.optimizer, known, 1, 0.0)
        raise ValueError(
            f"optimizer must be adamw, sgd or one of timm's, found {recipe.optimizer!r}; did you mean {near[0]!r}?"
        )
    return create_optimizer_v2(groups, opt=recipe.optimizer, lr=recipe.learning_rate, momentum=recipe.beta1)


def noise_free_steps(steps: int, recipe: Recipe) -> int:
    """Return the number of initial steps that train without noise."""
    return round(recipe.noise_start * steps)


def learning_rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then decay to zero at the last step.

    If the first steps train without noise, the schedule runs once for these steps and once for the others.
    """
    first = noise_free_steps(steps, recipe)
    step, steps = (step, first) if step < first else (step - first, steps - first)
    warmup = round(recipe.warmup * steps) if recipe.warmup < 1 else int(recipe.warmup)
    peak = recipe.learning_rate
    if step < warmup:
        start = min(recipe.warmup_from, peak)
        return start + (peak - start) * (step + 1) / warmup
    if recipe.schedule == "constant":
        return peak
    if recipe.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / (step + 1)) if step >= warmup else peak
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (1 - done if recipe.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group to its multiple of `value`."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["scale"]


@torch.no_grad()
def start_bias(bias: Tensor, counts: Tensor, rows: float) -> None:
    """Initialise a bias [K] of the sigmoid link with the log-odds of the classes, from counts [K] among the rows."""
    bias.copy_(torch.logit((counts.double() + 0.5) / (rows + 1.0)))


# ---- a prior on the weights of a head


class Penalty(NamedTuple):
    """The term strength · parameter that the prior adds to the gradient of a parameter."""

    parameter: nn.Parameter
    strength: float
    noise: bool  # whether it belongs to the covariance


def prior_penalties(head: nn.Module, prior: float, rows: float) -> list[Penalty]:
    """Return the penalties of a Gaussian prior on the matrices of a head, for the mean loss over the training rows.

    With standardised features, weights drawn from N(0, prior / D) give logits of variance `prior`; the covariance's
    layers have `NOISE_PRIOR`. Maximising the posterior adds strength · ‖W‖² / 2 to the mean loss, with

        strength = D / (prior · rows)

    Noise without evidence in the labels therefore vanishes, and the head becomes DET.
    """
    penalties = []
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            noise = name.startswith("covariance.")
            fan_in = parameter.shape[0 if name == "covariance.factor" else 1]  # J is [R, N]: R terms of each sum
            penalties.append(Penalty(parameter, fan_in / ((NOISE_PRIOR if noise else prior) * rows), noise))
    return penalties


@torch.no_grad()
def add_prior(penalties: Sequence[Penalty], noise: bool) -> None:
    """Add the gradient of the prior; without `noise`, only to the classifier."""
    for penalty in penalties:
        if penalty.parameter.grad is not None and (noise or not penalty.noise):
            penalty.parameter.grad.add_(penalty.parameter, alpha=penalty.strength)


def choose_prior(
    features: Tensor,
    targets: Tensor,
    held_out_features: Tensor,
    held_out_targets: Tensor,
    num_classes: int,
    *,
    weight: Tensor | None = None,
    held_out_weight: Tensor | None = None,
    link: str = "softmax",
    flip_rate: float = 0.0,
    steps: int = 600,
    batch_size: int = 256,
    seed: int = 0,
) -> dict[float, float]:
    """Return the held-out NLL of a linear classifier for each prior variance; the smallest NLL marks the best prior.

    One classifier without noise is trained for `steps` steps with each of `PRIORS`, strongest first, continuing from
    its previous weights, until the NLL rises. With few steps, the strongest priors, which start from initial weights,
    are judged before they are trained, and weaker ones look better than they are.

    Args:
        features: [n, D], standardised.
        targets: [n] class ids, or [n, K] labels (sigmoid).
        held_out_features: [m, D]
        held_out_targets: [m] or [m, K]
        num_classes: K
        weight: [n], weight of each row; None for 1.
        held_out_weight: [m]
        flip_rate: ε of the labels, as in `hetxl.nn.Head`.
    """
    train, held_out = (
        _Rows.of(features, targets, weight),
        _Rows.of(held_out_features, held_out_targets, held_out_weight),
    )
    fit = _LinearFit(train, num_classes, link, flip_rate, steps, batch_size, seed)
    losses: dict[float, float] = {}
    for prior in PRIORS:
        fit.train(prior)
        losses[prior] = fit.loss(held_out)
        if losses[prior] > 1.01 * min(losses.values()):
            break
    return losses


def best_prior(losses: Mapping[float, float]) -> float:
    """Return the variance where the parabola over log(variance) through the smallest loss and its neighbours is lowest.

    It lies between the neighbours. At an end of the priors tried it is that end.
    """
    priors = sorted(losses)
    index = priors.index(min(priors, key=losses.__getitem__))
    if not 0 < index < len(priors) - 1:
        return priors[index]
    left, middle, right = (math.log(prior) for prior in priors[index - 1 : index + 2])
    low, best, high = (losses[prior] for prior in priors[index - 1 : index + 2])
    down, up = (best - low) / (middle - left), (high - best) / (right - middle)  # slopes halfway to the neighbours
    if not up > down:
        return priors[index]  # all three are equal
    return math.exp((left + middle) / 2 - down / (up - down) * (right - left) / 2)


def prior_steps(steps: int, weights: int) -> int:
    """Return the steps that `choose_prior` takes per prior, from the steps of the run and the weights of its head.

    0 if the run is too short to choose; it then uses `PRIOR`.
    """
    most, share = PRIOR_STEPS[min(limit for limit in PRIOR_STEPS if weights <= limit)]
    each = min(most, int(share * steps) // len(PRIORS))
    return each if each >= 10 else 0


class Scaling(NamedTuple):
    """The prior of a head, and the deviation that divides its features."""

    prior: float
    common: float | None  # one deviation for all features; None for separate deviations


def choose_scaling(
    deviation: Tensor | None,
    features: Tensor,
    targets: Tensor,
    held_out_features: Tensor,
    held_out_targets: Tensor,
    num_classes: int,
    **options: Any,
) -> Scaling:
    """Return the prior with the lowest held-out NLL, and one deviation for all features if that lowers the NLL.

    Separate deviations give all features equal weight, which suits columns in different units. A common deviation, the
    root mean square, gives directions of small variance little weight, which suits principal components and embeddings,
    whose noise is there. A prior is chosen for each; the common deviation must lower the NLL by 1 %.

    Args:
        deviation: [D], which divided the features; None to keep their scale.
        features: see `choose_prior`.
        targets: see `choose_prior`.
        held_out_features: see `choose_prior`.
        held_out_targets: see `choose_prior`.
        num_classes: K
        **options: options of `choose_prior`.
    """
    own = choose_prior(features, targets, held_out_features, held_out_targets, num_classes, **options)
    prior = best_prior(own)
    varies = features.std(0, correction=0) > 0
    if deviation is None or not varies.any():
        return Scaling(prior, None)
    common = float(deviation[varies].double().square().mean().sqrt())
    factor = torch.where(varies, deviation / common, 1.0)
    if factor.min() > 1 / ALIKE and factor.max() < ALIKE:
        return Scaling(prior, None)
    other = choose_prior(
        features * factor, targets, held_out_features * factor, held_out_targets, num_classes, **options
    )
    if min(other.values()) < 0.99 * min(own.values()):
        return Scaling(best_prior(other), common)
    return Scaling(prior, None)


class Flips(NamedTuple):
    """The estimated share of uniformly random labels, and the prior for the other labels."""

    rate: float  # ε; 0 without evidence for it
    prior: float


def estimate_flips(
    features: Tensor,
    targets: Tensor,
    held_out_features: Tensor,
    held_out_targets: Tensor,
    num_classes: int,
    *,
    prior: float,
    weight: Tensor | None = None,
    held_out_weight: Tensor | None = None,
    steps: int = 600,
    batch_size: int = 256,
    seed: int = 0,
) -> Flips:
    """Estimate ε, the share of uniformly random labels, on held-out rows.

    A linear classifier with the prior gives a first ε (`hetxl.functional.flips`). If that ε is significant, the prior
    is chosen again with ε in the loss, and ε is kept if it lowers the held-out NLL. The arguments are those of
    `choose_prior`; targets must be class ids.
    """
    train, held_out = (
        _Rows.of(features, targets, weight),
        _Rows.of(held_out_features, held_out_targets, held_out_weight),
    )
    options: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seed": seed}
    plain = _LinearFit(train, num_classes, "softmax", 0.0, **options)
    plain.train(prior)
    first = plain.flip_rate_of(held_out)
    if not first.significant or first.rate > MOST_FLIPS:
        return Flips(0.0, prior)
    robust = choose_prior(*train[:2], *held_out[:2], num_classes, weight=train.weight, held_out_weight=held_out.weight,
                          flip_rate=first.rate, **options)  # fmt: skip
    chosen = best_prior(robust)
    if min(robust.values()) >= plain.loss(held_out):
        return Flips(0.0, prior)
    second = _LinearFit(train, num_classes, "softmax", first.rate, **options)
    second.train(chosen)
    again = second.flip_rate_of(held_out)
    return Flips(again.rate if 0 < again.rate <= MOST_FLIPS else first.rate, chosen)


class _Rows(NamedTuple):
    """Rows with labels and weights."""

    features: Tensor  # [n, D]
    targets: Tensor  # [n] or [n, K]
    weight: Tensor  # [n]

    @staticmethod
    def of(features: Tensor, targets: Tensor, weight: Tensor | None) -> "_Rows":
        return _Rows(features, targets, features.new_ones(len(features)) if weight is None else weight)

    def blocks(self, size: int) -> Iterator["_Rows"]:
        """Yield blocks of rows."""
        return (_Rows(*parts) for parts in zip(*(part.split(size) for part in self), strict=True))


class _LinearFit:
    """A linear classifier without noise, trained with a sequence of priors."""

    def __init__(
        self, rows: _Rows, num_classes: int, link: str, flip_rate: float, steps: int, batch_size: int, seed: int
    ):
        self.rows, self.link, self.flip_rate = rows, link, flip_rate
        self.steps, self.batch_size = steps, batch_size
        features = rows.features
        options = {"device": features.device, "dtype": features.dtype}
        # No random initialisation, so that the caller's random state does not change.
        self.classifier = nn.utils.skip_init(nn.Linear, features.shape[1], num_classes, **options)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)
        self.block = max(1, LOGITS // num_classes)  # rows whose logits fit in memory
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, prior: float) -> None:
        """Train further with a prior, starting from the current weights."""
        recipe, (features, targets, weight) = Recipe(DEFAULTS["head"].learning_rate, weight_decay=0.0), self.rows
        optimizer = build_optimizer(self.classifier, recipe)
        penalties = prior_penalties(self.classifier, prior, float(weight.sum()))
        order = torch.empty(0, dtype=torch.int64)
        for step in range(self.steps):
            if len(order) < min(self.batch_size, len(features)):
                order = torch.randperm(len(features), generator=self.generator)
            batch, order = order[: self.batch_size].to(features.device), order[self.batch_size :]
            set_learning_rate(optimizer, learning_rate_at(step, self.steps, recipe))
            optimizer.zero_grad()
            self._loss(_Rows(features[batch], targets[batch], weight[batch])).backward()
            add_prior(penalties, noise=False)
            optimizer.step()

    @torch.no_grad()
    def loss(self, rows: _Rows) -> float:
        """Return the mean loss of rows."""
        sums = [float(self._loss(part) * part.weight.sum()) for part in rows.blocks(self.block)]
        return sum(sums) / float(rows.weight.sum())

    @torch.no_grad()
    def flip_rate_of(self, rows: _Rows) -> FlipRate:
        """Estimate ε on rows, using at most one block of them."""
        rows = next(rows.blocks(self.block))
        return fit_flip_rate(self.classifier(rows.features), rows.targets, rows.weight)

    def _loss(self, rows: _Rows) -> Tensor:
        """Return the mean loss of rows, summed over the classes for the sigmoid link."""
        logits = self.classifier(rows.features)
        if self.link == "softmax":
            losses = F.cross_entropy(logits, rows.targets, reduction="none")
            losses = -flipped(-losses, self.flip_rate, logits.shape[1]) if self.flip_rate else losses
        else:
            losses = F.binary_cross_entropy_with_logits(logits, rows.targets.to(logits), reduction="none").sum(-1)
        return (rows.weight * losses).sum() / rows.weight.sum()
