"""Estimate the memory and time of a run before it starts, by measuring a step."""

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetxl_train.formatting import amount, rough_duration

LARGE, LONG = 2 * 10**9, 30.0
"""Bytes and seconds above which a run prints its estimate."""


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a run."""

    memory: dict[str, int]  # bytes by purpose
    seconds_per_step: float  # measured, without evaluations
    steps: int
    head_share: float | None = None  # the head's share of that time; None without a head

    @property
    def total(self) -> int:
        """Return the total number of bytes."""
        return sum(self.memory.values())

    @property
    def matters(self) -> bool:
        """Return whether the run is long or large."""
        return self.seconds_per_step * self.steps >= LONG or self.total >= LARGE

    def __str__(self) -> str:
        text = f"about {rough_duration(self.seconds_per_step * self.steps)} for {self.steps:,} steps"
        if self.head_share is not None:
            part, share = ("head", self.head_share) if self.head_share >= 0.5 else ("backbone", 1 - self.head_share)
            text += f", {share:.0%} of it in the {part}"
        largest = max(self.memory, key=lambda name: self.memory[name])
        return f"{text}; {amount(self.total)} of memory, most of it {largest} ({amount(self.memory[largest])})"


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode to try a step, and restore it and all random states afterwards."""
    buffers = {name: copy.deepcopy(value) for name, value in model.named_buffers()}
    training = model.training
    model.train()
    with torch.random.fork_rng(devices=[]):
        yield
    model.zero_grad(set_to_none=True)
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    model.train(training)


class Activations:
    """Count the bytes that autograd keeps for the backward pass, each storage once, without weights."""

    def __init__(self, model: nn.Module):
        self.bytes = 0
        self._weights = {value.untyped_storage().data_ptr() for value in model.parameters()}
        self._seen: set[int] = set()

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that starts a new count."""
        self.bytes, self._seen = 0, set(self._weights)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def weight_memory(model: nn.Module) -> dict[str, int]:
    """Return the bytes of weights, gradients and moments."""
    every = sum(value.numel() * value.element_size() for value in model.parameters())
    trained = sum(value.numel() * value.element_size() for value in model.parameters() if value.requires_grad)
    return {"weights": every, "their gradients": trained, "the optimiser's moments": 2 * trained}


def now(device: torch.device) -> float:
    """Return the time after a device has finished all pending work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
