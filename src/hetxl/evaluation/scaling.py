"""Temperature scaling, and scaling of the noise: the one or two numbers that recalibrate a trained classifier."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hetxl.evaluation.entries import LabelEntries, label_entries
from hetxl.evaluation.evaluate import MAX_BYTES, evaluating
from hetxl.evaluation.minimum import minimum_between
from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.nn import Classifier, FixedTemperature, Head

LOW, HIGH = 0.05, 20.0
"""Where τ is looked for."""

_TOLERANCE = 1e-5
_MAX_PASSES = 60
_SEARCH_TOLERANCE = 0.005
"""Every loss is a pass of its own, with noise over all samples, and it is flat at its minimum."""
_STEP, _SMALL_STEP = 1.5, 1.15
"""By which the first search leaves τ = 1, and others what is best for the scale of noise beside theirs."""
NOISE_SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Among which the scale of the noise is looked for."""

Features = Callable[[], Iterable[Tensor]] | Sequence[Tensor]
"""Batches [b, D], or a function that gives them anew for each pass."""


class Scales(NamedTuple):
    """What a trained head is rescaled by.

    Attributes:
        temperature: τ
        noise: factor of the noise, `head.noise_scale`.
    """

    temperature: float
    noise: float


@torch.no_grad()
def fit_temperature(
    head: Head,
    features: Features,
    targets: Tensor | LabelLists,
    *,
    seed: int = 0,
) -> float:
    """The τ in [0.05, 20] that gives a trained head the lowest negative log-likelihood.

        min(torch.linspace(0.05, 20, 10**6), key=lambda tau: F.cross_entropy(logits / tau, targets))

    Without noise the loss is convex in 1/τ for both links, so its slope has one root; a Newton iteration within a
    shrinking bracket finds it in about six passes over the features. With noise τ is found by a search among losses
    that all have the same draws, and so it is for an `AdaptiveClassifier`, which has no logits that τ only divides. The
    head is not changed: set `head.temperature = FixedTemperature(tau)` to use the result.

    Args:
        head: its own temperature plays no part.
        features: of the validation split: batches [b, D], or a function that gives them anew for each pass.
        targets: of all n examples in the same order: class ids [n], −100 for those to leave out; for the sigmoid link
            also lists of labels.
        seed: of the draws of a head with noise.

    Returns:
        τ, to a relative 1e-4, by a search 5e-3; an end of the range when the loss still falls there.
    """
    entries = _checked(head, targets)
    if not _is_affine(head):
        return _rescaled(head, features, targets, seed, (head.noise_scale,)).temperature
    low, high = 1 / HIGH, 1 / LOW
    inverse, moved = 1.0, math.inf
    for _ in range(_MAX_PASSES):
        first, second = _slopes(head, features() if callable(features) else features, entries, inverse)
        if not math.isfinite(first):
            raise ValueError(f"features or the head's weights are not finite: the slope of the loss is {first}")
        if first == 0:
            break
        low, high = (low, inverse) if first > 0 else (inverse, high)
        step = inverse - first / second if second > 0 else math.inf
        # Newton while it stays within the bracket and its steps shrink; else the bracket's middle, on a logarithmic
        # scale. Where classes are separable the steps would not shrink.
        if not low < step < high or abs(step - inverse) > moved / 2:
            step = math.sqrt(low * high)
        moved, inverse = abs(step - inverse), step
        if moved <= _TOLERANCE * inverse:
            break
    return 1 / inverse


@torch.no_grad()
def fit_scales(head: Head, features: Features, targets: Tensor | LabelLists, *, seed: int = 0) -> Scales:
    """τ and the scale of the noise that give a trained head the lowest negative log-likelihood.

        min(itertools.product(torch.linspace(0.05, 20, 10**6), NOISE_SCALES), key=lambda pair: loss(*pair))

    Noise may be too large for the labels that are to be predicted, where it has learned from wrong ones and they are
    right; or too small, where it was learned with few samples. Labels of a validation split tell. Scales are tried from
    1 on, downhill, each with a τ of its own. The head is not changed: set `head.noise_scale` and
    `head.temperature = FixedTemperature(tau)` to use the result.

    Args:
        head: its own temperature and noise scale play no part.
        features: of the validation split: batches [b, D], or a function that gives them anew for each pass.
        targets: of all n examples in the same order, as of `fit_temperature`.
        seed: of the draws.

    Returns:
        τ to a relative 5e-3, and one of `NOISE_SCALES`; for a head without noise that of `fit_temperature`, and 1.
    """
    if head.covariance is None:
        return Scales(fit_temperature(head, features, targets, seed=seed), 1.0)
    _checked(head, targets)
    return _rescaled(head, features, targets, seed, NOISE_SCALES)


def _checked(head: Head, targets: Tensor | LabelLists) -> LabelEntries:
    """The labels one by one; raises where there is none."""
    total = targets.batch if isinstance(targets, LabelLists) else len(targets)
    entries = label_entries(targets, total, head.num_classes, head.link)
    if bool((entries.ids == IGNORE_INDEX).all()):
        raise ValueError(f"targets must hold at least one example with a label, found none among {total}")
    return entries


def _is_affine(head: Head) -> bool:
    """Whether the logits are there without draws, for τ to divide."""
    classifier = getattr(head, "classifier", None)
    noisy = head.covariance is not None and head.noise_scale > 0
    return not noisy and not (isinstance(classifier, Classifier) and not classifier.linear)


def _rescaled(
    head: Head, features: Features, targets: Tensor | LabelLists, seed: int, scales: Sequence[float]
) -> Scales:
    """By losses that all have the same draws: downhill among the scales, from 1 on, each with the best τ for it."""
    kept = head.temperature, head.noise_scale

    def lowest(scale: float, start: float, step: float) -> tuple[float, float]:
        head.noise_scale = scale

        @functools.cache
        def loss(log_temperature: float) -> float:
            head.temperature = FixedTemperature(math.exp(log_temperature))
            return _mean_loss(head, features() if callable(features) else features, targets, seed)

        at = _downhill(loss, start, math.log(step))
        return loss(at), at

    try:
        with evaluating(head):
            place = first = scales.index(1.0) if 1.0 in scales else 0
            found = {place: lowest(scales[place], 0.0, _STEP)}
            for side in (-1, 1):
                while 0 <= place + side < len(scales):
                    found[place + side] = lowest(scales[place + side], found[place][1], _SMALL_STEP)
                    if found[place + side][0] >= found[place][0]:
                        break
                    place += side
                if place != first:  # downhill on one side is uphill on the other
                    break
        return Scales(math.exp(found[place][1]), scales[place])
    finally:
        head.temperature, head.noise_scale = kept


def _downhill(loss: Callable[[float], float], start: float, step: float) -> float:
    """log τ of the lowest loss: a bracket around the lowest of three, then the minimum within it."""
    low, high = math.log(LOW), math.log(HIGH)
    middle = start
    while True:  # until both neighbours are higher, or an end is met
        left, right = max(middle - step, low), min(middle + step, high)
        best = min((middle, left, right), key=loss)  # of losses that are the same, the middle's
        if best in (middle, low, high):
            return minimum_between(loss, max(best - step, low), min(best + step, high), _SEARCH_TOLERANCE)
        middle = best


def _mean_loss(head: Head, batches: Iterable[Tensor], targets: Tensor | LabelLists, seed: int) -> float:
    """The loss of all examples, with the draws of a seed."""
    everything = torch.cat(list(batches))
    if len(everything) != (targets.batch if isinstance(targets, LabelLists) else len(targets)):
        raise ValueError(f"features holds {len(everything)} examples and targets another number of them")
    generator = torch.Generator(everything.device).manual_seed(seed)
    found = float(head.loss(everything, targets, generator=generator))
    if not math.isfinite(found):
        raise ValueError(f"features or the head's weights are not finite: the loss is {found}")
    return found


def _slopes(head: Head, batches: Iterable[Tensor], entries: LabelEntries, inverse: float) -> tuple[float, float]:
    """First and second derivative of the summed loss with respect to 1/τ."""
    size = max(1, MAX_BYTES // (4 * head.num_classes))
    total, seen = len(entries.ids), 0
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        for part in batch.split(size):
            if seen + len(part) > total:
                raise ValueError(f"features holds more examples than targets, which has {total}")
            labels = entries.of(seen, seen + len(part))
            seen += len(part)
            logits = head.logit_distribution(part).mean
            slopes = _softmax_slopes if head.link == "softmax" else _sigmoid_slopes
            sums += torch.stack(slopes(logits, labels, inverse)).cpu().double()
    if seen != total:
        raise ValueError(f"features holds {seen} examples and targets {total}; give the batches anew for each pass")
    return float(sums[0]), float(sums[1])


def _softmax_slopes(logits: Tensor, labels: LabelEntries, inverse: float) -> tuple[Tensor, Tensor]:
    """Of Σ logsumexp(u/τ) − u_y/τ: the mean of u − u_y under softmax(u/τ), and its variance."""
    labels = labels.to(logits.device)
    logits = logits[labels.examples]
    # Measured from the label's logit, so that nothing large cancels.
    logits = logits - logits.gather(-1, labels.classes.unsqueeze(-1))
    probs = torch.softmax(logits * inverse, dim=-1)
    mean = (probs * logits).sum(-1, keepdim=True)
    variance = (probs * (logits - mean).square_()).sum(-1)
    return mean.sum(), variance.sum()


def _sigmoid_slopes(logits: Tensor, labels: LabelEntries, inverse: float) -> tuple[Tensor, Tensor]:
    """Of Σ softplus(u/τ) − y u/τ: Σ u (p − y) and Σ u² p (1 − p), over all classes."""
    if (labels.ids == IGNORE_INDEX).any():
        logits = logits.clone()
        # A logit of 0 adds nothing to either sum.
        logits[(labels.ids == IGNORE_INDEX).to(logits.device)] = 0
    probs = torch.sigmoid(logits * inverse)
    on = labels.to(logits.device)
    own = logits[on.examples, on.classes] * labels.values.to(logits)
    first = (logits * probs).sum() - own.sum()
    return first, (logits.square() * probs * (1 - probs)).sum()
