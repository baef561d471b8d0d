"""One direction of a contrastive loss: queries with samples of their noise against keys.

`summed_loss` uses the engine. `loss_in_parts` computes the loss together with its gradients and stores only the
gradients for the backward pass. For the sigmoid link it processes the keys in parts: chunks of them on one process, or
the keys of one process after the other in a ring. Sigmoid pairs are independent, so each part is finished before the
next, and both passes need the memory of one part.

`sigmoid_loss` processes each pair of a part once, as SigLIP does, whichever side has noise: a pair has one logit per
joint sample of its two sides.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.contrastive.gather import Share
from hetxl.contrastive.low_rank_noise import first_order_only
from hetxl.functional import Affine, ClassifierLift, GaussianNoise, LabelLists, Link, LogitDistribution, Targets, mc_nll
from hetxl.functional._torch import slices

ROWS = 256
"""Number of queries in a block."""

BLOCK_BYTES = 2**20
"""Number of logits in a block, over all samples: small enough for the cache, large enough for matrix products."""

BUFFERS = 4
"""Number of tensors of a block's size in memory."""


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries of one direction, each with S samples."""

    features: Tensor  # [n, D], before the noise is added
    noise: GaussianNoise | None = None  # noise of the features
    z: Tensor | None = None  # [n, S, Q] or [S, Q] standard normals; None without noise

    @classmethod
    def explicit(cls, samples: Tensor) -> "Queries":
        """Create queries from explicit samples, [n, S, D]."""
        count, draws, width = samples.shape
        if draws == 1:
            return cls(samples.squeeze(1))
        # The samples become the factors, each selected by one normal; the engine then averages over them.
        same = torch.eye(draws, dtype=samples.dtype, device=samples.device)
        return cls(samples.new_zeros(count, width), GaussianNoise(samples), same)

    @property
    def count(self) -> int:
        """Return S."""
        return 1 if self.z is None else self.z.shape[-2]

    @property
    def samples(self) -> Tensor:
        """Return the samples, [n, S, D]; without noise the features, [n, 1, D]."""
        if self.noise is None or self.z is None:
            return self.features.unsqueeze(1)
        drawn = self.noise.draw(self.z.to(self.noise.dtype))
        return self.features.unsqueeze(1) + drawn.to(self.features.dtype)


def summed_loss(
    queries: Queries,
    keys: Tensor,
    own: Tensor,
    *,
    link: Link,
    scale: Tensor,
    bias: Tensor | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """Return Σ_n −log p̄ of each query's own key among the keys (sigmoid: and of 1 − p̄ for all others), in blocks.

        logits = scale * queries.samples @ keys.T + bias                                     # [n, S, K]
        softmax:  -log_mean_exp(log_softmax(logits, -1), 1).gather(-1, own).sum()
        sigmoid:  -log_mean_exp(logsigmoid(±logits), 1).sum()

    Args:
        keys: [K, D], the classifier of this batch.
        own: [n], index of each query's own key. For the sigmoid link, an index outside 0 … K − 1 means no own key.
        bias: bias of the logits (sigmoid).
    """
    temperature = 1 / scale
    # The engine divides the logits, including their bias, by τ.
    affine = Affine(keys, None if bias is None else (bias * temperature).to(keys.dtype).expand(len(keys)))
    lift = None if queries.noise is None else ClassifierLift(keys)
    logits = LogitDistribution(queries.features, affine, queries.noise, lift)
    targets = Targets(ids=own)
    if link == "sigmoid":
        # An index outside gets a label of 0, so that the data need not be read.
        inside = ((own >= 0) & (own < len(keys))).to(torch.float32)
        examples = torch.arange(len(own), device=own.device)
        targets = Targets(lists=LabelLists(examples, own.clamp(0, max(len(keys) - 1, 0)), inside, len(own)))
    return mc_nll(
        logits, queries.z, targets, temperature=temperature, link=link, reduction="sum", memory_budget=memory_budget
    )


def loss_in_parts(
    samples: Tensor,
    keys: Tensor,
    *,
    link: Link,
    scale: Tensor,
    bias: Tensor | None,
    offset: int = 0,
    chunk: int | None = None,
    ring: Share | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """Return Σ over queries of −log p̄, like `summed_loss` with explicit samples; supports one backward pass.

    In a ring the gradient is that of the sum over the processes, assuming that the result has the same gradient on all
    of them.

    Args:
        samples: [n, S, D], samples of the queries.
        keys: [K, D], or samples of them [K, S, D] (sigmoid); in a ring, those of this process.
        offset: index of the first query's own key; the others follow in order.
        chunk: number of keys per part (sigmoid); None for all keys of a process.
        ring: the batch over the processes that pass their keys around (sigmoid); None for only this process's keys.
    """
    if ring is not None and ring.peers.size == 1:
        ring = None
    operands = (samples, keys, scale, bias)
    if not torch.is_grad_enabled():
        # Parameters may require gradients that nothing reads.
        operands = tuple(None if tensor is None else tensor.detach() for tensor in operands)
    return _AtOnce.apply(_Walk(link, offset, chunk, ring, memory_budget), *operands)


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: "_Walk", *operands: Any) -> Tensor:
        loss, ctx.gradients = walk.run(_Operands(*operands), _Operands(*ctx.needs_input_grad[1:]))
        return loss

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stored: _Operands | None = ctx.gradients
        if stored is None:
            raise RuntimeError(
                "a contrastive loss supports one backward pass; compute it again instead of using retain_graph=True"
            )
        ctx.gradients = None  # scaled in place, so usable once
        return None, *(None if tensor is None else tensor.mul_(gradients[0]) for tensor in stored.all())


@dataclass
class _Operands:
    """The inputs of a loss, whether each needs a gradient, or their gradients (None if not needed)."""

    samples: Any = None
    keys: Any = None
    scale: Any = None
    bias: Any = None

    def all(self) -> tuple[Any, ...]:
        return self.samples, self.keys, self.scale, self.bias

    def add(self, more: "_Operands") -> None:
        """Add gradients in place, except those of the keys, which differ in each part."""
        for name in ("samples", "scale", "bias"):
            total, part = getattr(self, name), getattr(more, name)
            setattr(self, name, part if total is None else total.add_(part))


@dataclass(frozen=True)
class _Walk:
    """The iteration over the keys."""

    link: Link
    offset: int
    chunk: int | None
    ring: Share | None
    memory_budget: int | None

    def run(self, operands: _Operands, need: _Operands) -> tuple[Tensor, _Operands]:
        """Return the loss and the gradients that are needed."""
        if self.ring is None:
            return self._through(operands, need, operands.keys, self.offset)
        peers, sizes = self.ring.peers, self.ring.sizes
        held = self.ring.padded(operands.keys)
        of_held = torch.zeros_like(held) if need.keys else None
        total, sums = operands.samples.new_zeros(()), _Operands()
        for step in range(peers.size):
            owner = (peers.rank - step) % peers.size
            offset = self.ring.offset - sum(sizes[:owner])
            if sizes[owner]:
                loss, gradients = self._through(operands, need, held[: sizes[owner]], offset)
                total += loss
                sums.add(gradients)
                if of_held is not None:
                    of_held[: sizes[owner]] += gradients.keys
            if of_held is not None:
                # Gradients of keys travel with the keys and return to their process after the last step.
                of_held = peers.pass_on(of_held)
            if step + 1 < peers.size:
                held = peers.pass_on(held)
        sums.keys = None if of_held is None else of_held[: len(operands.keys)]
        return total, sums

    def _through(self, operands: _Operands, need: _Operands, keys: Tensor, offset: int) -> tuple[Tensor, _Operands]:
        """Return the same for the present keys, chunk by chunk."""
        if self.chunk is None or self.chunk >= len(keys):
            return self._part(operands, need, keys, offset)
        total, sums = operands.samples.new_zeros(()), _Operands()
        sums.keys = torch.empty_like(keys) if need.keys else None
        for part in slices(len(keys), self.chunk):
            loss, gradients = self._part(operands, need, keys[part], offset - part.start)
            total += loss
            if sums.keys is not None:
                sums.keys[part] = gradients.keys
            sums.add(gradients)
        return total, sums

    def _part(self, operands: _Operands, need: _Operands, keys: Tensor, offset: int) -> tuple[Tensor, _Operands]:
        """Return the same for one chunk of keys."""
        if self.link == "sigmoid":
            draws = keys if keys.dim() == 3 else keys.unsqueeze(1)
            tensors = (operands.samples, draws, operands.scale, operands.bias)
            tensors = (None if tensor is None else tensor.detach() for tensor in tensors)
            options = {"offset": offset, "memory_budget": self.memory_budget}
            loss, gradients = sigmoid_loss(*tensors, need.all(), **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
            summed = _Operands(*gradients)
            summed.keys = None if summed.keys is None else summed.keys.view_as(keys)
            return loss, summed
        leaves = [
            tensor.detach().requires_grad_(bool(needed))
            for tensor, needed in zip((operands.samples, keys, operands.scale), need.all(), strict=False)
        ]
        samples, keys, scale = leaves
        own = torch.arange(offset, offset + len(samples), device=keys.device)
        differentiated = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.set_grad_enabled(bool(differentiated)):
            loss = summed_loss(
                Queries.explicit(samples), keys, own, link="softmax", scale=scale, memory_budget=self.memory_budget
            )
        gradients = iter(torch.autograd.grad(loss, differentiated) if differentiated else ())
        return loss.detach(), _Operands(*(next(gradients) if leaf.requires_grad else None for leaf in leaves))


def sigmoid_loss(
    queries: Tensor,
    keys: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    need: Sequence[bool],
    *,
    offset: int = 0,
    memory_budget: int | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return Σ over all queries and keys of −log p̄(pair or not), with the needed gradients, None for the others.

        logits = scale * torch.einsum("nsd,ksd->snk", queries, keys) + bias        # sides without noise have S = 1
        signs = torch.full((n, K), -1.0); signs[i, offset + i] = 1.0               # if that key exists
        return -log_mean_exp(F.logsigmoid(signs * logits), dim=0).sum()

    Args:
        queries: [n, S, D] or [n, 1, D]
        keys: [K, S, D] or [K, 1, D]
        need: whether queries, keys, scale and bias need a gradient.
        offset: index of the first query's own key; the others follow. An index outside 0 … K − 1 means no own key.
        memory_budget: bytes of working memory; None for the fastest size.
    """
    of_queries, of_keys, of_scale, of_bias = need
    samples = max(queries.shape[1], keys.shape[1])
    total = torch.zeros(
        (), dtype=torch.float64 if queries.device.type == "cpu" else queries.dtype, device=queries.device
    )
    # The gradient of the scale is the product of the queries with their gradient.
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
        # The queries of the block whose own key is in the block.
        first = max(rows.start, columns.start - offset)
        own = torch.arange(first, max(first, min(rows.stop, columns.stop - offset)), device=logits.device)
        loss, slopes = _block(logits, (own - rows.start, own + offset - columns.start))
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
        for gradient, rows in zip(sums.split(ROWS), queries.split(ROWS), strict=True):
            scale_sum += torch.dot(gradient.flatten(), rows.flatten())
        scale_sum = scale_sum.to(scale.dtype)
    return total.to(queries.dtype), (
        sums.mul_(scale) if of_queries and sums is not None else None,
        None if key_sums is None else key_sums.mul_(scale),
        scale_sum,
        None if bias_sum is None or bias is None else bias_sum.to(bias.dtype),
    )


def _blocks(queries: int, keys: int, samples: int, item: int, budget: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield the row and column slices of blocks of pairs."""
    bytes_of_logits = BLOCK_BYTES if budget is None else min(BLOCK_BYTES, budget // BUFFERS)
    pairs = max(1, bytes_of_logits // (item * samples))
    height = min(queries, ROWS, pairs)
    width = max(1, pairs // max(height, 1))
    yield from itertools.product(slices(queries, max(height, 1)), slices(keys, width))


def _pairs(queries: Tensor, keys: Tensor, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the two sides of each sample, [n, D] and [K, D]."""
    for sample in range(samples):
        yield tuple(side[:, sample if side.shape[1] > 1 else 0] for side in (queries, keys))  # pyright: ignore[reportReturnType]


def _block(logits: Tensor, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return Σ −log p̄ of a block and its gradient with respect to the logits [S, n, k], which are overwritten.

    `own` has the rows and columns of the matching pairs.
    """
    towards = logits.neg_()  # logits of the true answers; most pairs do not match
    towards[:, own[0], own[1]] *= -1
    log_p = F.logsigmoid(towards)
    slopes = towards.neg_().sigmoid_()
    if len(logits) == 1:
        loss = -log_p.sum(dtype=torch.float64 if logits.device.type == "cpu" else None)
    else:
        log_sum = log_p.logsumexp(0)
        loss = log_sum.numel() * math.log(len(logits)) - log_sum.sum()
        slopes *= log_p.sub_(log_sum).exp_()  # weight of each sample in the mean
    slopes[:, own[0], own[1]] *= -1
    return loss, slopes
