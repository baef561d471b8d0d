"""The learned scale of the logits of a contrastive loss: what CLIP calls the logit scale, 1 / temperature."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hetxl.functional._checks import positive_float


class LogitScale(nn.Module):
    """exp(t) with t learned, at most `maximum`.

    The bound is part of the forward pass, so a training loop needs no call for it. At the bound a gradient that would
    carry t further up is dropped and one that brings it back is kept: t neither runs away nor gets stuck.

    Args:
        init: exp(t) at the start.
        maximum: the largest scale; 100 in CLIP.
        device: where the parameter is made.
        dtype: of the parameter.
    """

    def __init__(
        self,
        init: float,
        maximum: float = 100.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.init = positive_float("init", init)
        self.maximum = positive_float("maximum", maximum)
        if self.init > self.maximum:
            raise ValueError(f"init must be at most maximum={self.maximum:g}, found {self.init:g}")
        self.raw = nn.Parameter(
            torch.tensor(math.log(self.init), device=device, dtype=dtype or torch.get_default_dtype())
        )

    def forward(self) -> Tensor:
        """The scale, a scalar in at least float32."""
        raw = self.raw if self.raw.dtype == torch.float64 else self.raw.float()
        return _BoundedExp.apply(raw, math.log(self.maximum))

    @torch.no_grad()
    def clamp_(self) -> None:
        """Put t back between 0 and log(maximum), as CLIP's training loops do after every step."""
        self.raw.clamp_(0, math.log(self.maximum))

    def extra_repr(self) -> str:
        """The start and the bound, as shown when the module is printed."""
        return f"init={self.init:g}, maximum={self.maximum:g}"


class _BoundedExp(torch.autograd.Function):
    """exp(min(t, top)), whose gradient at the bound leads back only."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, top: float) -> Tensor:
        value = raw.clamp(max=top).exp()
        ctx.save_for_backward(raw, value)
        ctx.top = top
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        raw, value = ctx.saved_tensors
        found = gradients[0] * value
        # A positive gradient makes a step down.
        return torch.where((raw >= ctx.top) & (found < 0), 0.0, found), None
