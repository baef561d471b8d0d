"""W in fewer bytes, for prediction: bfloat16, or int8 with a scale for each class."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import one_of
from hetxl.classifiers.linear import LinearClassifier, RowsClassifier
from hetxl.functional import Affine, Targets, Weights
from hetxl.functional._torch import slices, to_accumulation_dtype
from hetxl.nn.classifier import NoisyFeatures, is_plain_linear

Format = Literal["bf16", "int8"]
FORMATS: tuple[Format, ...] = ("bf16", "int8")

BLOCK = 65_536  # number of classes whose rows are in full precision at the same time


class QuantizedWeight:
    """A stand-in for W [K, D] that dequantises the requested rows.

    Rows are codes [K, D], bfloat16 or int8, times the scale of each class [K], if any.
    """

    def __init__(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype):
        self.codes, self.scales, self.dtype = codes, scales, dtype
        self.shape, self.device, self.requires_grad = codes.shape, codes.device, False

    def __getitem__(self, classes: slice | Tensor) -> Tensor:
        """Return rows [..., D] of classes [...]."""
        rows = self.codes[classes].to(self.dtype)
        return rows if self.scales is None else rows.mul_(self.scales[classes].unsqueeze(-1))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute W φ + b in blocks of classes, the only supported operation on all of W."""
        if function is not F.linear:
            return NotImplemented
        features, weight = args[:2]
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        logits = torch.cat([features @ weight[block].T for block in slices(weight.shape[0], BLOCK)], -1)
        return logits if bias is None else logits + bias


class QuantizedClassifier(RowsClassifier):
    """A linear classifier whose W takes half or a quarter of the memory, for prediction only.

    Args:
        classifier: source of W and b, an nn.Linear or a `LinearClassifier`.
        weight: "bf16" or "int8"

    >>> QuantizedClassifier(LinearClassifier(64, 1000), "int8")(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    codes: Tensor
    scales: Tensor | None
    bias: Tensor | None

    def __init__(self, classifier: LinearClassifier | nn.Linear, weight: Format = "int8"):
        one_of("weight", weight, FORMATS)
        with torch.no_grad():
            affine = _affine_of(classifier)
            super().__init__(classifier.in_features, len(affine.weight))
            self.format, self.normalized = weight, getattr(classifier, "normalized", False)
            self.full = affine.weight.dtype
            scales = None
            if weight == "int8":
                # In float32: in bfloat16 the largest weight over its scale would round to 128, outside of int8.
                wide = to_accumulation_dtype(affine.weight)
                scales = wide.abs().amax(-1).clamp_(min=torch.finfo(wide.dtype).tiny) / 127
                codes = (wide / scales.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
            else:
                codes = affine.weight.to(torch.bfloat16)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if affine.bias is None else affine.bias.detach().clone())

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that features must have: that of the original classifier, or the dtype of a later cast."""
        return self.full

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedClassifier":
        """Apply casts to the dequantised rows; the codes only move between devices."""
        self.full = fn(torch.empty(0, dtype=self.full)).dtype
        codes, self.codes = self.codes, self.codes[:0]
        super()._apply(fn, recurse)
        device = self.codes.device
        # Only `to_empty` leaves the meta device, and it guarantees no values.
        self.codes = torch.empty_like(codes, device=device) if codes.is_meta else codes.to(device)
        return self

    def affine(self) -> Affine:
        """Return W, whose rows are dequantised on access, and b."""
        weight: Any = QuantizedWeight(self.codes, self.scales, self.full)
        return Affine(weight, self.bias)

    @torch.no_grad()
    def log_probs(self, noisy: NoisyFeatures) -> Tensor:
        """Return averaged log-probabilities [..., K], without gradients (sigmoid: logits of the mean probabilities)."""
        return super().log_probs(noisy)

    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Raise, because a quantised classifier cannot be trained."""
        raise ValueError("QuantizedClassifier cannot be trained; compute losses with the original classifier")

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        return f"{super().extra_repr()}, weight={self.format!r}"


def _affine_of(classifier: LinearClassifier | nn.Linear) -> Affine:
    if isinstance(classifier, LinearClassifier):
        return classifier.affine()
    if is_plain_linear(classifier):
        return Affine(classifier.weight, classifier.bias)
    kind = type(classifier).__name__
    raise TypeError(f"classifier must be an nn.Linear or a LinearClassifier, found {kind}, which has no W")
