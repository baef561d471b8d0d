"""What training does with a learned τ beside following the loss: a prior on it, and a start that is held."""

import torch
from torch import nn, optim

from hetxl.training.config import TrainConfig


def is_held(step: int, steps: int, config: TrainConfig) -> bool:
    """Whether τ still stays at its start in a step, counted from 0."""
    return step < round(config.temperature_hold * steps)


def add_prior(temperature: nn.Module, weight: float) -> None:
    """Add the gradient of weight · (log τ)² to that of τ's parameters; nothing where τ is not learned.

    The loss that is reported stays the likelihood's.

    Args:
        temperature: of a head, with the gradients of the mean loss, not scaled.
        weight: of the penalty, in units of the mean loss.
    """
    parameters = [parameter for parameter in temperature.parameters() if parameter.requires_grad]
    if not parameters or not weight:
        return
    with torch.enable_grad():
        penalty = weight * torch.log(temperature()).square()
    for parameter, gradient in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def hold(temperature: nn.Module) -> None:
    """Before the gradient is clipped: τ has no part in its norm, and none in the step."""
    for parameter in temperature.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def forget(temperature: nn.Module, optimizer: optim.Optimizer) -> None:
    """After a step in which τ was held: the optimiser knows of none, and begins afresh when τ is let go."""
    for parameter in temperature.parameters():
        for value in optimizer.state.get(parameter, {}).values():
            value.zero_()
