"""A second device without one: tensors that claim to be elsewhere, and a mode that computes with them on the CPU.

The mode fails where a device would: when tensors of both devices meet, a collective is given one of the CPU, or the
generator of a draw is on the other device. It notes where the program would wait for the device: values that are read
or copied, and sizes that depend on values. The device is called "meta", the only other one whose backward pass this
build of torch runs. To code that asks, its tensors are those of a CUDA device.
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "allclose")
"""Operations whose result the program waits for."""


class Claimed(Tensor):
    """A tensor on the second device; `host` is where its values are in truth."""

    host: Tensor
    is_meta, is_cuda = False, True  # what code that looks at the kind of a device sees

    @staticmethod
    def __new__(cls, host: Tensor) -> "Claimed":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        return Tensor._make_wrapper_subclass(cls, host.shape, device=DEVICE, **layout)

    def __init__(self, host: Tensor):
        self.host = host

    def __repr__(self) -> str:
        return f"Claimed({self.host!r})"

    def tolist(self) -> Any:
        """Its values, as a read."""
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise RuntimeError(f"{func} outside of SecondDevice()")


class Draws(torch.Generator):
    """A generator that may claim to be on the second device."""

    claimed: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> "Draws":
        claimed = torch.device(device)
        draws = super().__new__(cls, torch.device("cpu") if claimed == DEVICE else claimed)
        draws.claimed = claimed
        return draws

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where it claims to be."""
        return self.claimed


class Drawing(TorchFunctionMode):
    """Fails where the generator of a draw is on another device."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result, generator = func(*args, **(kwargs or {})), (kwargs or {}).get("generator")
        if generator is not None and isinstance(result, Tensor) and result.device != generator.device:
            raise RuntimeError(f"expected a generator on {result.device}, but found one on {generator.device}")
        return result


class SecondDevice(TorchDispatchMode):
    """Inside, `device="meta"` is a device that computes.

    Args:
        group: a process group that sums for the second device; None if there are no collectives.

    Attributes:
        reads: the operations so far that would have waited for the device.
    """

    def __init__(self, group: Any = None):
        super().__init__()
        self.group, self.reads = group, []
        # What does not come through a dispatch mode.
        elsewhere = {"Generator": Draws, "tensor": _moved(torch.tensor), "as_tensor": _moved(torch.as_tensor)}
        self._others = ExitStack()
        self._outside = (
            mock.patch.multiple(torch, **elsewhere),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
            Drawing(),
        )

    def __enter__(self) -> "SecondDevice":
        for context in self._outside:
            self._others.enter_context(context)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._others.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        claimed = [tensor for tensor in tensors if isinstance(tensor, Claimed)]
        name = func.overloadpacket.__name__
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, claimed)
        if not claimed and target != DEVICE.type:
            return func(*args, **kwargs)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        moves = name in ("_to_copy", "copy_", "to")
        elsewhere = [tensor for tensor in tensors if not isinstance(tensor, Claimed) and tensor.dim()]
        # Indices of the CPU are copied to the device by torch itself.
        moves |= name.startswith(("index", "_index_put")) and isinstance(args[0], Claimed)
        if claimed and elsewhere and not moves:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cpu and the second")
        to_cpu = claimed and (target == "cpu" or (name == "copy_" and not isinstance(args[0], Claimed)))
        if claimed and (name in READS or to_cpu):
            self.reads.append(name)
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if to_cpu or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return args[0] if name == "copy_" else result
        wrapped = tree_map(lambda leaf: Claimed(leaf) if isinstance(leaf, Tensor) else leaf, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if claimed else wrapped

    def _collective(self, func: Any, args: tuple, kwargs: dict, claimed: list[Claimed]) -> Any:
        if not claimed:
            return func(*args, **kwargs)  # of the CPU: fails where the group has no backend for it
        group = self.group.boxed()
        args = tuple(group if isinstance(argument, torch.ScriptObject) and _is_group(argument) else argument
                     for argument in args)  # fmt: skip
        _, work = func(*tree_map(_host, args), **kwargs)
        return args[0], work


def _moved(make: Any) -> Any:
    """Return a function that makes a tensor on the CPU, and moves it."""

    def call(*args: Any, device: Any = None, **options: Any) -> Tensor:
        value = make(*args, **options)
        return value if device is None else value.to(device)

    return call


def _is_group(argument: Any) -> bool:
    return "ProcessGroup" in str(argument._type())


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, Claimed) else leaf


def to_second_device(model: nn.Module) -> None:
    """Move parameters and buffers, in place."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = nn.Parameter(Claimed(value.detach().clone()), value.requires_grad)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = Claimed(value.clone())


def one_backend_group(path: Any) -> Any:
    """Start a group of one process that has a backend for the second device alone; return another that sums for it."""
    dist.init_process_group("meta:gloo", init_method=f"file://{path}", rank=0, world_size=1)
    return dist.new_group(backend="gloo")
