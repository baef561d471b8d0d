"""Where the negatives of a sampled softmax come from: draws of classes with their probabilities."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

NEGATIVES = ("uniform", "log-uniform", "unigram", "in-batch")


def draw_classes(num_classes: int, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """[draws] class ids, all alike, with repetition.

    A generator draws on its own device: one of the CPU gives the same classes whatever device the head is on.
    """
    source = device if generator is None else generator.device
    return torch.randint(num_classes, (draws,), generator=generator, device=source).to(device)


def _uniform(draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """[draws] float64 in [0, 1), on the generator's device first as well."""
    source = device if generator is None else generator.device
    return torch.rand(draws, generator=generator, device=source, dtype=torch.float64).to(device)


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
        return draw_classes(self.num_classes, draws, generator, device)

    def log_q(self, classes: Tensor) -> Tensor:
        """−log K."""
        return torch.full(classes.shape, -math.log(self.num_classes), device=classes.device)


class LogUniform(Proposal):
    """q(k) = log((k + 2) / (k + 1)) / log(K + 1), for classes in the order of their frequency, as words often are."""

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """[draws] class ids, with repetition."""
        uniform = _uniform(draws, generator, device)
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

    def __init__(self, counts: Tensor, power: float = 1.0):
        super().__init__(len(counts))
        mass = counts.double().clamp(min=1).pow(power)
        # No buffer. It is made of counts that the user has and K float64 are large, so it has no place in the state; a
        # cast of the module to half precision would make most sums equal their neighbours; and a module that was made
        # on the meta device has to have it.
        self._cumulative = (mass / mass.sum()).cumsum(0)

    def cumulative(self, device: torch.device) -> Tensor:
        """[K] float64, the probabilities summed up to each class; kept where it was asked for last."""
        if self._cumulative.device != device:
            self._cumulative = self._cumulative.to(device)
        return self._cumulative

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """[draws] class ids, with repetition."""
        uniform, cumulative = _uniform(draws, generator, device), self.cumulative(device)
        found = torch.searchsorted(cumulative, uniform * cumulative[-1])
        return found.clamp_(max=self.num_classes - 1)

    def log_q(self, classes: Tensor) -> Tensor:
        """From the steps of the cumulative sum."""
        cumulative = self.cumulative(classes.device)
        before = torch.where(classes > 0, cumulative[(classes - 1).clamp(min=0)], 0.0)
        return (cumulative[classes] - before).log().float()


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
