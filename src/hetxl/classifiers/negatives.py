"""Where the negatives of a sampled softmax come from: draws of classes with their probabilities."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

NEGATIVES = ("uniform", "log-uniform", "unigram", "in-batch")


class Proposal(nn.Module, ABC):
    """A distribution over K classes that can be drawn from in O(draws).

    Args:
        num_classes: K
    """

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes

    @abstractmethod
    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """[draws] class ids, with repetition."""

    @abstractmethod
    def log_q(self, classes: Tensor) -> Tensor:
        """Log-probability of each class in one draw, like `classes`."""


class Uniform(Proposal):
    """Every class alike."""

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """[draws] class ids, with repetition."""
        return torch.randint(self.num_classes, (draws,), generator=generator, device=device)

    def log_q(self, classes: Tensor) -> Tensor:
        """−log K."""
        return torch.full(classes.shape, -math.log(self.num_classes), device=classes.device)


class LogUniform(Proposal):
    """q(k) = log((k + 2) / (k + 1)) / log(K + 1), for classes in the order of their frequency, as words often are."""

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """[draws] class ids, with repetition."""
        uniform = torch.rand(draws, generator=generator, device=device, dtype=torch.float64)
        found = (uniform * math.log(self.num_classes + 1)).exp().long() - 1
        return found.clamp_(0, self.num_classes - 1)

    def log_q(self, classes: Tensor) -> Tensor:
        """As above."""
        places = classes.double() + 1
        return (torch.log1p(1 / places) / math.log(self.num_classes + 1)).log().float()


class Unigram(Proposal):
    """q(k) ∝ countᵖ.

    Args:
        counts: [K], how often each class occurs; those that never do count as once.
        power: p; below 1 rare classes are drawn more often than they occur.
    """

    cumulative_bits: Tensor

    def __init__(self, counts: Tensor, power: float = 1.0):
        super().__init__(len(counts))
        mass = counts.double().clamp(min=1).pow(power)
        # Not part of the state: it is made of counts that the user has, and K float64 are large. As integers it is left
        # alone by casts of the module: in half precision most sums would equal their neighbours.
        self.register_buffer("cumulative_bits", (mass / mass.sum()).cumsum(0).view(torch.int64), persistent=False)

    @property
    def cumulative(self) -> Tensor:
        """[K] float64, the probabilities summed up to each class."""
        return self.cumulative_bits.view(torch.float64)

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """[draws] class ids, with repetition."""
        uniform = torch.rand(draws, generator=generator, device=device, dtype=torch.float64)
        found = torch.searchsorted(self.cumulative, uniform * self.cumulative[-1])
        return found.clamp_(max=self.num_classes - 1)

    def log_q(self, classes: Tensor) -> Tensor:
        """From the steps of the cumulative sum."""
        before = torch.where(classes > 0, self.cumulative[(classes - 1).clamp(min=0)], 0.0)
        return (self.cumulative[classes] - before).log().float()


def build_proposal(name: str, num_classes: int, counts: Tensor | None, power: float) -> Proposal:
    """The proposal of a name; "in-batch" has that of "unigram", of which the batch is the draw."""
    if name in ("unigram", "in-batch"):
        if counts is None:
            raise ValueError(f"negatives from {name!r} need counts, how often each class occurs in the training data")
        if counts.shape != (num_classes,):
            raise ValueError(f"counts must have shape {[num_classes]}, found {list(counts.shape)}")
        if counts.min() < 0:
            raise ValueError(f"counts must not be negative, found {counts.min().item():g}")
        return Unigram(counts, 1.0 if name == "in-batch" else power)
    return Uniform(num_classes) if name == "uniform" else LogUniform(num_classes)
