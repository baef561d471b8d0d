"""The sigmoid loss of pairs with its gradients, block by block: every pair of a query and a key counts by itself.

Either side may have draws of its noise, and a pair has one logit for each draw of the two together. SigLIP goes through
the pairs once; so does this, whichever side has noise.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256
"""Queries of a block."""

BLOCK_BYTES = 2**20
"""Of a block's logits over all samples: small enough for a cache, large enough for a product."""

BUFFERS = 4
"""Tensors of the size of a block's logits at a time."""


class Gradients(NamedTuple):
    """Of a loss; None where none was asked for."""

    queries: Tensor | None
    keys: Tensor | None
    scale: Tensor | None
    bias: Tensor | None


def sigmoid_loss(
    queries: Tensor,
    keys: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    need: Sequence[bool],
    *,
    offset: int = 0,
    memory_budget: int | None = None,
) -> tuple[Tensor, Gradients]:
    """Σ over all queries and keys of −log p̄(pair or not), with its gradients.

        logits = scale * torch.einsum("nsd,ksd->snk", queries, keys) + bias        # a side without draws has one
        signs = torch.full((n, K), -1.0); signs[i, offset + i] = 1.0               # where that is a place
        return -log_mean_exp(F.logsigmoid(signs * logits), dim=0).sum()

    Args:
        queries: [n, S, D] or [n, 1, D]
        keys: [K, S, D] or [K, 1, D]
        scale: of the logits, a scalar.
        bias: of the logits, a scalar; None for 0.
        need: which of queries, keys, scale and bias need a gradient.
        offset: where the first query's own key is among the keys; the others' follow. A place outside is none.
        memory_budget: bytes of working memory; None for what is fast.
    """
    of_queries, of_keys, of_scale, of_bias = need
    samples = max(queries.shape[1], keys.shape[1])
    total = torch.zeros(
        (), dtype=torch.float64 if queries.device.type == "cpu" else queries.dtype, device=queries.device
    )
    # The gradient of the scale is that of the queries times the queries.
    sums = torch.zeros_like(queries) if of_queries or of_scale else None
    key_sums = torch.zeros_like(keys) if of_keys else None
    bias_sum = torch.zeros_like(total) if of_bias else None
    for rows, columns in _blocks(len(queries), len(keys), samples, queries.element_size(), memory_budget):
        logits = queries.new_empty(samples, rows.stop - rows.start, columns.stop - columns.start)
        for sample, (query, key) in enumerate(_pairs(queries[rows], keys[columns], samples)):
            torch.mm(query, key.T, out=logits[sample])
        logits *= scale
        if bias is not None:
            logits += bias
        own = _own(rows, columns, offset, logits.device)
        loss, slopes = _block(logits, own)
        total += loss
        if bias_sum is not None:
            bias_sum += slopes.sum()
        if sums is not None:
            for slope, (total_of, key) in zip(slopes, _pairs(sums[rows], keys[columns], samples), strict=True):
                total_of.addmm_(slope, key)
        if key_sums is not None:
            for slope, (query, total_of) in zip(slopes, _pairs(queries[rows], key_sums[columns], samples), strict=True):
                total_of.addmm_(slope.T, query)
    scale_sum = None
    if of_scale and sums is not None:
        scale_sum = torch.zeros_like(total)
        for one, other in zip(sums.split(ROWS), queries.split(ROWS), strict=True):
            scale_sum += torch.dot(one.flatten(), other.flatten())
        scale_sum = scale_sum.to(scale.dtype)
    found = Gradients(
        sums.mul_(scale) if of_queries and sums is not None else None,
        None if key_sums is None else key_sums.mul_(scale),
        scale_sum,
        None if bias_sum is None or bias is None else bias_sum.to(bias.dtype),
    )
    return total.to(queries.dtype), found


def _blocks(queries: int, keys: int, samples: int, item: int, budget: int | None) -> Iterator[tuple[slice, slice]]:
    """Places of blocks of pairs."""
    bytes_of_logits = BLOCK_BYTES if budget is None else min(BLOCK_BYTES, budget // BUFFERS)
    pairs = max(1, bytes_of_logits // (item * samples))
    height = min(queries, ROWS, pairs)
    width = max(1, pairs // max(height, 1))
    for first in range(0, queries, max(height, 1)):
        for left in range(0, keys, width):
            yield slice(first, min(first + height, queries)), slice(left, min(left + width, keys))


def _pairs(queries: Tensor, keys: Tensor, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The two sides of each sample, [n, D] and [K, D]."""
    for sample in range(samples):
        yield tuple(side[:, sample if side.shape[1] > 1 else 0] for side in (queries, keys))  # pyright: ignore[reportReturnType]


def _own(rows: slice, columns: slice, offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places within a block of the pairs that belong together."""
    first = max(rows.start, columns.start - offset)
    last = max(first, min(rows.stop, columns.stop - offset))
    places = torch.arange(first, last, device=device)
    return places - rows.start, places + offset - columns.start


def _block(logits: Tensor, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Σ −log p̄ of a block, and its slope with respect to the logits [S, n, k], which are overwritten."""
    towards = logits.neg_()  # the logit of what is true: that most pairs do not belong together
    towards[:, own[0], own[1]] *= -1
    log_p = F.logsigmoid(towards)
    slopes = towards.neg_().sigmoid_()
    if len(logits) == 1:
        loss = -log_p.sum(dtype=torch.float64 if logits.device.type == "cpu" else None)
    else:
        log_sum = log_p.logsumexp(0)
        loss = log_sum.numel() * math.log(len(logits)) - log_sum.sum()
        slopes *= log_p.sub_(log_sum).exp_()  # how much each sample counts in the mean
    slopes[:, own[0], own[1]] *= -1
    return loss, slopes
