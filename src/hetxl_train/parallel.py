"""Distribute a model over processes, with one class per strategy. The rest of the loop does not depend on it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hetxl_train.config import ParallelOptions, TrainConfig
from hetxl_train.distributed import World

Network = TypeVar("Network", bound=nn.Module)
BLOCK = 2**24
"""Block size for gathering a divided tensor in the main process."""
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return a context that computes matrix products in a precision."""
    dtype = PRECISIONS[precision]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


# ---- the network in front of a head, or a tower


def prepare(network: Network, options: ParallelOptions, world: World) -> Network:
    """Apply the options to a network on its device; its results and the names of its parameters do not change."""
    if options.sync_batchnorm and world.processes > 1:
        if world.device.type == "cpu":
            raise ValueError("sync_batchnorm needs an accelerator, found device cpu; leave it out")
        network = cast(Network, nn.SyncBatchNorm.convert_sync_batchnorm(network))
    if options.channels_last:
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        network.register_forward_pre_hook(_channels_last)
        # On the CPU, torch 2.13 writes out of bounds in the gradient of a strided 1 × 1 convolution of 8 or 12 channels
        # in this format. Convolving every stride-th pixel is equivalent.
        for layer in (module for module in network.modules() if isinstance(module, nn.Conv2d)):
            if world.device.type == "cpu" and layer.kernel_size == (1, 1) and layer.padding == (0, 0):
                layer.register_forward_pre_hook(partial(_strided_pixels, layer.stride))
                layer.stride = (1, 1)
    if options.activation_checkpointing:
        checkpoint_activations(network)
    if options.compile:
        network.compile()
    return network


def _channels_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    images, *others = inputs
    images_too = isinstance(images, Tensor) and images.dim() == 4
    return (images.contiguous(memory_format=torch.channels_last) if images_too else images, *others)


def _strided_pixels(stride: tuple[int, ...], module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0][..., :: stride[0], :: stride[1]]


def checkpoint_activations(network: nn.Module) -> None:
    """Make a network store only the inputs of its blocks, and recompute the rest in the backward pass.

    Networks of timm and transformers have this built in; in others, blocks are the entries of lists and sequences.
    """
    for method, arguments in (("set_grad_checkpointing", (True,)), ("gradient_checkpointing_enable", ())):
        own = [module for module in network.modules() if hasattr(module, method)]
        if own:
            getattr(own[0], method)(*arguments)
            return
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    inner = {id(child) for parent in lists for module in parent for child in module.modules() if child is not module}
    for block in (module for parent in lists if id(parent) not in inner for module in parent):
        if any(True for _ in block.parameters()):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


# ---- processes


class Alone:
    """A single process with the whole model."""

    divided = False  # whether weights are divided over processes, so that a process needs the others to compute

    def divide(self, model: nn.Module) -> None:
        """Divide the weights of a model among the processes, in place, before an optimiser is created."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call instead of the model in training."""
        return model

    def accumulating(self, called: nn.Module) -> AbstractContextManager[object]:
        """Return a context for all parts of a batch except the last, whose gradients are summed but not exchanged."""
        return contextlib.nullcontext()

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients that the backward pass has not averaged over the processes, once per step."""

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale gradients down to a norm of at most `limit`; return the norm before."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    def gathered(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which every process has all weights, to evaluate its own rows."""
        return contextlib.nullcontext()


class Replicas(Alone):
    """Every process has the whole model, and gradients are averaged (DDP)."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with its gradients averaged over the processes in the backward pass."""
        # Every step uses all modules of the noise, so every parameter has a gradient.
        return DistributedDataParallel(model)

    def accumulating(self, called: nn.Module) -> AbstractContextManager[object]:
        """Return a context without exchange."""
        assert isinstance(called, DistributedDataParallel)
        return called.no_sync()


class ClassShards(Replicas):
    """Processes share the classes of a `ShardedClassifier` and replicate the rest of the model.

    The mesh is (data, classes): processes along `classes` see the same rows, processes along `data` different rows.
    """

    divided = True

    def __init__(self, world: World):
        assert world.mesh is not None
        self.data = world.replicas

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with all gradients except the classifier's averaged over all processes.

        Processes that share the classes have equal gradients, up to operations without a fixed order.
        """
        divided = divided_parameters(model)
        if len(divided) == sum(parameter.requires_grad for parameter in model.parameters()):
            return model
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(divided))
        return super().wrap(model)

    def accumulating(self, called: nn.Module) -> AbstractContextManager[object]:
        """Return a context without exchange."""
        return super().accumulating(called) if isinstance(called, DistributedDataParallel) else contextlib.nullcontext()

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of the classifier over the processes that have the same classes."""
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                self.data.sum(local(parameter.grad)).div_(self.data.processes)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clip gradients by their total norm; torch's norm does not mix divided and other tensors."""
        parts = [[p for p in parameters if isinstance(p, DTensor) is divided] for divided in (True, False)]
        gradients = [[p.grad for p in part if p.grad is not None] for part in parts]
        norm = torch.stack([whole(nn.utils.get_total_norm(some)) for some in gradients if some]).norm()
        for part in parts:
            nn.utils.clip_grads_with_norm_([cast(Tensor, p) for p in part], limit, norm)
        return norm


class Shards(Alone):
    """Every process has a part of each weight, its gradient and its moments (FSDP2).

    The children of the model, such as the backbone or the head, or those returned by `model.units()`, are gathered
    while they are called.
    """

    divided = True

    def __init__(self, world: World):
        self.mesh = init_device_mesh(world.device.type, (world.processes,), mesh_dim_names=("data",))

    def divide(self, model: nn.Module) -> None:
        """Divide the weights of a model among the processes."""
        from torch.distributed.fsdp import fully_shard

        own: Any = model
        units = own.units() if hasattr(model, "units") else model.children()
        for module in (*units, model):
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=self.mesh)

    @contextlib.contextmanager
    def accumulating(self, called: nn.Module) -> Iterator[None]:
        """Yield a context without exchange of gradients."""
        root: Any = called
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Yield a context in which every process has all weights, and calls exchange none."""
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                module.set_reshard_after_forward(module is not model, recurse=False)


def strategy(name: str, world: World) -> Alone:
    """Return the strategy "ddp" or "fsdp"."""
    if world.processes == 1:
        return Alone()
    if world.mesh is not None:
        return ClassShards(world)
    return Shards(world) if name == "fsdp" else Replicas()


def sharing_classes(world: World, config: TrainConfig) -> World:
    """Return the processes as a mesh (data, classes) if the configuration splits the classes over them."""
    if config.classifier != "sharded" or world.processes == 1:
        return world
    shards = config.class_shards or world.processes
    if world.processes % shards:
        raise ValueError(
            f"class_shards must divide the number of processes, {world.processes}, found {shards}; "
            f"leave it out to split the classes over all of them"
        )
    # Processes that share the classes communicate most, so they are neighbours, which are often on one machine.
    shape, names = (world.processes // shards, shards), ("data", "classes")
    return replace(world, mesh=init_device_mesh(world.device.type, shape, mesh_dim_names=names))


def by_division(groups: Iterable[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """Split groups for an optimiser into parameters whose names have a prefix and others.

    Fused optimisers do not mix divided and other tensors. The groups do not depend on the number of processes.
    """
    parted = []
    for group in groups:
        for divided in (False, True):
            pairs = [
                (name, parameter)
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if name.startswith(prefix) is divided
            ]
            if pairs:
                names, parameters = (list(values) for values in zip(*pairs, strict=True))
                parted.append({**group, "names": names, "params": parameters})
    return parted


# ---- tensors of which a process may have a part


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor that may be divided over the processes; all processes call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def number(module: nn.Module) -> float:
    """Return the value of a module such as τ, whose parameters may be divided; all processes call this."""
    values = {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}
    return float(torch.func.functional_call(module, values, ()))


def whole_on_main(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Gather divided tensors one by one in the main process, and return all tensors."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = _rows_on_main(tensor, world) if isinstance(tensor, DTensor) else tensor
        if world.is_main:
            gathered[name] = value
    return gathered


@torch.no_grad()
def _rows_on_main(tensor: DTensor, world: World) -> Tensor:
    """Gather a tensor on the CPU of the main process, and return nothing in others.

    Rows are sent in blocks, so that other processes and devices need memory only for their part and a block.
    """
    mesh = tensor.device_mesh
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if 0 not in ranks:  # the main process gets the same rows from its own mesh
        return tensor.new_empty(0)
    if mesh.ndim != 1 or not tensor.placements[0].is_shard(0):
        return tensor.full_tensor().cpu()
    part, rows, each = tensor.to_local(), len(tensor), -(-len(tensor) // len(ranks))
    value = torch.empty(tensor.shape if world.is_main else 0, dtype=tensor.dtype)
    step = max(1, BLOCK * rows // max(1, tensor.numel()))
    for index, rank in enumerate(ranks):
        first, last = min(index * each, rows), min((index + 1) * each, rows)
        for start in range(first, last, step):
            stop = min(start + step, last)
            if rank == world.rank:
                block = part[start - first : stop - first].contiguous()
            else:
                block = part.new_empty(stop - start, *tensor.shape[1:])
            dist.broadcast(block, rank, mesh.get_group())
            if world.is_main:
                value[start:stop] = block
    return value


def divided_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Divide a replicated value like a tensor; a value that is already divided is returned unchanged."""
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def divided_parameters(module: nn.Module) -> dict[str, DTensor]:
    """Return the parameters of which this process has a part, by name."""
    return {name: value for name, value in module.named_parameters() if isinstance(value, DTensor)}


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load replicated or divided values into a module that may be divided."""
    own = module.state_dict()
    module.load_state_dict(
        {name: divided_like(value, own[name]) if name in own else value for name, value in state.items()}
    )
