"""What processes that share the classes tell each other, and what they do when one of them is lost."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hetxl.classifiers.collectives import (
    LostRankError,
    Ranks,
    copy_to_ranks,
    gather_from_ranks,
    log_sum_exp_over_ranks,
    sum_over_ranks,
)
from support.sharded import B, D, Model


def exchanges(rank: int, ranks: int) -> dict[str, Any]:
    """Every collective with its gradients; process 1 of the last has nothing."""
    ranks_of = Ranks(init_device_mesh("cpu", (ranks,)))
    own, common, weight = exchanged(rank), exchanged(99), exchanged(100)
    answers: dict[str, Any] = {"first": ranks_of.first, "size": ranks_of.size}

    def record(name: str, value: Tensor, *inputs: Tensor) -> None:
        gradients = torch.autograd.grad((value * weight[: value.shape[-1]]).sum(), inputs)
        answers[name] = value.detach(), *gradients, ranks_of.traffic.bytes, ranks_of.traffic.calls
        ranks_of.traffic.reset()

    first, second = common.clone().requires_grad_(), common[0].clone().float().requires_grad_()
    copies = copy_to_ranks(ranks_of, first, second)
    record("copy", (copies[0] * own + copies[1].double()).sum(0), first, second)
    values = own.clone().requires_grad_()
    record("sum", sum_over_ranks(ranks_of, values * 1.0), values)
    values, parts = own.clone().requires_grad_(), exchanged(rank + 50).requires_grad_()
    record("log-sum-exp", torch.sub(*log_sum_exp_over_ranks(ranks_of, values, parts)), values, parts)
    alone = torch.full_like(own, 0.5 if rank == 0 else -torch.inf)
    answers["alone"] = log_sum_exp_over_ranks(ranks_of, alone, torch.zeros_like(alone))[0]
    ranks_of.traffic.reset()
    values = own[:, : 1 if rank == ranks - 1 else 2].clone().requires_grad_()
    record("gather", gather_from_ranks(ranks_of, values, 2 * ranks - 1), values)
    answers["differ"] = ranks_of.differ(torch.tensor([1.0, float(rank)]), "test")
    values = own.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sum_over_ranks(ranks_of, values).square().sum(), values, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        answers["twice"] = str(error)
    return answers


def exchanged(seed: int) -> Tensor:
    """A matrix [4, 5] of one process."""
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lost(rank: int, ranks: int, timeout: float) -> dict[str, Any]:
    """Process 1 is killed in the middle of a step, process 2 is slower than the time-out; what process 0 says of it."""
    answers, models = {}, {}
    for name, other in (("killed", 1), ("slow", 2)):
        group = dist.new_group([0, other], timeout=timedelta(seconds=timeout))
        if rank in (0, other):
            mesh = DeviceMesh.from_group(group, "cpu")
            models[name] = Model("het-xl", "softmax", 11, mesh, False)
    dist.barrier()
    inputs, targets = torch.ones(B, D, dtype=torch.float64), torch.arange(B)
    for name, model in models.items():
        for step in range(3):
            loss = model(inputs, targets, num_samples=2)
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 2 and rank == 2:
                time.sleep(2 * timeout)
            started = time.monotonic()
            try:
                loss.backward()
            except LostRankError as error:
                answers[name] = {"message": str(error), "seconds": time.monotonic() - started}
    return answers
