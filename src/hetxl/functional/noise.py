"""Step 1 of every head, **noise**: a Gaussian in the N-dimensional noise space, given by a basis of Q rows.

A sample is `z @ basis` with standard normals z [..., S, Q]. The four covariances of the paper differ only in their
basis, so one class represents all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional._torch import to_accumulation_dtype
from hetxl.registry import Residual

MIN_SCALE = 1e-3
"""Added to the softplus, so that the noise never vanishes in any direction."""


def gather_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Values [..., Q, N] at columns [..., k], giving [..., Q, k]."""
    index = columns.unsqueeze(-2).expand(*values.shape[:-1], columns.shape[-1])
    return values.expand(*index.shape[:-1], values.shape[-1]).gather(-1, index)


def added(parts: list[Tensor]) -> Tensor:
    """Return the sum of one or two tensors, without the extra pass of adding 0."""
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def residual_scale(raw: Tensor) -> Tensor:
    """Return the residual's standard deviation d(x), [..., N], from its unbounded parameter: softplus(raw) + 1e-3."""
    return F.softplus(raw) + MIN_SCALE


@dataclass(frozen=True, eq=False)
class GaussianNoise:
    """A zero-mean Gaussian over [..., N] for every example.

    With the standard normals z of one sample, the noise is

        (z[:R] @ factors) * scale + residual term,

    and the residual term is `z[R] * residual` for `rank1`, covariance d dᵀ, or `z[R:] * residual` for `diagonal`,
    covariance diag(d²). In the paper's letters: `efficient` has factors J [R, N] shared by all examples and scale v(x);
    `low_rank` has factors V(x)ᵀ [..., R, N]; `diagonal` has no factors; `full` has factors L(x) [..., N, N].

    Attributes:
        factors: [R, N], shared by the examples, or [..., R, N]; None for R = 0.
        scale: [..., N], multiplies the columns of the factors; None for ones.
        residual: [..., N], standard deviations; None for no residual.
        residual_kind: whether the residual uses one normal for all N coordinates or one per coordinate.
    """

    factors: Tensor | None
    scale: Tensor | None = None
    residual: Tensor | None = None
    residual_kind: Residual = "rank1"

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        named = {"factors": self.factors, "scale": self.scale, "residual": self.residual}
        return {name: part for name, part in named.items() if part is not None}

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "GaussianNoise":
        """Apply a function to each of the tensors."""
        return replace(self, **{name: function(part) for name, part in self.parts().items()})

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tensors."""
        return next(iter(self.parts().values())).dtype

    @property
    def features(self) -> int:
        """N."""
        return next(part for part in (self.residual, self.factors) if part is not None).shape[-1]

    @property
    def rank(self) -> int:
        """Return R, the rows of the factors."""
        return 0 if self.factors is None else self.factors.shape[-2]

    @property
    def num_residual(self) -> int:
        """Return the number of normals for the residual: 0, 1 or N."""
        if self.residual is None:
            return 0
        return 1 if self.residual_kind == "rank1" else self.residual.shape[-1]

    @property
    def size(self) -> int:
        """Return Q, the number of standard normals of one sample."""
        return self.rank + self.num_residual

    def of_examples(self, examples: slice | Tensor) -> "GaussianNoise":
        """Select examples of a flat batch; shared factors stay shared."""
        own = {name: part[examples] for name, part in self.parts().items() if name != "factors" or part.dim() > 2}
        return replace(self, **own)

    def accumulated(self) -> "GaussianNoise":
        """Convert to at least float32, the dtype for sums."""
        return self.mapped(to_accumulation_dtype)

    def scaled(self, factor: float) -> "GaussianNoise":
        """Multiply the standard deviations by a factor."""
        factors, scale = self.factors, self.scale
        if scale is not None:
            scale = scale * factor
        elif factors is not None:
            factors = factors * factor
        residual = None if self.residual is None else self.residual * factor
        return GaussianNoise(factors, scale, residual, self.residual_kind)

    def draw(self, z: Tensor) -> Tensor:
        """Mix standard normals z [..., S, Q], or [S, Q] shared by all examples, into noise [..., S, N].

        z @ self.basis(), without the basis
        """
        parts = []
        if self.factors is not None:
            mixed = z[..., : self.rank] @ self.factors  # [..., S, N]
            parts.append(mixed if self.scale is None else mixed * self.scale.unsqueeze(-2))
        if self.residual is not None:
            # [..., S, 1] or [..., S, N] against [..., 1, N]
            parts.append(z[..., self.rank :] * self.residual.unsqueeze(-2))
        return added(parts)

    def basis(self) -> Tensor:
        """Return the rows that the standard normals weight, [..., Q, N]: covariance() = basisᵀ basis."""
        rows = []
        if self.factors is not None:
            rows.append(self.factors if self.scale is None else self.factors * self.scale.unsqueeze(-2))
        if self.residual is not None:
            rank1 = self.residual_kind == "rank1"
            rows.append(self.residual.unsqueeze(-2) if rank1 else torch.diag_embed(self.residual))
        if len(rows) == 1:
            return rows[0]
        return torch.cat((rows[0].expand(*rows[1].shape[:-2], -1, -1), rows[1]), dim=-2)

    def project(self, rows: Tensor) -> Tensor:
        """Return the effect of each normal on the logits of k classes, [..., k, Q], from their rows of W [..., k, N].

        rows @ self.basis().mT, without the basis [..., Q, N]
        """
        parts = []
        if self.factors is not None:
            scaled = rows if self.scale is None else rows * self.scale.unsqueeze(-2)
            parts.append(scaled @ self.factors.to(rows.dtype).mT)
        if self.residual is not None:
            own = rows * self.residual.unsqueeze(-2)
            parts.append(own.sum(-1, keepdim=True) if self.residual_kind == "rank1" else own)
        return torch.cat(parts, dim=-1)

    def covariance(self) -> Tensor:
        """Return Σ(x), [..., N, N]: VᵀV + d dᵀ or VᵀV + diag(d²)."""
        basis = self.basis()
        return basis.mT @ basis

    def variance(self) -> Tensor:
        """Return the diagonal of Σ(x), [..., N], in at least float32, without computing the basis.

        self.basis().square().sum(-2)
        """
        wide, parts = self.accumulated(), []
        if wide.factors is not None:
            parts.append(wide.factors.square().sum(-2))
            if wide.scale is not None:
                parts[0] = parts[0] * wide.scale.square()
        if wide.residual is not None:
            parts.append(wide.residual.square())
        return added(parts)

    def covariance_among(self, columns: Tensor) -> Tensor:
        """Return Σ(x) among some coordinates of each example, [..., k, k], in at least float32, without the basis.

            basis = self.basis().gather(-1, …)  # [..., Q, k]
            basis.mT @ basis

        The columns [..., k] are in 0 … N − 1 and may repeat.
        """
        parts = []
        if self.factors is not None:
            rows = self._factors_at(columns)
            parts.append(rows @ rows.mT)
        if self.residual is not None:
            spread = to_accumulation_dtype(self.residual.gather(-1, columns))
            product = spread.unsqueeze(-1) * spread.unsqueeze(-2)
            if self.residual_kind == "diagonal":  # one normal per coordinate, shared only by repeated columns
                product = product * (columns.unsqueeze(-1) == columns.unsqueeze(-2))
            parts.append(product)
        return added(parts)

    def rows_at(self, columns: Tensor) -> Tensor:
        """Return the basis at some coordinates of each example, [..., k, Q], for noise without a diagonal residual.

        self.basis().gather(-1, …).mT
        """
        rows = [] if self.factors is None else [self._factors_at(columns)]
        if self.residual is not None:
            rows.append(to_accumulation_dtype(self.residual.gather(-1, columns)).unsqueeze(-1))
        return torch.cat(rows, dim=-1)

    def _factors_at(self, columns: Tensor) -> Tensor:
        """Return the scaled factors at some coordinates of each example, [..., k, R], in at least float32."""
        assert self.factors is not None
        shared = self.factors.dim() == 2
        rows = to_accumulation_dtype(self.factors.T[columns] if shared else gather_columns(self.factors, columns).mT)
        return (
            rows if self.scale is None else rows * to_accumulation_dtype(self.scale).gather(-1, columns).unsqueeze(-1)
        )
