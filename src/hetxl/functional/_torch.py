"""Helpers for computations in torch: precision, blocks, autocast and the compiler."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])


class Factory(TypedDict, total=False):
    """Device and dtype of new parameters, as arguments of torch modules."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def to_accumulation_dtype(values: Tensor) -> Tensor:
    """Return values in the dtype for sums: half precision becomes float32, other dtypes do not change."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def take_scalars(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Accept scalars in a state dict for a module's own parameters of one element (a load_state_dict pre-hook).

    FSDP shards parameters along their first dimension, so ours have one; older versions and other implementations
    store scalars.
    """
    for own, parameter in module.named_parameters(recurse=False):
        name = f"{prefix}{own}"
        if parameter.dim() and name in state_dict and state_dict[name].dim() == 0:
            state_dict[name] = state_dict[name].reshape(1)


def slices(total: int, size: int, start: int = 0) -> Iterator[slice]:
    """Cut `start` … `total` into slices of a size; the last slice has the rest."""
    for first in range(start, total, size):
        yield slice(first, min(first + size, total))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products have the precision of their operands."""
    # Some devices, such as meta, have no autocast.
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def touched(value: Tensor, *tensors: Tensor) -> Tensor:
    """Make a value depend on tensors with a gradient of zero, instead of None.

    When several processes sum gradients, as in DDP, each process needs a gradient of every tensor.
    """
    return _Touched.apply(value, *tensors)


class _Touched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return gradients[0], *(torch.zeros_like(tensor) if need else None for tensor, need in needs)


def not_compiled(function: Function) -> Function:
    """Make torch.compile call a function without tracing it.

    Like `torch.compiler.disable`, but the compiler is imported only when something is compiled, since it would double
    the time of `import hetxl`.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def constant_when_compiled(function: Function) -> Function:
    """Make torch.compile call a function of constants at compile time and keep the result in the graph.

    Sets the same mark as `torch.compiler.assume_constant_result`, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
