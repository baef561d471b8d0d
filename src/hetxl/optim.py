"""Build the optimiser of a model with a head: its parameter groups, and its learning rate over the steps."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn, optim

from hetxl._checks import one_of

SCHEDULES = ("linear", "cosine", "constant")


@dataclass(frozen=True)
class Recipe:
    """An AdamW recipe for a model with a head.

    Attributes:
        learning_rate: peak learning rate.
        weight_decay: of matrices; none on τ, biases and norms.
        temperature_learning_rate: of a learned τ, as a multiple.
        noise_learning_rate: of the covariance, as a multiple.
        noise_weight_decay: of the covariance; None for `weight_decay`.
        warmup: steps of linear warm-up; below 1 a share of all steps.
        warmup_from: learning rate that warm-up starts from.
        schedule: decay to zero, "cosine" or "linear", or "constant".
        beta1: AdamW's first decay rate.
        beta2: AdamW's second decay rate.
        precision: "float16" where gradients are scaled, which a fused step does not support.
    """

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    temperature_learning_rate: float = 0.1
    noise_learning_rate: float = 1.0
    noise_weight_decay: float | None = None
    warmup: float = 0.05
    warmup_from: float = 0.0
    schedule: str = "cosine"
    beta1: float = 0.9
    beta2: float = 0.999
    precision: str = "float32"

    def __post_init__(self):
        one_of("schedule", self.schedule, SCHEDULES)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, found {self.learning_rate}")
        for name in ("weight_decay", "temperature_learning_rate", "noise_learning_rate", "warmup", "warmup_from"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, found {getattr(self, name)}")


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict]:
    """Group parameters by what the recipe does with them; weight decay is off for τ, biases and the gains of norms.

    Returns:
        Groups for an optimiser, each with "name", "scale" (its multiple of the learning rate) and "names". The
        covariance has groups of its own where its recipe is one of its own.
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
        groups[kind]["params"].append(parameter)
        groups[kind]["names"].append(name)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(model: nn.Module, recipe: Recipe) -> optim.AdamW:
    """Return AdamW over the groups; fused where torch supports it, but for scaled gradients."""
    groups = parameter_groups(model, recipe)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda"} and recipe.precision != "float16"
    return optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=fused)


def learning_rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then decay to zero at the last."""
    warmup = round(recipe.warmup * steps) if recipe.warmup < 1 else int(recipe.warmup)
    peak = recipe.learning_rate
    if step < warmup:
        start = min(recipe.warmup_from, peak)
        return start + (peak - start) * (step + 1) / warmup
    if recipe.schedule == "constant":
        return peak
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (1 - done if recipe.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group, to its multiple of a value."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["scale"]
