"""Last-layer Laplace: a Gaussian posterior over the classifier's weights, from the curvature of the loss at its end.

The Gauss–Newton Hessian over W and b of N examples is Σ_n Λ_n ⊗ φ_n φ_nᵀ, with φ_n [D + 1] the features and a 1 for the
bias, and Λ_n [K, K] the Hessian in the logits: diag(p) − p pᵀ over τ² (softmax), diag(p (1 − p)) over τ² (sigmoid). It
has (K (D + 1))² entries. Here it is diag(g) ⊗ A, with K + (D + 1)² of them: correlations between classes are left out
(the sigmoid link has none), and g and A are such that the sum of the blocks of all classes, and the trace of each, are
those of the Gauss–Newton Hessian. With a Gaussian prior of precision δ the weights of class k then have the covariance

    (g_k A + δ I)⁻¹ = U diag(1 / (g_k a + δ)) Uᵀ        with A = U diag(a) Uᵀ,

and its logit the variance φᵀ (g_k A + δ I)⁻¹ φ: for all classes one product of [B, D + 1] with [D + 1, K].
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hetxl.registry import Link


class Curvature(NamedTuple):
    """diag(g) ⊗ A, the approximate Hessian of the summed loss in the weights and the bias of a linear classifier."""

    classes: Tensor  # g, [K]
    values: Tensor  # a, [P], the eigenvalues of A, whose sum is 1
    vectors: Tensor  # U, [P, P], its eigenvectors in columns
    square: Tensor  # mean of ‖φ‖², a scalar


def with_one(features: Tensor, size: int) -> Tensor:
    """Append a 1 to features [..., D] for the bias if `size` is D + 1; return them unchanged if it is D."""
    if size == features.shape[-1]:
        return features
    return torch.cat((features, features.new_ones(*features.shape[:-1], 1)), dim=-1)


def logit_curvature(logits: Tensor, temperature: Tensor | float, link: Link) -> Tensor:
    """Return the diagonal of the loss's Hessian in the logits, [..., K] → [..., K]: p (1 − p) / τ²."""
    scaled = logits / temperature
    probs = scaled.softmax(-1) if link == "softmax" else scaled.sigmoid()
    return probs * (1 - probs) / temperature**2


@torch.no_grad()
def last_layer_curvature(
    batches: Iterable[Tensor],
    logits: Callable[[Tensor], Tensor],
    *,
    temperature: Tensor | float = 1.0,
    link: Link = "softmax",
    bias: bool = True,
    rows: int | None = None,
) -> Curvature:
    """Return the curvature of a linear classifier over its training examples, in one pass.

        weights = logit_curvature(logits(φ), temperature, link)          # [N, K]
        g, A = weights.T @ (φ²).sum(-1), φ.T @ (weights.sum(-1)[:, None] * φ)
        return g, A / A.trace()

    Args:
        batches: inputs of the classifier, [b, D].
        logits: the classifier, [b, D] → [b, K].
        bias: whether the classifier has a bias.
        rows: N if the batches are a sample of N training examples; None if they are all examples.
    """
    totals: list[Tensor] = []  # of g, A and ‖φ‖²
    count, dtype = 0, torch.float32
    for features in batches:
        inputs = with_one(features, features.shape[-1] + bias)
        weights, square = logit_curvature(logits(features), temperature, link), inputs.square().sum(-1)
        sums = (square @ weights, inputs.T @ (weights.sum(-1, keepdim=True) * inputs), square.sum())
        # Double precision: float32 sums would lose rows to rounding.
        wide = [each.double() for each in sums]
        totals = [a + b for a, b in zip(totals, wide, strict=True)] if totals else wide
        count, dtype = count + len(features), features.dtype
    if not count:
        raise ValueError("no features to measure: batches is empty")
    classes, product, squares = totals
    values, vectors = torch.linalg.eigh(product / product.trace())
    scale = 1.0 if rows is None else rows / count
    return Curvature(*(part.to(dtype) for part in (scale * classes, values.clamp_min(0.0), vectors, squares / count)))


def weight_covariance(curvature: Curvature, precision: Tensor | float) -> Tensor:
    """Return the posterior covariance of the weights of each class, [K, P, P]; for small K and P."""
    inverse = 1 / (curvature.classes.unsqueeze(-1) * curvature.values + precision)  # [K, P]
    return curvature.vectors @ (inverse.unsqueeze(-1) * curvature.vectors.T)


def laplace_variance(features: Tensor, curvature: Curvature, precision: Tensor | float) -> Tensor:
    """Return the posterior variance of each logit before τ, [..., K], for features [..., D] and a prior precision δ.

    φ = with_one(features, P)
    torch.einsum("...i,kij,...j->...k", φ, weight_covariance(curvature, precision), φ)
    """
    rotated = with_one(features, len(curvature.values)) @ curvature.vectors
    inverse = 1 / (curvature.classes.unsqueeze(-1) * curvature.values + precision)  # [K, P]
    return rotated.square() @ inverse.T
