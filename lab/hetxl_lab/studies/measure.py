"""Time and memory of one training step of a head: loss and all gradients, by our evaluation or by the paper's."""

import ctypes
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hetxl.functional import iid, plan, reference
from hetxl.functional.targets import Targets
from hetxl.nn import Head, build_head
from hetxl_train.process_pool import Worker

Way = Literal["engine", "paper"]
WAYS: dict[Way, str] = {"engine": "hetxl", "paper": "the paper's evaluation"}
"""Through the fused engine, or all S samples of all K logits at once, samples first, under autograd."""

COPIES = {"het": 5, "het-h": 4, "het-xl": 4}
"""Times over that the paper's way holds its sampled logits [B, S, K] at its peak, as measured where they are most of
the memory. HET draws its noise in logit space, too."""

FLOAT = 4


@dataclass(frozen=True)
class Step:
    """One step."""

    head: str
    way: Way
    batch: int  # B
    samples: int  # S


@dataclass(frozen=True)
class HeadSize:
    """The sizes that all steps of a study have."""

    features: int  # D
    classes: int  # K
    rank: int  # R

    def build(self, name: str, device: str = "cpu") -> Head:
        """A head of this size, with τ = 1 and parameters of a fixed seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_head(name, self.features, self.classes, rank=self.rank, temperature=1.0, device=device)


def step_of(head: Head, step: Step) -> Callable[[], None]:
    """A function that computes loss and gradients of one batch."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(step.batch, head.in_features, generator=generator).requires_grad_()
    labels = torch.randint(head.num_classes, (step.batch,), generator=generator)

    def run() -> None:
        head.zero_grad(set_to_none=True)
        features.grad = None
        _loss(head, step, features, labels, generator).backward()

    return run


def _loss(head: Head, step: Step, features: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    if step.way == "engine" or head.covariance is None:
        return head.loss(features, labels, num_samples=step.samples, generator=generator)
    distribution = head.logit_distribution(features)
    z = iid(step.batch, step.samples, distribution.size, generator=generator)
    options = {"temperature": head.temperature(), "link": head.link}
    return reference.mc_nll(distribution, z, Targets(ids=labels), order="samples", **options)


def warm_up(name: str) -> None:
    """Small steps of a head, which start the libraries up: what they load and plan once is not the step's."""
    head = HeadSize(8, 10, 2).build(name)
    for way in WAYS:
        step_of(head, Step(name, way, 2, 2))()


def seconds_of(run: Callable[[], object], repeats: int, limit: float) -> float:
    """The median time of a step; one that takes longer than the limit (seconds) is run once, others warm up first."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
        if times[-1] > limit:
            return times[-1]
    return statistics.median(times[1:])


def predicted_bytes(head: Head, step: Step, budget: int | None = None) -> int:
    """The memory that a step should take beyond its parameters: gradients, and the working memory of its way.

    The head may be on the meta device; the budget is that of the engine's blocks, None for its own default.
    """
    gradients = FLOAT * sum(parameter.numel() for parameter in head.parameters())
    if head.covariance is None:
        return gradients + FLOAT * step.batch * head.num_classes
    if step.way == "paper":
        # HET-XL's W has a gradient from the mean and one from the noise, before they are added.
        twice = 2 * FLOAT * head.num_classes * head.in_features if step.head == "het-xl" else 0
        return gradients + max(twice, COPIES[step.head] * FLOAT * step.batch * step.samples * head.num_classes)
    blocks = plan(
        step.batch,
        head.in_features,
        head.num_classes,
        head.covariance.noise_features,
        head.covariance.size,
        step.samples,
        lift="product" if step.head == "het-xl" else "copy",
        memory_budget=budget,
    )
    return gradients + blocks.bytes


def peaks_of(size: HeadSize, steps: Sequence[Step], advance: Callable[[int], None] | None = None) -> list[int]:
    """The peak memory of steps, beyond what is there before each; in a new process. Linux only.

    The steps of a head come one after the other, the smallest first; `advance` is called with how many are done.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise OSError("peaks of memory are read from /proc/self/clear_refs, which this system does not have: use Linux")
    peaks: list[int] = []
    with Worker(functools.partial(_peaks, size)) as worker:
        for _, group in itertools.groupby(steps, lambda step: step.head):
            worker.submit(tuple(group))
            peaks += worker.result()
            if advance is not None:
                advance(len(peaks))
    return peaks


def _peaks(size: HeadSize, steps: Sequence[Step]) -> list[int]:
    """Those of one head's steps, in this process."""
    name, peaks = steps[0].head, []
    warm_up(name)
    head = size.build(name)
    for step in steps:
        run = step_of(head, step)
        head.zero_grad(set_to_none=True)
        before = _reset_peak()
        run()
        peaks.append(max(0, _status("VmHWM") - before))
    return peaks


def _reset_peak() -> int:
    """Give freed memory back, set the high-water mark to what is left, and return that in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")
