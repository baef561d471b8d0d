"""What surrounds a computation in torch: its precision, the blocks it is cut into, autocast and the compiler."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])


class Factory(TypedDict, total=False):
    """Where and in which precision parameters are made, as torch's modules take it."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def to_accumulation_dtype(values: Tensor) -> Tensor:
    """Return values as they are summed: half precision is widened to float32, float32 and float64 stay as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def take_scalars(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Accept scalars in a state dict for a module's own parameters of one element (a load_state_dict pre-hook).

    FSDP shards parameters along their first dimension, so ours are no scalars; those of other versions and
    implementations are.
    """
    for own, parameter in module.named_parameters(recurse=False):
        name = f"{prefix}{own}"
        if parameter.dim() and name in state_dict and state_dict[name].dim() == 0:
            state_dict[name] = state_dict[name].reshape(1)


def slices(total: int, size: int, start: int = 0) -> Iterator[slice]:
    """Cut `start` … `total` into slices of a size, the last of them as long as what is left."""
    for first in range(start, total, size):
        yield slice(first, min(first + size, total))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products have the precision of what is multiplied."""
    # The meta device, for one, has no autocast.
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def touched(value: Tensor, *tensors: Tensor) -> Tensor:
    """Return a value as a function of tensors that it does not depend on, whose gradients are zeros and not None.

    Where several processes sum gradients, as DDP does, each has to have one of every tensor.
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
    """Make torch.compile call a function as it is, instead of looking inside.

    As `torch.compiler.disable`, which imports the compiler: here that waits until something is compiled. `import hetxl`
    would take twice as long otherwise.
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
    """Make torch.compile call a function of constants while it compiles, and keep the result in the graph.

    As `torch.compiler.assume_constant_result`, whose mark it sets; that imports the compiler.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
