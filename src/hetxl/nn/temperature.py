"""The temperature τ that divides the logits: fixed, or learned within bounds."""

import math

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hetxl._checks import positive_float
from hetxl.functional._torch import Factory, take_scalars, to_accumulation_dtype


class FixedTemperature(nn.Module):
    """A constant τ > 0."""

    def __init__(self, value: float = 1.0):
        super().__init__()
        self.value = positive_float("temperature", value)

    def forward(self) -> float:
        """Return τ."""
        return self.value

    def extra_repr(self) -> str:
        """Return τ, shown when the module is printed."""
        return f"{self.value:g}"


class LearnedTemperature(nn.Module):
    """τ(t) = (high − low)·sigmoid(t) + low with a learned parameter t (Appendix "τ parameterization").

    Args:
        low: lower bound of τ, positive.
        high: upper bound of τ.
        init: initial τ, strictly between the bounds; None for the middle, as in the paper.
        **factory: device and dtype of t.
    """

    def __init__(self, low: float = 0.05, high: float = 5.0, init: float | None = None, **factory: Unpack[Factory]):
        super().__init__()
        self.low = positive_float("low", low)
        self.high = positive_float("high", high)
        if self.low >= self.high:
            raise ValueError(f"low must be below high, found low={self.low:g} and high={self.high:g}")
        self.init = (self.low + self.high) / 2 if init is None else positive_float("init", init)
        if not self.low < self.init < self.high:
            raise ValueError(
                f"init must lie strictly between low={self.low:g} and high={self.high:g}, found {self.init:g}"
            )
        # One element, not a scalar: FSDP shards parameters along their first dimension.
        self.raw = nn.Parameter(torch.empty(1, **factory))
        self.register_load_state_dict_pre_hook(take_scalars)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset τ to its initial value."""
        share = (self.init - self.low) / (self.high - self.low)
        nn.init.constant_(self.raw, math.log(share / (1 - share)))

    def forward(self) -> Tensor:
        """Return τ, a scalar tensor."""
        return (self.high - self.low) * torch.sigmoid(to_accumulation_dtype(self.raw)).reshape(()) + self.low

    def extra_repr(self) -> str:
        """Return the bounds, shown when the module is printed."""
        return f"low={self.low:g}, high={self.high:g}, init={self.init:g}"


def as_temperature(temperature: float | nn.Module) -> nn.Module:
    """Return a FixedTemperature for a number; return a module unchanged."""
    if isinstance(temperature, nn.Module):
        return temperature
    if temperature in ("auto", "learned"):
        # The choice depends on the data and the number of steps, which a head does not know.
        raise ValueError(
            f"temperature must be a positive number or a module such as LearnedTemperature(), found {temperature!r}; "
            '"auto" and "learned" are options of training: hetxl train --temperature, TrainConfig(temperature=...)'
        )
    return FixedTemperature(temperature)
