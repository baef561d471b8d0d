"""One direction of a loss with its gradients at once, and for the sigmoid a part of the keys at a time: chunks of them
on one process, and those of one process after the other when they go round in a ring.

The gradients are all that is kept for the backward pass. The draws of the queries are let go, and pairs count by
themselves under the sigmoid, so that a part is finished before the next one comes: memory is that of one part, in both
passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetxl.contrastive.gather import Share
from hetxl.contrastive.once import first_order
from hetxl.contrastive.queries import Queries, summed_loss
from hetxl.contrastive.sigmoid import sigmoid_loss
from hetxl.functional import Link


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
    """Σ over queries of −log p̄, as `summed_loss` of explicit draws; good for one backward pass.

    In a ring the gradient is that of the sum over the processes, and takes for granted that the result has the same
    gradient on all of them.

    Args:
        samples: [n, S, D], the draws of the queries.
        keys: [K, D], or draws of them [K, S, D] (sigmoid); in a ring, n of this process.
        link: "softmax" or "sigmoid"
        scale: of the logits, a scalar.
        bias: of the logits, a scalar or None.
        offset: where the first query's own key is among the keys; the others' follow.
        chunk: how many keys at a time (sigmoid); None for all that a process has.
        ring: the batch over the processes whose keys come round (sigmoid); None for the keys that are here.
        memory_budget: bytes of the engine's working memory.
    """
    if ring is not None and ring.peers.size == 1:
        ring = None
    given = (samples, keys, scale, bias)
    if not torch.is_grad_enabled():
        # Parameters ask for gradients that nobody will read.
        given = tuple(None if tensor is None else tensor.detach() for tensor in given)
    return _AtOnce.apply(_Walk(link, offset, chunk, ring, memory_budget), *given)


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: "_Walk", *given: Any) -> Tensor:
        loss, ctx.gradients = walk.run(_Operands(*given), _Operands(*ctx.needs_input_grad[1:]))
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found: _Operands | None = ctx.gradients
        if found is None:
            raise RuntimeError("a contrastive loss can go backward once: compute it again instead of retain_graph=True")
        ctx.gradients = None  # scaled in place, so good for one time
        return None, *(None if tensor is None else tensor.mul_(gradients[0]) for tensor in found.all())


@dataclass
class _Operands:
    """What a loss is a function of; or whether each needs a gradient; or the gradients, None where there is none."""

    samples: Any = None
    keys: Any = None
    scale: Any = None
    bias: Any = None

    def all(self) -> tuple[Any, ...]:
        return self.samples, self.keys, self.scale, self.bias

    def add(self, more: "_Operands") -> None:
        """Add gradients in place, but for those of the keys, which are others each time."""
        for name in ("samples", "scale", "bias"):
            total, part = getattr(self, name), getattr(more, name)
            setattr(self, name, part if total is None else total.add_(part))


@dataclass(frozen=True)
class _Walk:
    """How the keys are gone through."""

    link: Link
    offset: int
    chunk: int | None
    ring: Share | None
    memory_budget: int | None

    def run(self, given: _Operands, need: _Operands) -> tuple[Tensor, _Operands]:
        """The loss, and its gradients where they are needed."""
        if self.ring is None:
            return self._through(given, need, given.keys, self.offset)
        peers, sizes = self.ring.peers, self.ring.sizes
        held = self.ring.padded(given.keys)
        of_held = torch.zeros_like(held) if need.keys else None
        total, sums = given.samples.new_zeros(()), _Operands()
        for step in range(peers.size):
            owner = (peers.rank - step) % peers.size
            offset = self.ring.offset - sum(sizes[:owner])
            if sizes[owner]:
                loss, found = self._through(given, need, held[: sizes[owner]], offset)
                total += loss
                sums.add(found)
                if of_held is not None:
                    of_held[: sizes[owner]] += found.keys
            if of_held is not None:
                # Gradients of keys travel with them; after the last step they are home.
                of_held = peers.pass_on(of_held)
            if step + 1 < peers.size:
                held = peers.pass_on(held)
        sums.keys = None if of_held is None else of_held[: len(given.keys)]
        return total, sums

    def _through(self, given: _Operands, need: _Operands, keys: Tensor, offset: int) -> tuple[Tensor, _Operands]:
        """The same for keys that are here, a chunk at a time."""
        if self.chunk is None or self.chunk >= len(keys):
            return self._part(given, need, keys, offset)
        total, sums = given.samples.new_zeros(()), _Operands()
        sums.keys = torch.empty_like(keys) if need.keys else None
        for start in range(0, len(keys), self.chunk):
            part = slice(start, min(start + self.chunk, len(keys)))
            loss, found = self._part(given, need, keys[part], offset - start)
            total += loss
            if sums.keys is not None:
                sums.keys[part] = found.keys
            sums.add(found)
        return total, sums

    def _part(self, given: _Operands, need: _Operands, keys: Tensor, offset: int) -> tuple[Tensor, _Operands]:
        """The same for some keys at once."""
        if self.link == "sigmoid":
            draws = keys.detach() if keys.dim() == 3 else keys.detach().unsqueeze(1)
            loss, found = sigmoid_loss(
                given.samples.detach(),
                draws,
                given.scale.detach(),
                None if given.bias is None else given.bias.detach(),
                need.all(),
                offset=offset,
                memory_budget=self.memory_budget,
            )
            return loss, _Operands(*found._replace(keys=None if found.keys is None else found.keys.view_as(keys)))
        leaves = [
            tensor.detach().requires_grad_(bool(wanted))
            for tensor, wanted in zip((given.samples, keys, given.scale), need.all(), strict=False)
        ]
        samples, keys, scale = leaves
        own = torch.arange(offset, offset + len(samples), device=keys.device)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.set_grad_enabled(bool(wanted)):
            loss = summed_loss(
                Queries.explicit(samples), keys, own, link="softmax", scale=scale, memory_budget=self.memory_budget
            )
        found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
        return loss.detach(), _Operands(*(next(found) if leaf.requires_grad else None for leaf in leaves))
