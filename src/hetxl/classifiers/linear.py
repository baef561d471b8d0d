"""W φ + b over all classes, plain or on unit vectors (a cosine classifier)."""

import math
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl.functional import Affine
from hetxl.nn.classifier import Classifier

SCALE = 16.0
"""Initial scale of a cosine classifier; unscaled cosines are too close together for a softmax over many classes."""


class RowsClassifier(Classifier):
    """Logits W φ + b with access to single rows of W; of unit vectors if `normalized`."""

    normalized: bool

    @abstractmethod
    def affine(self) -> Affine:
        """Return W and b."""

    def rows(self, classes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return W and b of classes [...]: [..., D], and [...] or None."""
        affine = self.affine()
        return affine.weight[classes], None if affine.bias is None else affine.bias[classes]

    def forward(self, features: Tensor) -> Tensor:
        """Compute logits [..., K] of features [..., D]."""
        return self.affine()(self.prepare(features))

    def logits_of(self, features: Tensor, classes: Tensor) -> Tensor:
        """Compute logits [..., k] of classes [..., k] from k rows of W per example."""
        rows, bias = self.rows(classes)
        logits = (rows @ self.prepare(features).unsqueeze(-1)).squeeze(-1)
        return logits if bias is None else logits + bias

    def prepare(self, features: Tensor) -> Tensor:
        """Return features [..., D], with unit length for a cosine classifier."""
        return F.normalize(features, dim=-1) if self.normalized else features


class LinearClassifier(RowsClassifier):
    """Logits W φ + b; or s · cos(w_k, φ), as in face recognition.

    Args:
        in_features: D
        num_classes: K
        bias: whether there is a bias b; never with `normalized`.
        normalized: scale w_k and φ to unit length. The noise is added to the normalised φ, and the sum is not
            normalised again.
        scale: initial value of s, which is learned as `log_scale`.

    >>> LinearClassifier(64, 1000)(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    sparse = False
    """Whether W and b get sparse gradients when only some of their rows are read."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = True,
        normalized: bool = False,
        scale: float = SCALE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, num_classes)
        if scale <= 0:
            raise ValueError(f"scale must be positive, found {scale}")
        self.normalized, self.initial_scale = normalized, float(scale)
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        self.log_scale: nn.Parameter | None = None
        if normalized:
            self.log_scale = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        elif bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters again, like nn.Linear and in the same order."""
        nn.Linear.reset_parameters(self)  # pyright: ignore[reportArgumentType]
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, math.log(self.initial_scale))

    def affine(self) -> Affine:
        """Return W and b; for a cosine classifier W has rows s · w_k / ‖w_k‖."""
        return Affine(self._scaled(self.weight), self.bias)

    def rows(self, classes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return W and b of classes [...]: [..., D], and [...] or None; gradients are sparse if `sparse` is set."""
        bias = None if self.bias is None else gather_rows(self.bias, classes, self.sparse)
        return self._scaled(gather_rows(self.weight, classes, self.sparse)), bias

    def _scaled(self, weight: Tensor) -> Tensor:
        if self.log_scale is None:
            return weight
        return F.normalize(weight, dim=-1) * self.log_scale.exp()

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        kind = ", normalized=True" if self.normalized else f", bias={self.bias is not None}"
        return f"{super().extra_repr()}{kind}"


class _SparseRows(torch.autograd.Function):
    """table[index] with a sparse gradient that holds only the rows that were read."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        """Return rows [C, ...]."""
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return a sparse gradient of the table."""
        (index,) = ctx.saved_tensors
        rows = torch.sparse_coo_tensor(index.unsqueeze(0), gradients[0], ctx.shape, check_invariants=False)
        return rows, None


def gather_rows(table: Tensor, index: Tensor, sparse: bool) -> Tensor:
    """Return table[index], [..., D]; `sparse` makes the gradient sparse, for torch.optim.SparseAdam."""
    if not sparse:
        return table[index]
    return _SparseRows.apply(table, index.flatten()).unflatten(0, index.shape)
