"""Noise for embeddings with factors that are linear in them, V(x) = A x + b, without storing the factors of a batch.

A sample is linear in V for given normals z, so both passes need V only for a block of examples: the gradient of A is a
sum of z gᵀ xᵀ. With D = 512 and R = 15 the factors of 8,192 examples would take 250 MB, and computing them would take
as long as one direction of the loss. Sharing coefficients also saves time: a group with the same z has one matrix
Σ_r z_r A_r, and each of its examples costs only a product with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional._torch import slices, without_autocast
from hetxl.functional.noise import residual_scale

BLOCK = 256
"""Number of examples whose factors are in memory."""

LEAST_LENGTH = 1e-12
"""Smallest length of an embedding that F.normalize divides by."""

GROUPS = 8
"""Number of groups whose matrices are in memory."""

Sums = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Sums of the gradients of x, weight and bias; None if not needed."""


def add_noise(
    embeddings: Tensor,  # [B, D]
    weight: Tensor,  # [D·R, D]
    bias: Tensor | None,  # [D·R]
    residual_weight: Tensor | None,  # [D, D]; None for no residual
    residual_bias: Tensor | None,  # [D]
    z: Tensor,  # [B, S, R], [B, S, R + 1] or [B, S, R + D] normals
    rank: int,
    *,
    rows: bool = False,
    group: int = 1,
    unit: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """Return embeddings with S samples of their noise, [B, S, D].

        embeddings = F.normalize(embeddings, dim=-1)                                     # unit
        factors = F.linear(embeddings, weight, bias).unflatten(-1, (D, R)).mT            # if rows: unflatten to (R, D)
        residual = residual_scale(F.linear(embeddings, residual_weight, residual_bias))
        return embeddings[:, None] + z[..., :R] @ factors + z[..., R:] * residual[:, None]

    Args:
        rows: whether the factors are laid out as [R, D] rather than [D, R].
        group: number of consecutive examples that have the same z[..., :R] up to the sign.
        unit: scale embeddings to length 1 first. Both passes do this block by block instead of storing a copy, and use
            the saved memory for values that the backward pass would recompute.
        overwrite: whether the gradient of the result may be overwritten because nothing else uses it. This saves a
            tensor of the size of the embeddings (S = 1).
    """
    form = _Form(rank, rows, group, unit, overwrite)
    return _AddNoise.apply(form, embeddings, weight, bias, residual_weight, residual_bias, z)


@dataclass(frozen=True)
class _Form:
    rank: int
    rows: bool
    group: int
    unit: bool
    overwrite: bool

    def parts(self, batch: int) -> Iterator[tuple[slice, bool]]:
        """Yield slices of examples that are processed together, and whether they are whole groups."""
        whole = self.grouped(batch)
        for part in slices(whole, GROUPS * self.group):
            yield part, True
        for part in slices(batch, BLOCK, whole):
            yield part, False

    def grouped(self, batch: int) -> int:
        """Return the number of leading examples that are in whole groups."""
        return batch // self.group * self.group if self.group > 1 else 0

    def buffer(self, x: Tensor) -> Tensor:
        """Allocate a buffer for the matrices of some groups, reused because new memory pages are slower."""
        return x.new_empty(GROUPS * x.shape[1] ** 2 if self.grouped(len(x)) else 0)

    def shared(self, mixing: Tensor) -> tuple[Tensor, Tensor]:
        """Split coefficients into those of the groups [G, S, R] and the signs of their examples [G, g, 1]."""
        by_group = mixing.unflatten(0, (-1, self.group))  # [G, g, S, R]
        first = by_group[:, 0]
        return first, (by_group * first.unsqueeze(1)).sum((2, 3)).sign().unsqueeze(-1)


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass raise if its gradients are to be differentiated.

    torch's `once_differentiable` raises only if the incoming gradient is differentiable. That of a loss is the constant
    1, so a penalty on the gradients of a loss would be silently wrong.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "the contrastive losses have no second derivatives; leave create_graph=True out, or compute the loss "
                "with hetxl.functional.contrastive"
            )
        return backward(ctx, *gradients)

    return checked


class _AddNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, x: Tensor, weight: Tensor, bias: Tensor | None, *residual_and_z: Any) -> Tensor:
        residual_weight, residual_bias, z = residual_and_z
        ctx.form = form
        lengths = None  # divisors of F.normalize, [B, 1]
        if form.unit:
            lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=LEAST_LENGTH)
        keeps = form.unit and residual_weight is not None and any(ctx.needs_input_grad)
        raws = torch.empty_like(x) if keeps else None
        with without_autocast(x.device):
            out = x.new_empty(len(x), z.shape[1], x.shape[1])
            mixing, own = z[..., : form.rank], z[..., form.rank :]
            buffer = form.buffer(x)
            for part, whole_groups in form.parts(len(x)):
                base = _base(x, lengths, part)
                out[part] = base.unsqueeze(1)
                if whole_groups:
                    _add_shared(out[part], base, weight, bias, *form.shared(mixing[part]), buffer)
                else:
                    factors = F.linear(base, weight, bias)
                    factors = factors.unflatten(-1, (form.rank, -1) if form.rows else (-1, form.rank))
                    out[part].baddbmm_(mixing[part], factors if form.rows else factors.mT)
                if residual_weight is not None:
                    raw = F.linear(base, residual_weight, residual_bias)
                    if raws is not None:
                        raws[part] = raw
                    out[part].addcmul_(own[part], residual_scale(raw).unsqueeze(1))
        ctx.save_for_backward(x, lengths, raws, weight, residual_weight, residual_bias, z)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, lengths, raws, weight, residual_weight, residual_bias, z = ctx.saved_tensors
        form: _Form = ctx.form
        gradient = gradients[0]  # [B, S, D]
        mixing, own = z[..., : form.rank], z[..., form.rank :]
        of_x: Tensor | None = None
        if ctx.needs_input_grad[1]:
            # With one sample in place; its values are read below before they are changed.
            in_place = form.overwrite and gradient.shape[1] == 1
            of_x = gradient.squeeze(1) if in_place else gradient.sum(1)
        like = weight, weight[:, 0], residual_weight, residual_bias
        of_weight, of_bias, of_residual, of_residual_bias = sums = [
            torch.zeros_like(each) if need else None for each, need in zip(like, ctx.needs_input_grad[2:6], strict=True)
        ]
        with without_autocast(x.device):
            buffer = form.buffer(x)
            for part, whole_groups in form.parts(len(x)):
                base, of_base, of_raw = _base(x, lengths, part), None if of_x is None else of_x[part], None
                if residual_weight is not None:
                    raw = F.linear(base, residual_weight, residual_bias) if raws is None else raws[part].clone()
                    # The sigmoid is the derivative of the softplus in `residual_scale`.
                    of_raw = raw.sigmoid_().mul_((gradient[part] * own[part]).sum(1))
                if whole_groups:
                    shared = form.shared(mixing[part])
                    _shared_backward(gradient[part], base, weight, (of_base, of_weight, of_bias), *shared, buffer)
                else:
                    if form.rows:
                        of_factors = (mixing[part].mT @ gradient[part]).flatten(1)
                    else:
                        of_factors = (gradient[part].mT @ mixing[part]).flatten(1)  # [n, D·R]
                    _linear_backward(of_factors, base, weight, (of_base, of_weight, of_bias))
                if of_raw is not None and residual_weight is not None:
                    _linear_backward(of_raw, base, residual_weight, (of_base, of_residual, of_residual_bias))
                if of_base is not None and lengths is not None:
                    # Backward of F.normalize: components along the embedding vanish, unless it is too short.
                    long = lengths[part] > LEAST_LENGTH
                    along = torch.linalg.vecdot(of_base, base).unsqueeze(-1) * long
                    of_base.addcmul_(base, along, value=-1).div_(lengths[part])
        return None, of_x, *sums, None


def _base(x: Tensor, lengths: Tensor | None, part: slice) -> Tensor:
    """Return the embeddings of a part of the batch that the noise is added to."""
    return x[part] if lengths is None else x[part] / lengths[part]


def _linear_backward(gradient: Tensor, x: Tensor, weight: Tensor, sums: Sums) -> None:
    """Add the gradients of F.linear(x, weight, bias) to `sums`."""
    of_x, of_weight, of_bias = sums
    if of_x is not None:
        of_x.addmm_(gradient, weight)
    if of_weight is not None:
        of_weight.addmm_(gradient.T, x)
    if of_bias is not None:
        of_bias += gradient.sum(0)


def _add_shared(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, signs: Tensor, buffer: Tensor
) -> None:
    """Add the samples of groups, z [G, S, R] with signs [G, g, 1], to out [G·g, S, D]."""
    groups, samples, rank = z.shape
    by_group, by_rank = x.unflatten(0, (groups, -1)), weight.unflatten(0, (-1, rank))  # [G, g, D], [D, R, D]
    out = out.unflatten(0, (groups, -1))
    for sample in range(samples):
        mixed = _mixed(z[:, sample], by_rank, buffer)  # [D, G, D]
        drawn = torch.bmm(by_group, mixed.permute(1, 2, 0))
        if bias is not None:
            drawn += (z[:, sample] @ bias.view(-1, rank).T).unsqueeze(1)
        out[:, :, sample].addcmul_(drawn, signs)


def _shared_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, sums: Sums, z: Tensor, signs: Tensor, buffer: Tensor
) -> None:
    """Add the gradients of `_add_shared` to `sums`."""
    of_x, of_weight, of_bias = sums
    groups, samples, rank = z.shape
    by_group, by_rank = x.unflatten(0, (groups, -1)), weight.unflatten(0, (-1, rank))
    of_draws = gradient.unflatten(0, (groups, -1))  # [G, g, S, D]
    for sample in range(samples):
        signed, shared = of_draws[:, :, sample] * signs, z[:, sample]  # [G, g, D], [G, R]
        if of_x is not None:
            mixed = _mixed(shared, by_rank, buffer)  # [D, G, D]
            of_x.unflatten(0, (groups, -1)).baddbmm_(signed, mixed.transpose(0, 1))
        if of_weight is not None:
            of_mixed = buffer[: groups * len(by_rank) * x.shape[1]].view(groups, len(by_rank), -1)
            torch.bmm(signed.mT, by_group, out=of_mixed)  # [G, D, D]
            of_rank = of_weight.unflatten(0, (-1, rank))
            of_rank.baddbmm_(shared.T.expand(len(of_rank), -1, -1), of_mixed.transpose(0, 1))
        if of_bias is not None:
            of_bias.view(-1, rank).addmm_(signed.sum(1).T, shared)


def _mixed(z: Tensor, by_rank: Tensor, buffer: Tensor) -> Tensor:
    """Compute Σ_r z_r A_r of groups z [c, R], as [D, c, D], in a buffer."""
    out = buffer[: len(by_rank) * len(z) * by_rank.shape[2]].view(len(by_rank), len(z), -1)
    return torch.matmul(z, by_rank, out=out)
