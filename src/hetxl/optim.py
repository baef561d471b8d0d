"""How a model with a head is trained: defaults by what is trained, parameter groups, the learning rate over the steps,
the start of the bias, and the prior on a head's weights."""

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
    """How a kind of model is trained unless the user says otherwise.

    Attributes:
        learning_rate: peak learning rate of AdamW.
        noise_learning_rate: of the covariance, as a multiple.
        noise_start: share of the steps before the noise is switched on; the learning rate starts anew there.
        weight_decay: decoupled, of matrices; None for a prior on the head's weights in its place.
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
"""By what is trained: a head on fixed, standardised features; with it a small network from nothing; or a published
backbone that is fine-tuned. Measured in lab/docs/experiments.md."""
NOISE_PRIOR = 30.0
"""Prior variance of what the covariance's layers return, as `prior` is of the logits."""
PRIORS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Prior variances of the logits that `choose_prior` tries, from the strongest prior to the weakest."""
PRIOR = 30.0
"""Where there are no held-out rows to choose by."""
LOGITS = 2**24
"""Held-out logits that `choose_prior` has in memory at a time."""
PRIOR_STEPS = {2**16: (600, 1.5), 2**20: (200, 0.5), math.inf: (200, 0.1)}
"""Steps without noise for each of the priors, and how many all of them may take together as a share of those of the
run, by the largest number of weights."""
ALIKE = 1.25
"""Deviations of features that differ from their mean by less than this factor are not worth two ways to scale."""
MOST_FLIPS = 0.8
"""An estimate above this share of flipped labels is not believed: nothing was learned."""


@dataclass(frozen=True)
class Recipe:
    """How a model with a head is trained.

    Attributes:
        learning_rate: peak learning rate.
        weight_decay: of matrices; none on τ, biases and norms.
        temperature_learning_rate: of a learned τ, as a multiple.
        noise_learning_rate: of the covariance, as a multiple.
        noise_weight_decay: of the covariance; None for `weight_decay`.
        noise_start: share of the steps that train without noise. The schedule starts anew after them.
        warmup: steps of linear warm-up; below 1 a share of all steps.
        warmup_from: learning rate that warm-up starts from.
        schedule: decay to zero, "cosine" or "linear"; "inverse_sqrt", with 1 / √step; or "constant".
        beta1: AdamW's first decay rate; the momentum of "sgd".
        beta2: AdamW's second decay rate.
        precision: "float16" where gradients are scaled, which a fused step does not support.
        optimizer: "adamw" or "sgd", of torch, or the name of one of timm, such as "adafactor", "lamb" or "lion".
        layer_decay: factor of the learning rate from each layer of the backbone to the one below.
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
    """Group parameters by what the recipe does with them; weight decay is off for τ, biases and the gains of norms.

    Args:
        depths: for layer-wise decay, how many layers lie above that of a parameter; 0 for those without.

    Returns:
        Groups for an optimiser, each with "name", "scale" (its multiple of the learning rate) and "names". The
        covariance has groups of its own where its recipe is one of its own, as have the layers with layer-wise decay.
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
        # The head's alone: some backbones have temperatures of their own.
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
    """Return the optimiser of a recipe over the parameters of a model."""
    return optimizer_over(parameter_groups(model, recipe), recipe)


def optimizer_over(groups: list[dict], recipe: Recipe) -> optim.Optimizer:
    """Return the optimiser of a recipe over groups of parameters; steps of AdamW and SGD are fused where torch supports
    it, but for scaled gradients."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda"} and recipe.precision != "float16"
    if recipe.optimizer == "adamw":
        return optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=fused)
    if recipe.optimizer == "sgd":
        # torch has no fused step of SGD for DTensors, which are divided among processes.
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
    """Return the number of steps at the start that train without noise."""
    return round(recipe.noise_start * steps)


def learning_rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then decay to zero at the last.

    Both happen twice if the first steps train without noise: for them, and again for the others.
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
    """Set the learning rate of every group, to its multiple of a value."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["scale"]


@torch.no_grad()
def start_bias(bias: Tensor, counts: Tensor, rows: float) -> None:
    """Start a bias [K] of the sigmoid link at the log-odds of each class, which has counts [K] of the rows."""
    bias.copy_(torch.logit((counts.double() + 0.5) / (rows + 1.0)))


# ---- a prior on the weights of a head


class Penalty(NamedTuple):
    """What the prior adds to the gradient of a parameter: strength · parameter."""

    parameter: nn.Parameter
    strength: float
    noise: bool  # whether it belongs to the covariance


def prior_penalties(head: nn.Module, prior: float, rows: float) -> list[Penalty]:
    """Return the penalties of a Gaussian prior on the matrices of a head, for the mean loss over the training rows.

    With standardised features, weights drawn from N(0, prior / D) give logits of variance `prior`; the covariance's
    layers have `NOISE_PRIOR`. Maximising the posterior adds strength · ‖W‖² / 2 to the mean loss, with

        strength = D / (prior · rows)

    so that noise which the labels give no evidence for vanishes, and the head becomes DET.
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
    """Add the gradient of the prior; without `noise`, to the classifier alone."""
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
    """Return the held-out NLL of a linear classifier by the variance of its prior; the smallest marks the best one.

    One classifier without noise is trained for `steps` with each of `PRIORS`, from the strongest on, every time from
    where it was, and until the NLL rises. With few steps the strongest priors, which start from nothing, are judged
    before they are trained, and weaker ones look better than they are.

    Args:
        features: [n, D], standardised.
        targets: [n] class ids, or [n, K] labels (sigmoid).
        held_out_features: [m, D]
        held_out_targets: [m] or [m, K]
        num_classes: K
        weight: [n], how often each row counts; None for once.
        held_out_weight: [m]
        flip_rate: ε of the labels, as of a head.
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
    """Return the steps that `choose_prior` takes for each prior, by the steps of the run and the weights of its head.

    0 if the run is too short to choose: it takes `PRIOR`.
    """
    most, share = PRIOR_STEPS[min(limit for limit in PRIOR_STEPS if weights <= limit)]
    each = min(most, int(share * steps) // len(PRIORS))
    return each if each >= 10 else 0


class Scaling(NamedTuple):
    """The prior of a head, and the deviation that its features are divided by."""

    prior: float
    common: float | None  # one deviation for all features; None for each its own


def choose_scaling(
    deviation: Tensor | None,
    features: Tensor,
    targets: Tensor,
    held_out_features: Tensor,
    held_out_targets: Tensor,
    num_classes: int,
    **options: Any,
) -> Scaling:
    """Return the prior that suits held-out rows best, and whether one deviation for all features suits them better.

    With a deviation of its own every feature matters alike, which suits columns in different units. With the root mean
    square of all, directions of small variance matter little: principal components and embeddings have their noise
    there. A prior is chosen for either; the second counts if its NLL is lower by 1 %.

    Args:
        deviation: [D], that the features were divided by; None for features whose scale is not to be changed.
        features: as the others of `choose_prior`.
        targets: likewise.
        held_out_features: likewise.
        held_out_targets: likewise.
        num_classes: K
        **options: of `choose_prior`.
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
    """The labels that are drawn from all classes alike, and the prior that suits the other ones."""

    rate: float  # ε; 0 if the labels give it no evidence
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
    """Return ε, the share of the labels that are drawn from all classes alike, by held-out rows with such labels.

    A linear classifier with the prior gives a first ε (`hetxl.functional.flips`). If the labels support it, the prior
    is chosen anew with that ε in the loss; ε counts if it lowers the held-out NLL. Arguments are those of
    `choose_prior`, class ids alone.
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
    """A linear classifier without noise that is trained with one prior after the other."""

    def __init__(
        self, rows: _Rows, num_classes: int, link: str, flip_rate: float, steps: int, batch_size: int, seed: int
    ):
        self.rows, self.link, self.flip_rate = rows, link, flip_rate
        self.steps, self.batch_size = steps, batch_size
        features = rows.features
        options = {"device": features.device, "dtype": features.dtype}
        # Without its own start: the caller's random numbers stay as they are.
        self.classifier = nn.utils.skip_init(nn.Linear, features.shape[1], num_classes, **options)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)
        self.block = max(1, LOGITS // num_classes)  # rows whose logits are in memory at a time
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, prior: float) -> None:
        """Take the steps with a prior, from where the classifier is."""
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
        """Return the mean loss of other rows."""
        sums = [float(self._loss(part) * part.weight.sum()) for part in rows.blocks(self.block)]
        return sum(sums) / float(rows.weight.sum())

    @torch.no_grad()
    def flip_rate_of(self, rows: _Rows) -> FlipRate:
        """Return the estimate of ε by other rows, or by as many of them as one block has."""
        rows = next(rows.blocks(self.block))
        return fit_flip_rate(self.classifier(rows.features), rows.targets, rows.weight)

    def _loss(self, rows: _Rows) -> Tensor:
        """Return the mean loss of rows; for the sigmoid link the sum over the classes."""
        logits = self.classifier(rows.features)
        if self.link == "softmax":
            losses = F.cross_entropy(logits, rows.targets, reduction="none")
            losses = -flipped(-losses, self.flip_rate, logits.shape[1]) if self.flip_rate else losses
        else:
            losses = F.binary_cross_entropy_with_logits(logits, rows.targets.to(logits), reduction="none").sum(-1)
        return (rows.weight * losses).sum() / rows.weight.sum()
