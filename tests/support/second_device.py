"""A second device without one: tensors that claim to be elsewhere, and a mode that computes with them on the CPU.

The mode fails where a device would: when tensors of both devices meet, or a collective is given one of the CPU. It
notes where the program would wait for the device: values that are read or copied, and sizes that depend on values.
The device is called "meta", the only other one whose backward pass this build of torch runs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "allclose")
"""Operations whose result the program waits for."""


class Claimed(Tensor):
    """A tensor on the second device; `host` is where its values are in truth."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "Claimed":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        return Tensor._make_wrapper_subclass(cls, host.shape, device=DEVICE, **layout)

    def __init__(self, host: Tensor):
        self.host = host

    def __repr__(self) -> str:
        return f"Claimed({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise RuntimeError(f"{func} outside of SecondDevice()")


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


def _is_group(argument: Any) -> bool:
    return "ProcessGroup" in str(argument._type())


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, Claimed) else leaf


def to_second_device(model: nn.Module) -> None:
    """Move parameters and buffers, in their places."""
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
