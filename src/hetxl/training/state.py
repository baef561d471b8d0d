"""What every training loop does with its state: how far it is, weights and optimiser into a checkpoint and back."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim

from hetxl.training.checkpoint import Checkpoint, CheckpointError, Checkpoints

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Progress:
    """What a run knows beside its weights.

    Attributes:
        step: how many steps are done.
        seconds: spent in them.
        loss_sum: of the steps since the last line of the log.
        loss_count: how many those are.
    """

    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0


def finite(loss: float, step: int, checkpoints: Checkpoints, config: Any) -> float:
    """The loss itself, or an error that says what to change if it is not a number any more.

    Args:
        loss: mean over some steps, or over validation examples.
        step: how many are done.
        checkpoints: of the run.
        config: with `learning_rate` and `clip`.
    """
    if math.isfinite(loss):
        return loss
    steps = checkpoints.steps()
    where = f"; the last checkpoint is of step {steps[-1]}" if steps else ""
    raise FloatingPointError(
        f"the loss is {loss} after step {step}{where}. Lower --learning-rate (now {config.learning_rate:g}), raise "
        f"--warmup, or set --clip below {config.clip or 1:g}"
    )


def tensors_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Weights and the optimiser's moments under the names that a checkpoint gives them.

    Args:
        model: whose parameters are trained.
        optimizer: of groups that have their parameters' "names".
    """
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in _named(optimizer):
        moments = optimizer.state.get(parameter, {})
        found |= {f"optimizer.{key}.{name}": moments[key] for key in MOMENTS if key in moments}
    return found


def load_moments(optimizer: optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's moments into an optimiser.

    Args:
        optimizer: of groups that have their parameters' "names".
        checkpoint: that `tensors_of` was saved in.
    """
    for name, parameter in _named(optimizer):
        stored = {key: checkpoint.tensors[f"optimizer.{key}.{name}"] for key in MOMENTS}
        optimizer.state[parameter] = {
            key: value if key == "step" else value.to(parameter.device, parameter.dtype)
            for key, value in stored.items()
        }


def load_weights(model: nn.Module, checkpoint: Checkpoint, averaged: bool = False) -> None:
    """Put a checkpoint's weights into a model; the averaged ones where there are some, if wanted."""
    state = _with_prefix(checkpoint.tensors, "model.")
    if averaged:
        state |= {
            name: value.to(state[name].dtype) for name, value in _with_prefix(checkpoint.tensors, "average.").items()
        }
    model.load_state_dict(state)


@contextlib.contextmanager
def restoring(checkpoint: Checkpoint) -> Iterator[None]:
    """While it lasts, what does not fit is told as a checkpoint of something else.

    Args:
        checkpoint: that is taken up.
    """
    try:
        yield
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint of step {checkpoint.step} is of another model or version: {' '.join(str(error).split())}; "
            "start in another directory (--out)"
        ) from None


def _named(optimizer: optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
