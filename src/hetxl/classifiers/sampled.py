"""Sampled softmax: the batch's labels and some negatives in training, all classes otherwise. Also the loss over a few
active classes that represent all classes, which the retrieved classifier uses too.

The softmax needs Σ_k exp(u_k). Classes that are always active represent themselves; a drawn class represents as many
classes as the inverse of its expected number of draws, so that

    Σ_{k active} exp(u_k + offset_k)        with offset 0, or log(times drawn) − log(expected times)

has the mean Σ_k exp(u_k). For the sigmoid link, exp(offset_k) is the weight of the class's binary cross-entropy.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetxl._checks import integer_at_least, one_of
from hetxl.classifiers.linear import LinearClassifier
from hetxl.functional import IGNORE_INDEX, Affine, Targets, Weights
from hetxl.nn.classifier import NoisyFeatures

NEGATIVES = ("uniform", "log-uniform", "unigram", "in-batch")


class Active(NamedTuple):
    """The classes that a batch's loss uses."""

    classes: Tensor  # [C] distinct ids, ascending, including all labels of the batch
    offsets: Tensor  # [C] logarithm of the number of classes that each represents; 0 for only itself


class SampledClassifier(LinearClassifier):
    """W φ + b whose training loss uses the labels of the batch and negatives drawn for it (log-Q corrected).

    All labels of a batch are exact terms in the loss of every example; only the other classes are estimated. The
    examples and their samples share the negatives. Predictions, and the loss in evaluation mode, use all classes.

    Args:
        in_features: D
        num_classes: K
        negatives: number of negatives drawn per batch.
        proposal: "uniform", "log-uniform" (for class ids sorted by frequency), "unigram" (by `counts`), or "in-batch":
            only the batch's labels, weighted by their frequency.
        counts: [K], frequency of each class, for "unigram" and "in-batch".
        power: exponent of the counts in "unigram".
        sparse: whether W and b get sparse gradients, for torch.optim.SparseAdam or SGD; a step then costs nothing for
            classes that are not active.

    >>> SampledClassifier(64, 100_000, negatives=1000)(torch.randn(2, 64)).shape
    torch.Size([2, 100000])
    """

    complete = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        negatives: int = 4096,
        proposal: str = "uniform",
        counts: Tensor | None = None,
        power: float = 1.0,
        sparse: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        one_of("proposal", proposal, NEGATIVES)
        self.negatives = integer_at_least("negatives", negatives, 1)
        self.proposal, self.sparse = proposal, sparse
        self.draws_from = build_proposal(proposal, num_classes, counts, power)

    def active(self, targets: Targets, generator: torch.Generator | None = None) -> Active:
        """Return the active classes of a batch."""
        labels = labels_of(targets)
        if self.proposal == "in-batch":
            ids = targets.ids if targets.lists is None else targets.lists.classes
            assert ids is not None
            if not len(labels):
                labels = labels.new_zeros(1)  # any class: without examples the loss does not depend on it
            draws = (ids != IGNORE_INDEX).sum().clamp(min=1)
            # A label is present with this probability, so it is weighted by the inverse. This includes the example's
            # own label, which keeps the odds between classes.
            there = -torch.expm1(draws * torch.log1p(-self.draws_from.log_q(labels).exp().clamp(max=1 - 1e-7)))
            return Active(labels, -there.log())
        drawn = self.draws_from.draw(self.negatives, generator, self.weight.device)
        return with_drawn(labels, drawn, self.draws_from.log_q(drawn), self.negatives)

    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return the loss over the active classes in training mode, and over all classes otherwise."""
        if not self.training:
            return super().nll(noisy, targets, reduction, weights)
        check_few(noisy, targets, weights)
        if self.proposal == "in-batch" and noisy.link == "sigmoid":
            raise ValueError('proposal="in-batch" is for link="softmax"; for link="sigmoid" use "uniform" or "unigram"')
        return active_nll(self, noisy, targets, self.active(targets, noisy.generator), reduction, weights)

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        return f"{super().extra_repr()}, negatives={self.negatives}, proposal={self.proposal!r}"


def labels_of(targets: Targets) -> Tensor:
    """Return the classes that occur in a batch's targets, ascending."""
    if targets.dense is not None:
        return (targets.dense.reshape(-1, targets.dense.shape[-1]) != 0).any(0).nonzero().squeeze(-1)
    ids = targets.ids if targets.lists is None else targets.lists.classes
    assert ids is not None
    classes = ids.unique()
    return classes[classes != IGNORE_INDEX]


def with_drawn(labels: Tensor, drawn: Tensor, log_q: Tensor, draws: int) -> Active:
    """Combine the labels [L], ascending, with drawn classes: ids [n], each with its log q.

    A drawn class that is a label is not counted twice: only the other draws represent the classes that are not labels.
    `draws` is the number of draws; n may be smaller if some were discarded.
    """
    classes, inverse, times = drawn.unique(return_inverse=True, return_counts=True)
    log_q = torch.empty(len(classes), dtype=log_q.dtype, device=log_q.device).scatter_(0, inverse, log_q)
    others = ~torch.isin(classes, labels, assume_unique=True)
    offsets = times[others].to(log_q.dtype).log() - log_q[others] - math.log(max(draws, 1))
    together = torch.cat((labels, classes[others]))
    order = together.argsort()
    return Active(together[order], torch.cat((offsets.new_zeros(len(labels)), offsets))[order])


def active_nll(
    classifier: LinearClassifier,
    noisy: NoisyFeatures,
    targets: Targets,
    active: Active,
    reduction: str,
    weights: Weights,
) -> Tensor:
    """Return the negative log-likelihood of the targets among the active classes: a scalar, or [...]."""
    rows, bias = classifier.rows(active.classes)
    offsets = active.offsets.to(rows.dtype)
    class_weights = None if weights.classes is None else weights.classes[active.classes]
    if noisy.link == "softmax":
        # The logits are divided by τ later, which must not change the offsets.
        shift = noisy.temperature * offsets
        bias = shift if bias is None else bias + shift
    else:
        counts = offsets.exp()
        class_weights = counts if class_weights is None else class_weights * counts
    logits, active_weights = noisy.through(Affine(rows, bias)), Weights(weights.example, class_weights)
    return noisy.nll(logits, among(targets, active.classes), reduction, active_weights)


def among(targets: Targets, classes: Tensor) -> Targets:
    """Replace the classes of targets by their index in the active classes [C], ascending."""
    if targets.lists is not None:
        return Targets(lists=replace(targets.lists, classes=torch.searchsorted(classes, targets.lists.classes)))
    if targets.dense is not None:
        return Targets(dense=targets.dense[..., classes])
    assert targets.ids is not None
    ignored = targets.ids == IGNORE_INDEX
    places = torch.searchsorted(classes, targets.ids.masked_fill(ignored, 0))
    return Targets(ids=places.masked_fill(ignored, IGNORE_INDEX))


def check_few(noisy: NoisyFeatures, targets: Targets, weights: Weights) -> None:
    """Raise for targets and options that need all classes in one process."""
    if noisy.link == "softmax" and targets.ids is None:
        raise ValueError(
            "targets must be class ids: rows of probabilities over all classes need a classifier that computes all of "
            "them in one process, such as LinearClassifier"
        )
    if weights.smoothing:
        raise ValueError(
            f"label_smoothing={weights.smoothing} needs all classes in one process, and this classifier does not "
            "compute them; leave it out, or use LinearClassifier"
        )


def _uniform(draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw [draws] float64 numbers in [0, 1), on the generator's device as in `Uniform.draw`."""
    source = device if generator is None else generator.device
    return torch.rand(draws, generator=generator, device=source, dtype=torch.float64).to(device)


class Uniform(nn.Module):
    """The uniform distribution over K classes, sampled in O(draws), and the base of the other proposals."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw [draws] class ids, with repetition.

        A generator draws on its own device, so a CPU generator gives the same classes for heads on all devices.
        """
        source = device if generator is None else generator.device
        return torch.randint(self.num_classes, (draws,), generator=generator, device=source).to(device)

    def log_q(self, classes: Tensor) -> Tensor:
        """Return the log-probability of each class in one draw, like `classes`: −log K."""
        return torch.full(classes.shape, -math.log(self.num_classes), device=classes.device)


class LogUniform(Uniform):
    """q(k) = log((k + 2) / (k + 1)) / log(K + 1), for class ids sorted by frequency, as word ids often are."""

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw [draws] class ids, with repetition."""
        classes = (_uniform(draws, generator, device) * math.log(self.num_classes + 1)).exp().long() - 1
        return classes.clamp_(0, self.num_classes - 1)

    def log_q(self, classes: Tensor) -> Tensor:
        """Return the log-probability of each class in one draw."""
        places = classes.double() + 1
        return (torch.log1p(1 / places) / math.log(self.num_classes + 1)).log().float()


class Unigram(Uniform):
    """q(k) ∝ countᵖ for counts [K], at least 1 each; p below 1 draws rare classes more often than they occur."""

    def __init__(self, counts: Tensor, power: float = 1.0):
        super().__init__(len(counts))
        mass = counts.double().clamp(min=1).pow(power)
        # Not a buffer: K float64 computed from the user's counts would enlarge the state dict, a cast of the module to
        # half precision would merge most sums, and a module created on the meta device needs the values.
        self._cumulative = (mass / mass.sum()).cumsum(0)

    def cumulative(self, device: torch.device) -> Tensor:
        """Return the cumulative probabilities, [K] float64, cached on the device of the last call."""
        if self._cumulative.device != device:
            self._cumulative = self._cumulative.to(device)
        return self._cumulative

    def draw(self, draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw [draws] class ids, with repetition."""
        uniform, cumulative = _uniform(draws, generator, device), self.cumulative(device)
        return torch.searchsorted(cumulative, uniform * cumulative[-1]).clamp_(max=self.num_classes - 1)

    def log_q(self, classes: Tensor) -> Tensor:
        """Return the log-probability of each class in one draw, from steps of the cumulative sum."""
        cumulative = self.cumulative(classes.device)
        before = torch.where(classes > 0, cumulative[(classes - 1).clamp(min=0)], 0.0)
        return (cumulative[classes] - before).log().float()


def build_proposal(name: str, num_classes: int, counts: Tensor | None, power: float) -> Uniform:
    """Return a proposal by name; "in-batch" uses that of "unigram", with the batch as the draw."""
    if name in ("unigram", "in-batch"):
        if counts is None:
            raise ValueError(f"negatives from {name!r} need counts, the frequency of each class in the training data")
        if counts.shape != (num_classes,):
            raise ValueError(f"counts must have shape {[num_classes]}, found {list(counts.shape)}")
        if counts.min() < 0:
            raise ValueError(f"counts must not be negative, found {counts.min().item():g}")
        return Unigram(counts, 1.0 if name == "in-batch" else power)
    return Uniform(num_classes) if name == "uniform" else LogUniform(num_classes)
