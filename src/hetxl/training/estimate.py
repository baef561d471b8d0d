"""What a run will need, told before it starts: bytes by what they are for, seconds by measuring a step."""

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetxl.data.dataset import Split
from hetxl.functional import LabelLists, plan
from hetxl.training.config import TrainConfig
from hetxl.training.loader import Parts, to_device
from hetxl.training.model import Model
from hetxl.training.order import Order, derive
from hetxl.training.progress import amount, duration

LARGE = 2 * 10**9
"""Bytes from which a run is worth an estimate before it starts."""


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a training.

    Attributes:
        memory: bytes by what they are for.
        seconds_per_step: measured, without evaluations.
        head_share: of that time, the head's.
        steps: how many there are.
    """

    memory: dict[str, int]
    seconds_per_step: float
    head_share: float
    steps: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        time_of = f"{duration(self.seconds_per_step * self.steps)} for {self.steps:,} steps"
        part, share = ("head", self.head_share) if self.head_share >= 0.5 else ("backbone", 1 - self.head_share)
        largest = max(self.memory, key=lambda name: self.memory[name])
        return (
            f"about {time_of}, {share:.0%} of it in the {part}; {amount(self.total)} of memory, "
            f"most of it {largest} ({amount(self.memory[largest])})"
        )


def estimate_on(
    config: TrainConfig, model: Model, split: Split, parts: Parts, steps: int, device: torch.device
) -> Estimate | None:
    """The estimate on the first part of the first step; None where none of its rows can be read.

    Args:
        config: of the run.
        model: on its device.
        split: to train on.
        parts: that this process does in a step.
        steps: of the run.
        device: to train on.
    """
    rows, seeds = Order(len(split), derive(config.seed, 12)).of(*parts.places(0, 0))
    fetched = split.fetch(rows, seeds)
    if not len(fetched.rows):
        return None
    targets = to_device(split.labels.take(fetched.rows), device)
    return estimate(config, model, fetched.inputs.to(device), targets, steps, parts.accumulate)


def estimate(
    config: TrainConfig, model: Model, inputs: Tensor, targets: Tensor | LabelLists, steps: int, parts: int = 1
) -> Estimate:
    """Measure one part of a step, twice, and count what will be held. The model is left as it was.

    Args:
        config: of the run.
        model: on its device.
        inputs: of one part, [b, ...]
        targets: of that part.
        steps: of the run.
        parts: that this process does in a step.
    """
    buffers = {name: copy.deepcopy(value) for name, value in model.named_buffers()}
    training = model.training
    model.train()
    options: dict[str, Any] = {"reduction": "sum", "generator": torch.Generator(inputs.device).manual_seed(0)}
    kept = _Kept(model)
    with torch.random.fork_rng(devices=[]):
        seconds = head_seconds = 0.0
        for counted in (False, True):  # the first warms up
            begin = _now(inputs.device)
            with kept.counting(not counted):
                features = model.backbone(inputs)
            leaf = features.detach().requires_grad_()
            middle = _now(inputs.device)
            model.head(leaf, targets, **options).backward()
            end = _now(inputs.device)
            if features.requires_grad:
                features.backward(leaf.grad)
            if counted:
                seconds, head_seconds = _now(inputs.device) - begin, end - middle
    model.zero_grad(set_to_none=True)
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    model.train(training)
    return Estimate(_memory(config, model, inputs, kept.bytes), seconds * parts, head_seconds / seconds, steps)


def _now(device: torch.device) -> float:
    if device.type == "cuda":  # which is asked to do things, and does them later
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Kept:
    """Bytes that autograd keeps for the backward pass, each storage once, and not those of the weights."""

    def __init__(self, model: Model):
        self.bytes, self._on = 0, False
        self._seen = {value.untyped_storage().data_ptr() for value in model.parameters()}

    def counting(self, on: bool) -> torch.autograd.graph.saved_tensors_hooks:
        self._on = on
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._on:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor


def _memory(config: TrainConfig, model: Model, inputs: Tensor, kept: int) -> dict[str, int]:
    trained = sum(value.numel() * value.element_size() for value in model.parameters() if value.requires_grad)
    frozen = sum(value.numel() * value.element_size() for value in model.parameters() if not value.requires_grad)
    head: Any = model.head
    size = 0 if head.covariance is None else head.covariance.size
    blocks = plan(
        len(inputs),
        head.in_features,
        head.num_classes,
        0 if head.covariance is None else head.covariance.noise_features,
        size,
        config.train_samples,
        device=inputs.device,
        link=head.link,
        lift="copy" if config.head in ("het", "het-h") else "product",
    )
    return {
        "weights": trained + frozen,
        "their gradients": trained,
        "the optimiser's moments": 2 * trained,
        "the moving average": trained if config.ema else 0,
        "the head's blocks": blocks.bytes,
        "the backbone's activations": kept,
    }
