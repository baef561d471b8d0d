"""Communication with gradients between processes that share the classes, and its number of bytes.

Every process computes the same loss, from its own classes and the sums of the others, and calls `backward` on it. So
that gradients are not counted once per process, each function communicates in one direction only:

| function | forward | backward |
| --- | --- | --- |
| `copy_to_ranks` | no communication | gradients are summed over the processes |
| `sum_over_ranks`, `log_sum_exp_over_ranks` | values are summed over the processes | each process keeps its own part |
| `gather_from_ranks` | values are concatenated | each process keeps its own part |
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
    """The traffic that one process passed to collectives."""

    bytes: int = 0  # size of the tensors, each counted once, independent of the backend
    calls: int = 0

    def add(self, values: Tensor) -> None:
        """Count one tensor."""
        self.bytes += values.numel() * values.element_size()
        self.calls += 1

    def reset(self) -> None:
        """Reset to 0."""
        self.bytes = self.calls = 0


class Ranks:
    """The processes of a 1-D mesh, or a single process for None. All must call the same methods in the same order."""

    def __init__(self, mesh: "DeviceMesh | None"):
        if mesh is not None and mesh.ndim != 1:
            names = mesh.mesh_dim_names
            example = f'mesh["{names[-1]}"]' if names else 'mesh["classes"] of a mesh with mesh_dim_names'
            raise ValueError(
                f"mesh must have one dimension, found {mesh.ndim}; pass the dimension of the classes, {example}"
            )
        self.mesh = mesh
        self.size = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()  # rank of this process
        self.first = 0 if mesh is None else int(mesh.mesh.min())
        self.traffic = Traffic()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        # A copied module, such as a moving average, uses the same connections.
        return Ranks(self.mesh)

    def sum(self, values: Tensor, what: str) -> Tensor:
        """Sum contiguous values over the processes, in place."""
        return self._all_reduce(values, dist.ReduceOp.SUM, what)

    def max(self, values: Tensor, what: str) -> Tensor:
        """Take the maximum of contiguous values over the processes, in place."""
        return self._all_reduce(values, dist.ReduceOp.MAX, what)

    def gather(self, values: Tensor, what: str) -> Tensor:
        """Return the values of all processes, [ranks, ...]; their shapes must be equal."""
        if self.mesh is None or self.size == 1:
            return values.unsqueeze(0)
        values = values.contiguous()
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        self.traffic.add(values)
        with self._listening(what):
            dist.all_gather(gathered, values, group=self.mesh.get_group())
        return torch.stack(gathered)

    def differ(self, values: Tensor, what: str) -> Tensor:
        """Return by how much values differ among the processes, elementwise."""
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
                "has ended, or takes longer than the time-out of the process group. Its own output says why. Restart "
                "all processes from the last checkpoint; torchrun --max-restarts=3 does this automatically"
            ) from error


def copy_to_ranks(ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return replicated tensors as inputs of computations on the process's own classes.

    Their gradients are summed over the processes in one message, in at least float32.
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
    """Sum the processes' parts, [...]; the gradient of each part is that of the sum."""
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
    """Return log Σ exp of the processes' values [...], −inf for none, and the sums of their parts [...].

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
    """Concatenate the processes' columns, [..., n] → [..., total].

    Each process has ⌈total / ranks⌉ columns, and the last processes have the rest.
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
    """Return a tensor full of a value that depends on the tensors for autograd.

    A process without classes must still take part in the backward pass, which sums gradients.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return touched(tensors[0].new_full(shape, value, dtype=wide), *tensors)
