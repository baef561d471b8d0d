"""What a contrastive run will need, told before it starts: seconds by measuring a step, bytes by what they are for."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from hetxl.contrastive.loop import ContrastiveTrainer
from hetxl.training.progress import amount, duration


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a training.

    Attributes:
        seconds_per_step: measured, without evaluations.
        steps: how many there are.
        memory: bytes by what they are for.
    """

    seconds_per_step: float
    steps: int
    memory: dict[str, int]

    def __str__(self) -> str:
        total = sum(self.memory.values())
        largest = max(self.memory, key=lambda name: self.memory[name])
        return (
            f"about {duration(self.seconds_per_step * self.steps)} for {self.steps:,} steps; {amount(total)} of "
            f"memory, most of it {largest} ({amount(self.memory[largest])})"
        )


def estimate(trainer: ContrastiveTrainer) -> Estimate:
    """Measure loss and gradients of a step, twice, and count what will be held. The model is left as it was.

    Args:
        trainer: before its first step. With several processes the others wait: only what needs no exchange is measured.
    """
    model, world = trainer.model, trainer.world
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    rows, seeds = trainer.order.of(*trainer.parts.places(0, 0))
    kept: dict[int, int] = {}
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    seconds = 0.0
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):  # the first warms up
            begin = time.perf_counter()
            fetched = trainer.split.images.fetch(rows, seeds)
            if not len(fetched.rows):
                break
            kept.clear()
            texts = trainer.table.take(trainer.split.sources[fetched.rows]).to(world.device)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                image, text = model.image(fetched.inputs.to(world.device)), model.text(texts)
                found = model.loss(image, text) if world.processes == 1 else (image * text).sum()
            if found.requires_grad:
                found.backward()
            _wait(world.device)
            seconds = time.perf_counter() - begin
    model.zero_grad(set_to_none=True)
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    trained = sum(value.numel() * value.element_size() for value in trainer.trained)
    memory = {
        "weights": sum(value.numel() * value.element_size() for value in model.parameters()),
        "their gradients": trained,
        "the optimiser's moments": 2 * trained,
        "the towers' activations": sum(kept.values()),
    }
    return Estimate(seconds, trainer.steps, memory)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":  # which is asked to do things, and does them later
        torch.cuda.synchronize(device)
