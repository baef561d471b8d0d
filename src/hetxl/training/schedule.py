"""The optimiser's parameter groups and its learning rate over the steps."""

import math
from typing import Any

from torch import nn, optim

from hetxl.training.config import TrainConfig


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict]:
    """Parameters by what the recipe does with them; weight decay is off for τ, biases and the gains of norms.

    Returns:
        Groups for an optimiser, each with "name", "scale" (its multiple of the learning rate) and "names". The
        covariance has groups of its own where its recipe is one of its own.
    """
    groups: dict[str, dict[str, Any]] = {
        "decayed": {"weight_decay": config.weight_decay, "scale": 1.0},
        "plain": {"weight_decay": 0.0, "scale": 1.0},
        "temperature": {"weight_decay": 0.0, "scale": config.temperature_learning_rate},
    }
    apart = config.noise_learning_rate != 1 or config.noise_weight_decay is not None
    if apart:
        decay = config.weight_decay if config.noise_weight_decay is None else config.noise_weight_decay
        groups["noise decayed"] = {"weight_decay": decay, "scale": config.noise_learning_rate}
        groups["noise plain"] = {"weight_decay": 0.0, "scale": config.noise_learning_rate}
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


def build_optimizer(model: nn.Module, config: TrainConfig) -> optim.AdamW:
    """AdamW over the groups; in one pass over each parameter where torch has that, but for scaled gradients."""
    groups = parameter_groups(model, config)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda"} and config.precision != "float16"
    return optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


def learning_rate_at(step: int, steps: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then decay to zero at the last."""
    warmup = round(config.warmup * steps) if config.warmup < 1 else int(config.warmup)
    peak = config.learning_rate
    if step < warmup:
        start = min(config.warmup_from, peak)
        return start + (peak - start) * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: optim.Optimizer, value: float) -> None:
    """Give every group its multiple."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["scale"]
