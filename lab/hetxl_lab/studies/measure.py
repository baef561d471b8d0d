"""Time and memory of one step of a head, by our evaluation or by the paper's: training (loss and all gradients) or
prediction (probabilities and entropies), alone or behind a backbone, on any device."""

import ctypes
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hetxl._files import read_json, write_json
from hetxl.functional import iid, plan, reference
from hetxl.functional.targets import Targets
from hetxl.nn import Head, build_head
from hetxl.profiling.backbones import Backbone, build_backbone
from hetxl.registry import head_entry
from hetxl_train.process_pool import Worker

Way = Literal["engine", "paper"]
WAYS: dict[Way, str] = {"engine": "hetxl", "paper": "the paper's evaluation"}
"""Through the fused engine, or all S samples of all K logits at once, samples first, under autograd."""

Mode = Literal["train", "eval"]
MODES: dict[Mode, str] = {"train": "training", "eval": "prediction"}

COPIES = {"het": 5, "het-h": 4, "het-xl": 4}
"""Times over that the paper's way holds its sampled logits [B, S, K] at its peak, as measured where they are most of
the memory. HET draws its noise in logit space, too."""

FLOAT = 4


@dataclass(frozen=True)
class Step:
    """A step to measure."""

    head: str
    way: Way
    batch: int  # B
    samples: int  # S
    mode: Mode = "train"
    whole: bool = False  # with the backbone


@dataclass(frozen=True)
class HeadSize:
    """The sizes shared by all steps of a setting."""

    features: int  # D
    classes: int  # K
    rank: int  # R
    backbone: str | None = None  # see `hetxl.profiling.build_backbone`

    def build(self, name: str, device: str = "cpu") -> Head:
        """Create a head of this size, with τ = 1 and parameters of a fixed seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_head(name, self.features, self.classes, rank=self.rank, temperature=1.0, device=device)

    def build_backbone(self, device: str = "cpu") -> Backbone:
        """Create the backbone, with weights of a fixed seed."""
        if self.backbone is None:
            raise ValueError("this setting has no backbone")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_backbone(self.backbone, device)


def step_of(head: Head, step: Step, backbone: Backbone | None = None) -> Callable[[], None]:
    """Return a function that runs one step on the head's device, on random features or, with a backbone, images."""
    device = next(head.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.randint(head.num_classes, (step.batch,), generator=generator, device=device)
    modules = [head] if backbone is None else [head, backbone.module]
    if backbone is None:
        inputs = torch.randn(step.batch, head.in_features, generator=generator, device=device)
        inputs.requires_grad_(step.mode == "train")
    else:
        shape = (step.batch, 3, backbone.image_size, backbone.image_size)
        inputs = torch.randn(shape, generator=generator, device=device)
    network: Callable[[Tensor], Tensor] = torch.nn.Identity() if backbone is None else backbone
    run = _train if step.mode == "train" else _predict

    def once() -> None:
        for module in modules:
            module.train(step.mode == "train").zero_grad(set_to_none=True)
        inputs.grad = None
        run(head, step, lambda: network(inputs), labels, generator)
        synchronize(device)

    return once


Features = Callable[[], Tensor]


def _train(head: Head, step: Step, features: Features, labels: Tensor, generator: torch.Generator) -> None:
    _loss(head, step, features(), labels, generator).backward()


@torch.no_grad()
def _predict(head: Head, step: Step, features: Features, labels: Tensor, generator: torch.Generator) -> None:
    if step.way == "engine" or head.covariance is None:
        head.predict(features(), num_samples=step.samples, generator=generator)
        return
    distribution, z, options = _sampled(head, step, features(), generator)
    reference.mc_predict(distribution, z, order="samples", **options)


def _loss(head: Head, step: Step, features: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    if step.way == "engine" or head.covariance is None:
        return head.loss(features, labels, num_samples=step.samples, generator=generator)
    distribution, z, options = _sampled(head, step, features, generator)
    return reference.mc_nll(distribution, z, Targets(ids=labels), order="samples", **options)


def _sampled(head: Head, step: Step, features: Tensor, generator: torch.Generator) -> tuple[Any, Tensor, Any]:
    """Return the distribution of the logits, independent normals, and τ and link as options."""
    distribution = head.logit_distribution(features)
    z = iid(step.batch, step.samples, distribution.size, generator=generator, device=features.device)
    return distribution, z, {"temperature": head.temperature(), "link": head.link}


def synchronize(device: torch.device) -> None:
    """Wait for a device to finish, since an accelerator computes asynchronously."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def warm_up(name: str, device: str = "cpu") -> None:
    """Run small steps of a head, so that the one-off initialisation of libraries is not part of the measured step."""
    head = HeadSize(8, 10, 2).build(name, device)
    for way, mode in itertools.product(WAYS, MODES):
        step_of(head, Step(name, way, 2, 2, mode))()


def seconds_of(run: Callable[[], object], repeats: int, limit: float, device: str = "cpu") -> float:
    """Return the median time of a step, after a warm-up; a step longer than the limit (seconds) runs only once.

    On the CPU it is the processor time of this process, so other processes do not count.
    """
    clock = time.process_time if torch.device(device).type == "cpu" else time.perf_counter
    times = []
    for _ in range(repeats + 1):
        begin = clock()
        run()
        times.append(clock() - begin)
        if times[-1] > limit:
            return times[-1]
    return statistics.median(times[1:])


def backbone_seconds(backbone: Backbone, batch: int, mode: Mode, device: str, repeats: int, limit: float) -> float:
    """Return the median time of a backbone's part of a step: features, and in training all gradients."""
    head = build_head("det", backbone.features, 1, device=device)  # one class costs nothing next to a backbone
    return seconds_of(step_of(head, Step("det", "engine", batch, 1, mode), backbone), repeats, limit, device)


def predicted_bytes(head: Head, step: Step, budget: int | None = None) -> int:
    """Predict the memory of a step of a head beyond its parameters: gradients, and working memory of the evaluation.

    The head may be on the meta device; the budget is that of the engine's blocks, None for the default.
    """
    logits = FLOAT * step.batch * head.num_classes
    if step.mode == "eval":
        if head.covariance is None:
            return 2 * logits
        # Without gradients, the samples, their softmax and their entropies are in memory at once.
        return 3 * step.samples * logits if step.way == "paper" else 2 * logits + _blocks(head, step, budget)
    gradients = FLOAT * sum(parameter.numel() for parameter in head.parameters())
    if head.covariance is None:
        return gradients + logits
    if step.way == "paper":
        # HET-XL's W has a gradient from the mean and one from the noise until they are added.
        twice = 2 * FLOAT * head.num_classes * head.in_features if head_entry(step.head).lift == "product" else 0
        return gradients + max(twice, COPIES[step.head] * step.samples * logits)
    return gradients + _blocks(head, step, budget)


def _blocks(head: Head, step: Step, budget: int | None) -> int:
    assert head.covariance is not None
    sizes = (step.batch, head.in_features, head.num_classes, head.covariance.noise_features, head.covariance.size)
    return plan(*sizes, step.samples, lift=head_entry(step.head).lift, memory_budget=budget).bytes


def peaks_of(size: HeadSize, steps: Iterable[Step], device: str = "cpu") -> Iterator[tuple[Step, int]]:
    """Yield the peak memory of each step beyond that before it, in a new process. On the CPU, Linux only.

    The steps of one head must be consecutive, smallest first.
    """
    if torch.device(device).type == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise OSError("peaks of memory are read from /proc/self/clear_refs, which this system does not have: use Linux")
    with Worker(functools.partial(_peak, size, device)) as worker:
        for step in steps:
            worker.submit(step)
            yield step, worker.result()


def _peak(size: HeadSize, device: str, step: Step) -> int:
    """Return the peak memory of a step in this process."""
    head, backbone = _modules(size, device, step.head, step.whole)
    run, meter = step_of(head, step, backbone), meter_of(torch.device(device))
    for module in (head, *([] if backbone is None else [backbone.module])):
        module.zero_grad(set_to_none=True)
    before = meter.reset()
    run()
    return max(0, meter.peak() - before)


@functools.lru_cache(maxsize=1)
def _modules(size: HeadSize, device: str, name: str, whole: bool) -> tuple[Head, Backbone | None]:
    """Return a head and, for whole steps, the backbone, after one step that initialises the libraries."""
    warm_up(name, device)
    head = size.build(name, device)
    backbone = size.build_backbone(device) if whole else None
    if backbone is not None:
        step_of(head, Step(name, "engine", 2, 1), backbone)()
    return head, backbone


class Cells:
    """Measured values by name, stored in a file, so that a stopped study resumes."""

    def __init__(self, path: Path):
        self.path = path
        stored = read_json(path, dict) if path.exists() else {"seconds": 0.0, "values": {}}
        self.values, self._before, self._begin = stored["values"], stored["seconds"], time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the time spent so far, over all attempts."""
        return self._before + time.perf_counter() - self._begin

    def put(self, name: str, value: float | None) -> None:
        """Store a value."""
        self.values[name] = value
        write_json(self.path, {"seconds": self.seconds, "values": self.values})

    def of(self, name: str, measure: Callable[[], float | None]) -> float | None:
        """Return a value, measured now unless an earlier attempt has stored it."""
        if name not in self.values:
            self.put(name, measure())
        return self.values[name]


class ProcessMeter:
    """The peak memory of this process, as reported by Linux."""

    def reset(self) -> int:
        """Release freed memory, reset the high-water mark to the remaining memory, and return that in bytes."""
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak(self) -> int:
        """Return the high-water mark in bytes."""
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        """Return a field of /proc/self/status in bytes."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
        raise OSError(f"/proc/self/status has no {name}")


class DeviceMeter:
    """The peak memory of an accelerator, as reported by torch's allocator."""

    def __init__(self, device: torch.device, module: Any = None):
        self.device, self.module = device, module or torch.get_device_module(device)

    def reset(self) -> int:
        """Release freed memory, reset the high-water mark to the remaining memory, and return that in bytes."""
        self.module.synchronize(self.device)
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(self.device)
        return self.module.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the high-water mark in bytes."""
        self.module.synchronize(self.device)
        return self.module.max_memory_allocated(self.device)


def meter_of(device: torch.device) -> ProcessMeter | DeviceMeter:
    """Return the meter for the memory of a device."""
    return ProcessMeter() if device.type == "cpu" else DeviceMeter(device)
