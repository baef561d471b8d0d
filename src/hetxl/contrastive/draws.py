"""Embeddings with noise whose factors are linear in them, V(x) = A x + b, without the factors of a whole batch.

A draw is linear in V once its normals z are known, so neither pass needs V for more than a block of examples: the
gradient of A is a sum of z gᵀ xᵀ. With D = 512 and R = 15 the factors of 8,192 examples would take 250 MB, and making
them as long as one direction of the loss. The time goes as well where examples share coefficients: a group with the
same z has one matrix Σ_r z_r A_r, and each of its examples costs a product with that alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetxl.functional.noise import residual_scale

BLOCK = 256
"""Examples whose factors exist at a time."""

GROUPS = 8
"""Groups whose matrices exist at a time."""


def add_noise(
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual_weight: Tensor | None,
    residual_bias: Tensor | None,
    z: Tensor,
    rank: int,
    *,
    rows: bool = False,
    group: int = 1,
) -> Tensor:
    """Embeddings with S draws of their noise, [B, S, D].

        factors = F.linear(embeddings, weight, bias).unflatten(-1, (D, R)).mT            # rows: (R, D), as it is
        residual = residual_scale(F.linear(embeddings, residual_weight, residual_bias))
        return embeddings[:, None] + z[..., :R] @ factors + z[..., R:] * residual[:, None]

    Args:
        embeddings: [B, D]
        weight: [D·R, D]
        bias: [D·R] or None
        residual_weight: [D, D]; None for no residual.
        residual_bias: [D]; None for no residual.
        z: [B, S, R], [B, S, R + 1] or [B, S, R + D] normals.
        rank: R
        rows: whether the factors are laid out as [R, D] rather than [D, R].
        group: how many examples in a row are known to have the same z[..., :R] but for the sign.
    """
    return _AddNoise.apply(_Form(rank, rows, group), embeddings, weight, bias, residual_weight, residual_bias, z)


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


@dataclass(frozen=True)
class _Form:
    rank: int
    rows: bool
    group: int

    def grouped(self, batch: int) -> int:
        """How many examples, from the first on, are in whole groups."""
        return batch // self.group * self.group if self.group > 1 else 0

    def shared(self, mixing: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients of the groups [G, S, R] and signs of their examples [G, g, 1], from all coefficients."""
        by_group = mixing.unflatten(0, (-1, self.group))  # [G, g, S, R]
        first = by_group[:, 0]
        return first, (by_group * first.unsqueeze(1)).sum((2, 3)).sign().unsqueeze(-1)


class _AddNoise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        form: _Form,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual_weight: Tensor | None,
        residual_bias: Tensor | None,
        z: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, residual_weight, residual_bias, z)
        ctx.form = form
        with torch.autocast(x.device.type, enabled=False):
            out = x.unsqueeze(1).repeat(1, z.shape[1], 1)
            mixing, own = z[..., : form.rank], z[..., form.rank :]
            whole = form.grouped(len(x))
            if whole:
                _add_shared(out[:whole], x[:whole], weight, bias, *form.shared(mixing[:whole]))
            for part in _blocks(whole, len(x), BLOCK):
                factors = F.linear(x[part], weight, bias)
                factors = factors.unflatten(-1, (form.rank, -1) if form.rows else (-1, form.rank))
                out[part].baddbmm_(mixing[part], factors if form.rows else factors.mT)
            if residual_weight is not None:
                for part in _blocks(0, len(x), BLOCK):
                    scale = residual_scale(F.linear(x[part], residual_weight, residual_bias))
                    out[part].addcmul_(own[part], scale.unsqueeze(1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, residual_weight, residual_bias, z = ctx.saved_tensors
        form: _Form = ctx.form
        needs = ctx.needs_input_grad[1:6]
        like = x, weight, weight[:, 0], residual_weight, residual_bias
        sums = [torch.zeros_like(each) if need else None for each, need in zip(like, needs, strict=True)]
        of_x, of_weight, of_bias, of_residual, of_residual_bias = sums
        gradient = gradients[0]  # [B, S, D]
        mixing, own = z[..., : form.rank], z[..., form.rank :]
        with torch.autocast(x.device.type, enabled=False):
            if of_x is not None:
                torch.sum(gradient, 1, out=of_x)
            whole = form.grouped(len(x))
            if whole:
                part = None if of_x is None else of_x[:whole]
                _shared_backward(
                    gradient[:whole], x[:whole], weight, part, of_weight, of_bias, *form.shared(mixing[:whole])
                )
            for part in _blocks(whole, len(x), BLOCK):
                if form.rows:
                    of_factors = (mixing[part].mT @ gradient[part]).flatten(1)
                else:
                    of_factors = (gradient[part].mT @ mixing[part]).flatten(1)  # [n, D·R]
                _linear_backward(of_factors, x[part], weight, _at(of_x, part), of_weight, of_bias)
            if residual_weight is not None:
                for part in _blocks(0, len(x), BLOCK):
                    raw = F.linear(x[part], residual_weight, residual_bias)
                    # The softplus of `residual_scale` has the sigmoid as its derivative.
                    of_raw = (gradient[part] * own[part]).sum(1) * raw.sigmoid()
                    _linear_backward(of_raw, x[part], residual_weight, _at(of_x, part), of_residual, of_residual_bias)
        return None, *sums, None


def _at(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, of_x: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None
) -> None:
    """Add the gradients of F.linear(x, weight, bias) to sums of them."""
    if of_x is not None:
        of_x.addmm_(gradient, weight)
    if of_weight is not None:
        of_weight.addmm_(gradient.T, x)
    if of_bias is not None:
        of_bias += gradient.sum(0)


def _add_shared(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, signs: Tensor) -> None:
    """Add the draws of groups, z [G, S, R] with signs [G, g, 1], to out [G·g, S, D]."""
    groups, samples, rank = z.shape
    by_group, by_rank = x.unflatten(0, (groups, -1)), weight.unflatten(0, (-1, rank))  # [G, g, D], [D, R, D]
    out = out.unflatten(0, (groups, -1))
    buffer = x.new_empty(len(by_rank) * GROUPS * x.shape[1])
    for part in _blocks(0, groups, GROUPS):
        for sample in range(samples):
            mixed = _mixed(z[part, sample], by_rank, buffer)  # [D, c, D]
            drawn = torch.bmm(by_group[part], mixed.permute(1, 2, 0))
            if bias is not None:
                drawn += (z[part, sample] @ bias.view(-1, rank).T).unsqueeze(1)
            out[part, :, sample].addcmul_(drawn, signs[part])


def _shared_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    of_x: Tensor | None,
    of_weight: Tensor | None,
    of_bias: Tensor | None,
    z: Tensor,
    signs: Tensor,
) -> None:
    """Add the gradients of `_add_shared` to sums of them."""
    groups, samples, rank = z.shape
    by_group, by_rank = x.unflatten(0, (groups, -1)), weight.unflatten(0, (-1, rank))
    of_draws = gradient.unflatten(0, (groups, -1))  # [G, g, S, D]
    buffer = x.new_empty(len(by_rank) * GROUPS * x.shape[1])
    for part in _blocks(0, groups, GROUPS):
        for sample in range(samples):
            signed, shared = of_draws[part, :, sample] * signs[part], z[part, sample]  # [c, g, D], [c, R]
            if of_x is not None:
                mixed = _mixed(shared, by_rank, buffer)  # [D, c, D]
                of_x.unflatten(0, (groups, -1))[part].baddbmm_(signed, mixed.transpose(0, 1))
            if of_weight is not None:
                of_mixed = buffer[: len(signed) * len(by_rank) * x.shape[1]].view(len(signed), len(by_rank), -1)
                torch.bmm(signed.mT, by_group[part], out=of_mixed)  # [c, D, D]
                of_rank = of_weight.unflatten(0, (-1, rank))
                of_rank.baddbmm_(shared.T.expand(len(of_rank), -1, -1), of_mixed.transpose(0, 1))
            if of_bias is not None:
                of_bias.view(-1, rank).addmm_(signed.sum(1).T, shared)


def _mixed(z: Tensor, by_rank: Tensor, buffer: Tensor) -> Tensor:
    """Σ_r z_r A_r of groups z [c, R], as [D, c, D], in a buffer that all of them use: pages that are new cost more."""
    out = buffer[: len(by_rank) * len(z) * by_rank.shape[2]].view(len(by_rank), len(z), -1)
    return torch.matmul(z, by_rank, out=out)
