"""A moving average of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """average ← decay · average + (1 − decay) · weights after every step, in float32.

    The decay is smaller in the first steps, (1 + t) / (10 + t), so that the start is forgotten.

    Args:
        model: whose trained parameters are averaged.
        decay: in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = {name: value.detach().float().clone() for name, value in _trained(model)}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take the weights after a step, counted from 0."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, value in _trained(model):
            self.values[name].lerp_(value.detach().float(), share)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put averages back."""
        for name, value in self.values.items():
            value.copy_(values[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        kept = {name: value.detach().clone() for name, value in _trained(model)}
        try:
            self._write(model, self.values)
            yield
        finally:
            self._write(model, kept)

    @torch.no_grad()
    def _write(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        for name, value in _trained(model):
            value.copy_(values[name])


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)
