"""Two processes on one machine, and what they run. The workers are here, by name, so that a new process finds them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hetxl_train.distributed import destroy_process_group
from support.cases import LINKS, VARIANTS, make, normals, targets_for

RANKS = 2
TIMEOUT = 120
B, D, K = 8, 6, 11
CASES = [(variant, link) for variant in VARIANTS for link in LINKS]


class Classifier(nn.Module):
    """A backbone of one layer with a head, called with targets for the loss."""

    def __init__(self, variant: str, link: str, dtype: torch.dtype = torch.float64, **options: Any):
        super().__init__()
        self.backbone = nn.Linear(D, D, dtype=dtype)
        self.head = make(variant, D, K, link=link, dtype=dtype, **options)

    def forward(self, features: Tensor, targets: Tensor | None, noise: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.backbone(features)), targets, noise=noise)


def setting(variant: str, link: str, **options: Any) -> tuple[Classifier, Tensor, Tensor, Tensor | None]:
    """A model with a batch of features, targets and normals; the same in every process."""
    torch.manual_seed(0)
    model = Classifier(variant, link, **options)
    features, targets = torch.randn(B, D, dtype=torch.float64), targets_for(model.head, B)
    return model, features, targets, None if model.head.covariance is None else normals(model.head, B)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters by name, whole where they are sharded."""
    values = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        values[name.removeprefix("module.")] = _whole(parameter.grad).detach().clone()
    return values


def _whole(values: Any) -> Tensor:
    return values.full_tensor() if hasattr(values, "full_tensor") else values


def run(worker: Callable[[int], Any], folder: Path) -> list[Any]:
    """What a worker answers on each rank; stopped after two minutes."""
    context = mp.spawn(_enter, args=(worker, str(folder)), nprocs=RANKS, join=False)
    assert context is not None
    deadline = time.monotonic() + TIMEOUT
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{worker.__name__} took more than {TIMEOUT} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def _enter(rank: int, worker: Callable[[int], Any], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    try:
        torch.save(worker(rank), f"{folder}/rank{rank}.pt")
    finally:
        destroy_process_group()


def _half(rank: int) -> slice:
    return slice(rank * B // RANKS, (rank + 1) * B // RANKS)


def replicated(rank: int) -> dict[str, Any]:
    """DDP: gradients of every case, each rank with its half of the batch; an empty rank; three steps."""
    results: dict[str, Any] = {}
    part = _half(rank)
    for variant, link in CASES:
        model, features, targets, noise = setting(variant, link)
        model = DistributedDataParallel(model)
        model(features[part], targets[part], None if noise is None else noise[part]).backward()
        results[f"{variant} {link}"] = gradients(model)

    model, features, targets, noise = setting("het-xl", "softmax")
    assert noise is not None
    model = DistributedDataParallel(model)
    model(features[part], targets[part] if rank == 0 else torch.full((B // RANKS,), -100), noise[part]).backward()
    results["second rank empty"] = gradients(model)

    model, features, targets, _ = setting("het-xl", "softmax")
    results["before"] = _values(model)
    model = DistributedDataParallel(model)
    _train(model, features[part], targets[part], rank)
    results["after"] = _values(model.module)
    return results


def sharded(rank: int) -> dict[str, Any]:
    """FSDP2 over backbone and head, with a fixed τ: the same."""
    return _sharded(rank, temperature=1.3)


def sharded_with_learned_temperature(rank: int) -> dict[str, Any]:
    """FSDP2 over heads as they are by default."""
    return _sharded(rank)


def _sharded(rank: int, **options: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    part = _half(rank)
    mesh = init_device_mesh("cpu", (RANKS,))

    def shard(model: Classifier, **policy: Any) -> Classifier:
        # The head by itself, so that its parameters are gathered for its call and let go after it.
        fully_shard(model.head, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
        return model

    for variant, link in CASES:
        model, features, targets, noise = setting(variant, link, **options)
        shard(model)(features[part], targets[part], None if noise is None else noise[part]).backward()
        results[f"{variant} {link}"] = gradients(model)

    model, features, targets, noise = setting("het-xl", "softmax", **options)
    assert noise is not None
    F.nll_loss(shard(model)(features[part], None, noise[part]), targets[part]).backward()
    results["log-probabilities"] = gradients(model)

    model, features, targets, noise = setting("het-xl", "softmax", **options)
    assert noise is not None
    shard(model.float(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model(features[part].float(), targets[part], noise[part].float()).backward()
    results["bfloat16"] = gradients(model)

    model, features, targets, _ = setting("het-xl", "softmax", **options)
    results["before"] = _values(model)
    shard(model)
    _train(model, features[part], targets[part], rank)
    results["after"] = _values(model)
    return results


def _train(model: nn.Module, features: Tensor, targets: Tensor, rank: int) -> None:
    """Three steps, each rank with draws of its own."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    for _ in range(3):
        optimiser.zero_grad()
        model(features, targets).backward()
        optimiser.step()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(value).detach().clone() for name, value in model.state_dict().items()}
