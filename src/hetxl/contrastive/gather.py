"""Batches that are spread over processes: the number of pairs of each process, and gathering rows with gradients.

DDP averages gradients over the processes. The gradients here are scaled so that the average equals the gradient of one
process with the whole batch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Peers:
    """The processes that share a batch of pairs. All must call the same methods in the same order.

    Args:
        group: a torch.distributed process group; None for all processes, looked up on first use, so that a loss can be
            created before the process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "Peers":
        # A copied module, such as a moving average, uses the same connections.
        return Peers(self.group)

    @property
    def size(self) -> int:
        """Return the number of processes."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    def share_of(self, count: int, device: torch.device) -> "Share":
        """Return the division of a batch, of which this process has `count` pairs."""
        if self.size == 1:
            return Share(self, [count])
        own = torch.tensor([count], device=device)
        counts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(counts, own, group=self.group)
        return Share(self, [int(value) for value in counts])

    def pass_on(self, values: Tensor) -> Tensor:
        """Send contiguous values to the next process and return those of the previous one, of the same shape."""
        received = torch.empty_like(values)
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        if self.group is not None:
            after, before = (dist.get_global_rank(self.group, rank) for rank in (after, before))
        operations = [
            dist.P2POp(dist.isend, values, after, group=self.group),
            dist.P2POp(dist.irecv, received, before, group=self.group),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return received


class Alone(Peers):
    """A single process, independent of any others."""

    @property
    def size(self) -> int:
        """Return 1."""
        return 1


class Share:
    """The division of a batch over processes, and the part of this process."""

    def __init__(self, peers: Peers, sizes: list[int]):
        self.peers, self.sizes = peers, sizes
        self.offset = sum(sizes[: peers.rank])  # pairs of the processes before this one
        self.total = sum(sizes)  # B
        self.own = slice(self.offset, self.offset + sizes[peers.rank])  # this process's rows of the whole batch

    @property
    def weight(self) -> float:
        """Return the factor that converts a sum over this process's queries to its part of the mean loss."""
        return self.peers.size / self.total

    def padded(self, values: Tensor) -> Tensor:
        """Pad rows [n, ...] to the largest number of rows of any process, since messages must have equal sizes."""
        missing = max(self.sizes) - len(values)
        if not missing:
            return values.contiguous()
        return torch.cat((values, values.new_zeros(missing, *values.shape[1:])))

    def gather(self, values: Tensor, *, same_loss: bool) -> Tensor:
        """Return rows of all processes, [n, ...] → [B, ...], with gradients.

        With `same_loss`, every process computes the same loss from them and therefore has the whole gradient of its
        rows. Otherwise the gradients are summed over the processes.
        """
        return values if self.peers.size == 1 else _Gather.apply(self, same_loss, values)

    def mean_value(self, part: Tensor) -> Tensor:
        """Return the mean of the processes' parts of the loss; its gradient is that of this process's part."""
        return part if self.peers.size == 1 else _MeanValue.apply(self, part)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Share, same_loss: bool, values: Tensor) -> Tensor:
        ctx.share, ctx.same_loss = share, same_loss
        padded = share.padded(values)
        gathered = [torch.empty_like(padded) for _ in share.sizes]
        dist.all_gather(gathered, padded, group=share.peers.group)
        return torch.cat([rows[:count] for rows, count in zip(gathered, share.sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        share: Share = ctx.share
        if ctx.same_loss:
            # Gradients are not summed here, and DDP will divide by the number of processes.
            return None, None, gradients[0][share.own] * share.peers.size
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=share.peers.group)
        return None, None, total[share.own]


class _MeanValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Share, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=share.peers.group)
        return total / share.peers.size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradients[0]
