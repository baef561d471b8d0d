"""Temperature scaling: the one number that recalibrates a trained classifier."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hetxl.evaluation.entries import LabelEntries, label_entries
from hetxl.evaluation.evaluate import MAX_BYTES
from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.nn import Classifier, FixedTemperature, Head

LOW, HIGH = 0.05, 20.0
"""Where τ is looked for."""

_TOLERANCE = 1e-5
_MAX_PASSES = 60
_SEARCH_TOLERANCE = 0.005
"""Every loss is a pass of its own, with noise over all samples, and it is flat at its minimum."""
_STEP = 1.5
"""By which the first search leaves τ = 1."""


@torch.no_grad()
def fit_temperature(
    head: Head,
    features: Callable[[], Iterable[Tensor]] | Sequence[Tensor],
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
    total = targets.batch if isinstance(targets, LabelLists) else len(targets)
    entries = label_entries(targets, total, head.num_classes, head.link)
    if bool((entries.ids == IGNORE_INDEX).all()):
        raise ValueError(f"targets must hold at least one example with a label, found none among {total}")
    classifier = getattr(head, "classifier", None)
    if head.covariance is not None or (isinstance(classifier, Classifier) and not classifier.linear):
        return _fit_by_search(head, features, targets, seed)
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


def _fit_by_search(
    head: Head, features: Callable[[], Iterable[Tensor]] | Sequence[Tensor], targets: Tensor | LabelLists, seed: int
) -> float:
    """τ by a bracket around the lowest of three losses, then by golden section within it."""
    kept, training = head.temperature, head.training
    known: dict[float, float] = {}

    def loss(log_temperature: float) -> float:
        if log_temperature not in known:
            head.temperature = FixedTemperature(math.exp(log_temperature))
            known[log_temperature] = _mean_loss(head, features() if callable(features) else features, targets, seed)
        return known[log_temperature]

    head.eval()
    try:
        low, high = math.log(LOW), math.log(HIGH)
        middle, step = 0.0, math.log(_STEP)
        while True:  # go downhill until both neighbours are higher, or an end is met
            left, right = max(middle - step, low), min(middle + step, high)
            best = min((left, middle, right), key=loss)
            if best in (middle, low, high):
                break
            middle = best
        return math.exp(golden_section(loss, max(best - step, low), min(best + step, high), _SEARCH_TOLERANCE))
    finally:
        head.temperature = kept
        head.train(training)


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


def golden_section(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Where a function with one minimum between two places has it, to within a width."""
    share = (math.sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - share * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + share * (high - low)
            at_right = function(right)
    return (low + high) / 2


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
