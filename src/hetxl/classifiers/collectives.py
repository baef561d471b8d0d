"""What processes that share the classes tell each other, with gradients, and how many bytes of it.

Every process computes the same loss from its own classes and what the others say of theirs, and calls `backward` of it.
So that nothing is counted as often as there are processes, each function below goes one way only:

| function | forward | backward |
| --- | --- | --- |
| `copy_to_ranks` | nothing travels | gradients are summed over the processes |
| `sum_over_ranks`, `log_sum_exp_over_ranks` | values are summed over the processes | each keeps its own part |
| `gather_from_ranks` | values are put side by side | each keeps its own part |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

from hetxl.functional._torch import touched
from hetxl.functional.engine.softmax import NEVER


class LostRankError(RuntimeError):
    """Another process of the mesh did not answer."""


@dataclass
class Traffic:
    """What one process handed to collectives."""

    bytes: int = 0  # of the tensors that it handed over, each counted once, whatever the backend makes of them
    calls: int = 0

    def add(self, values: Tensor) -> None:
        """Count one tensor."""
        self.bytes += values.numel() * values.element_size()
        self.calls += 1

    def reset(self) -> None:
        """Start from 0 again."""
        self.bytes = self.calls = 0


class Ranks:
    """The processes of a 1-D mesh, which all call the same methods in the same order; one process alone for None."""

    def __init__(self, mesh: "DeviceMesh | None"):
        if mesh is not None and mesh.ndim != 1:
            names = mesh.mesh_dim_names
            example = f'mesh["{names[-1]}"]' if names else 'mesh["classes"] of a mesh with mesh_dim_names'
            raise ValueError(f"mesh must have one dimension, found {mesh.ndim}; pass the one of the classes, {example}")
        self.mesh = mesh
        self.size = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()  # which of them this is
        self.first = 0 if mesh is None else int(mesh.mesh.min())
        self.traffic = Traffic()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        # A copied module, such as a moving average, talks through the same connections.
        return Ranks(self.mesh)

    def sum(self, values: Tensor, what: str) -> Tensor:
        """The sum over the processes, in the place of contiguous values."""
        return self._all_reduce(values, dist.ReduceOp.SUM, what)

    def max(self, values: Tensor, what: str) -> Tensor:
        """The largest of the processes' values, in the place of contiguous values."""
        return self._all_reduce(values, dist.ReduceOp.MAX, what)

    def gather(self, values: Tensor, what: str) -> Tensor:
        """The values of all processes, [ranks, ...]; they have the same shape everywhere."""
        if self.mesh is None or self.size == 1:
            return values.unsqueeze(0)
        values = values.contiguous()
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        self.traffic.add(values)
        with self._listening(what):
            dist.all_gather(gathered, values, group=self.mesh.get_group())
        return torch.stack(gathered)

    def differ(self, values: Tensor, what: str) -> Tensor:
        """By how much values that ought to be the same differ among the processes, a tensor like them."""
        both = self.max(torch.cat((values, -values)), what)
        return both[: len(values)] + both[len(values) :]

    def _all_reduce(self, values: Tensor, operation: Any, what: str) -> Tensor:
        if self.mesh is None or self.size == 1:
            return values
        self.traffic.add(values)
        with self._listening(what):
            dist.all_reduce(values, operation, group=self.mesh.get_group())
        return values

    @contextmanager
    def _listening(self, what: str) -> Iterator[None]:
        assert self.mesh is not None
        try:
            yield
        except RuntimeError as error:
            others = [int(rank) for rank in self.mesh.mesh.flatten() if int(rank) != dist.get_rank()]
            raise LostRankError(
                f"rank {dist.get_rank()}: no answer from the processes that share the classes with it, "
                f"{'ranks' if len(others) > 1 else 'rank'} {', '.join(map(str, others))}, on the {what}: one of them "
                "has ended, or takes longer than the time-out of the process group. Its own output says why; then "
                "start all of them again from the last checkpoint, as torchrun --max-restarts=3 does by itself"
            ) from error


def copy_to_ranks(ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors that every process has, on their way into computations that each does for its own classes.

    Their gradients are summed over the processes, all in one message, in at least float32.
    """
    return tensors if ranks.size == 1 else _Copy.apply(ranks, *tensors)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = [gradient for gradient, need in zip(gradients, ctx.needs_input_grad[1:], strict=True) if need]
        wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in needed) else torch.float32
        packed = torch.cat([gradient.reshape(-1).to(wide) for gradient in needed])
        parts = iter(ctx.ranks.sum(packed, "gradients").split([gradient.numel() for gradient in needed]))
        return None, *(
            next(parts).view_as(gradient).to(gradient.dtype) if need else None
            for gradient, need in zip(gradients, ctx.needs_input_grad[1:], strict=True)
        )


def sum_over_ranks(ranks: Ranks, values: Tensor) -> Tensor:
    """The sum of the processes' parts, [...]; the gradient of each part is that of the sum."""
    return values if ranks.size == 1 else _Sum.apply(ranks, values)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, values: Tensor) -> Tensor:
        return ranks.sum(values.clone(memory_format=torch.contiguous_format), "sums over the classes")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradients[0]


def log_sum_exp_over_ranks(ranks: Ranks, values: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """log Σ exp of the processes' values [...], −inf for nothing, and sums of their parts [...], which travel along.

    torch.logsumexp(torch.stack(all_values), 0), torch.stack(all_parts).sum(0)
    """
    return _LogSumExp.apply(ranks, values, *parts)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, values: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        values = values.clamp(min=NEVER)
        top = ranks.max(values.clone(memory_format=torch.contiguous_format), "largest logits")
        total, *sums = ranks.sum(torch.stack(((values - top).exp(), *parts)), "normalisers").unbind()
        log_sum = top + total.log()
        ctx.save_for_backward((values - log_sum).exp())
        return log_sum, *sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (share,) = ctx.saved_tensors
        return None, gradients[0] * share, *gradients[1:]


def gather_from_ranks(ranks: Ranks, values: Tensor, total: int) -> Tensor:
    """Columns of the processes side by side, [..., n] → [..., total].

    Each process has ⌈total / ranks⌉ columns, and the last of them what is left.
    """
    return values if ranks.size == 1 else _Gather.apply(ranks, values, total)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, values: Tensor, total: int) -> Tensor:
        width = -(-total // ranks.size)
        ctx.start, ctx.count = ranks.rank * width, values.shape[-1]
        padded = values.new_zeros(*values.shape[:-1], width)
        padded[..., : ctx.count] = values
        gathered = ranks.gather(padded, "values of all classes")  # [ranks, ..., width]
        return gathered.movedim(0, -2).flatten(-2)[..., :total].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradients[0][..., ctx.start : ctx.start + ctx.count], None


def nothing(value: float, shape: torch.Size, tensors: tuple[Tensor, ...]) -> Tensor:
    """A tensor full of a value, which is to autograd a function of the tensors.

    A process without classes still has to answer in the backward pass, where gradients are summed.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return touched(tensors[0].new_full(shape, value, dtype=wide), *tensors)
