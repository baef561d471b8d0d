"""Metrics of records: likelihood, calibration, selective prediction, accuracy by class frequency.

Examples of equal confidence are replaced by the mean of their group. This is the expectation over random orders, and
does not depend on the order of the examples.
"""

from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from hetxl._checks import integer_at_least, one_of
from hetxl.metrics.records import TOP, Records


class Ordered(NamedTuple):
    """Examples from the most to the least confident, in g groups of equal confidence."""

    confidence: np.ndarray  # [n], descending
    hit: np.ndarray  # [n], the share of hits among all examples of the same confidence
    ends: np.ndarray  # [g] int64, cumulative number of examples at the end of each group
    hits: np.ndarray  # [g] int64, number of hits in each group


def by_confidence(records: Records) -> Ordered:
    """Sort examples from the most to the least confident; raise if there are none."""
    confidence = records.non_empty().confidence
    order = np.argsort(-confidence, kind="stable")
    confidence = confidence[order]
    ends = np.append(np.flatnonzero(np.diff(confidence)) + 1, len(confidence))
    sizes = np.diff(ends, prepend=0)
    hits = np.add.reduceat(records.hit[order].astype(np.int64), ends - sizes)
    return Ordered(confidence, np.repeat(hits / sizes, sizes), ends, hits)


def risk_coverage(records: Records, points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Return the risk–coverage curve: the error rate of the most confident predictions against their share.

    Args:
        points: number of points, evenly spaced in coverage; fewer with fewer examples.

    Returns:
        coverage: [p], share of the examples that are kept, ascending to 1.
        risk: [p], error rate among them.
    """
    integer_at_least("points", points, 1)
    risks = _risks(records)
    counts = np.unique(-(-np.arange(1, points + 1) * len(risks) // points))
    return counts / len(risks), risks[counts - 1]


def aurc(records: Records) -> float:
    """Return the area under the risk–coverage curve, the mean risk over the coverages 1/n, 2/n, …, 1. Lower is better;
    0 without errors, 1 with only errors."""
    return float(_risks(records).mean())


def auroc(records: Records) -> float | None:
    """Return the probability that a hit is more confident than an error, counting ties half. None if there are only
    hits or only errors."""
    return score_auroc(records.non_empty().confidence, records.hit)


def score_auroc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the probability that a positive scores higher than a negative, ties counted half; None without either.

    Scores are [n], positive is [n] bool.
    """
    scores, positive = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    if scores.shape != positive.shape or scores.ndim != 1:
        raise ValueError(f"scores and positive must both be [n], found {list(scores.shape)}, {list(positive.shape)}")
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    _, groups, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    ranks = (last - (sizes - 1) / 2)[groups]  # from 1, ties share the mean
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def threshold_for(records: Records, precision: float = 0.95) -> tuple[float | None, float]:
    """Return the lowest confidence threshold that reaches a precision, and the share of predictions above it.

    Args:
        records: at least one example; choose the threshold on the validation split and measure on the test split.
        precision: share of hits among the kept predictions.

    Returns:
        threshold: keep predictions of at least this confidence; None if no threshold reaches the precision.
        coverage: share of the examples that are kept; 0 if no threshold reaches the precision.
    """
    if not 0 < precision <= 1:
        raise ValueError(f"precision must lie in (0, 1], found {precision}")
    ordered = by_confidence(records)
    # A threshold keeps all examples of equal confidence or none of them.
    enough = np.flatnonzero(np.cumsum(ordered.hits) >= precision * ordered.ends)
    if not len(enough):
        return None, 0.0
    end = int(ordered.ends[enough[-1]])
    return float(ordered.confidence[end - 1]), end / len(records)


def _risks(records: Records) -> np.ndarray:
    """Return the error rate of the 1, 2, …, n most confident predictions, [n]."""
    errors = 1 - by_confidence(records).hit
    return np.cumsum(errors) / np.arange(1, len(errors) + 1)


BINS = 15
Binning = Literal["mass", "width"]
BINNINGS: tuple[Binning, ...] = ("mass", "width")


def reliability(records: Records, bins: int = BINS, kind: Binning | str = "mass") -> list[tuple[float, float, int]]:
    """Return the reliability diagram: confidence and accuracy in bins of the confidence.

    Args:
        records: at least one example.
        bins: number of bins; empty bins are omitted.
        kind: "mass" for bins with equal numbers of examples (up to one); "width" for bins of equal width, which include
            their lower edge, and the last bin also its upper edge.

    Returns:
        Mean confidence, accuracy and number of examples of each bin, by ascending confidence.
    """
    integer_at_least("bins", bins, 1)
    one_of("kind", kind, BINNINGS)
    ordered = by_confidence(records)
    confidence, hit = ordered.confidence[::-1], ordered.hit[::-1]
    if kind == "mass":
        starts = np.arange(bins + 1) * len(confidence) // bins
    else:
        starts = np.searchsorted(confidence, np.linspace(0, 1, bins + 1), side="left")
        # Rounding may raise a confidence slightly above 1.
        starts[-1] = len(confidence)
    return [
        (float(confidence[start:stop].mean()), float(hit[start:stop].mean()), int(stop - start))
        for start, stop in pairwise(starts)
        if stop > start
    ]


def calibration_error(records: Records, bins: int = BINS, kind: Binning | str = "mass") -> float:
    """Return the expected calibration error, the mean over examples of |accuracy − confidence| of their bin in
    `reliability`."""
    curve = reliability(records, bins, kind)
    return sum(count * abs(accuracy - confidence) for confidence, accuracy, count in curve) / len(records)


BANDS = ("head", "middle", "tail")


def nll(records: Records) -> float:
    """Return the mean negative log-likelihood in nats, summed over the labels for the sigmoid link."""
    return float(-records.non_empty().log_prob.mean())


def nll_standard_error(records: Records) -> float | None:
    """Return the standard error of `nll`; None with fewer than two examples, or if a label has probability 0."""
    if len(records.non_empty()) < 2 or not np.isfinite(records.log_prob).all():
        return None
    return float(records.log_prob.std(ddof=1) / np.sqrt(len(records)))


def precision_at(records: Records, k: int) -> float:
    """Return the share of examples with a label among their k most probable classes, k from 1 to 5."""
    if integer_at_least("k", k, 1) > TOP:
        raise ValueError(f"k must be at most {TOP}, the classes that records keep, found {k}")
    return float((records.non_empty().rank < k).mean())


def brier(records: Records) -> float:
    """Return the mean Brier score Σ_k (p_k − y_k)²: from 0 to 2 for the softmax link."""
    return float(records.non_empty().squared.mean())


def class_bands(class_counts: np.ndarray) -> np.ndarray:
    """Return the band of each class: 0 head, 1 middle, 2 tail.

    Classes are sorted by their number of training examples, descending (ties by id). The **head** are the first classes
    that together have at least a third of all training examples, the **middle** continues to at least two thirds, and
    the **tail** is the rest, including classes without training examples. A class that crosses a border belongs to the
    band in which it starts. Counts of training examples [K] → bands [K] int8.
    """
    counts = np.asarray(class_counts)
    if counts.ndim != 1 or not len(counts) or (counts < 0).any():
        raise ValueError(f"class_counts must be K counts of at least 0, found shape {list(counts.shape)}")
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    sorted_counts = counts[order].astype(np.int64)
    before = np.cumsum(sorted_counts) - sorted_counts
    bands = np.empty(len(counts), dtype=np.int8)
    # Compare three times the preceding count with the total: integers, so that borders are exact.
    bands[order] = np.minimum(3 * before // max(1, int(sorted_counts.sum())), 2)
    bands[counts == 0] = 2
    return bands


def band_accuracy(records: Records, class_counts: np.ndarray) -> dict[str, float | None]:
    """Return precision@1 of the examples in each of `BANDS`, by the class of the label; None for an empty band.

    Records with several labels are in no band. `class_counts` are the training examples per class, [K].
    """
    bands = class_bands(class_counts)
    single = records.label >= 0
    labels = records.label[single]
    if len(labels) and labels.max() >= len(bands):
        raise ValueError(f"class_counts has {len(bands)} classes, and a record the class id {labels.max()}")
    hits = [records.hit[single][bands[labels] == band] for band in range(len(BANDS))]
    return {name: float(hit.mean()) if len(hit) else None for name, hit in zip(BANDS, hits, strict=True)}


def summarise(records: Records, class_counts: np.ndarray | None = None) -> dict[str, float | None]:
    """Return all metrics by name, ready for JSON; undefined metrics are None, never NaN.

    `nll`, `nll_standard_error`, `brier`, `aurc` and `auroc` are the functions of these names. `precision@1` and
    `precision@5` are `precision_at`. `calibration_error` uses bins of equal mass, `calibration_error_width` of equal
    width. `accuracy_head`, `accuracy_middle` and `accuracy_tail` are `band_accuracy`, if `class_counts` [K] are given.
    `examples` is the number of examples.
    """
    bands = dict.fromkeys(BANDS) if class_counts is None else band_accuracy(records, class_counts)
    return {
        "nll": nll(records),
        "nll_standard_error": nll_standard_error(records),
        "precision@1": precision_at(records, 1),
        "precision@5": precision_at(records, 5),
        "calibration_error": calibration_error(records),
        "calibration_error_width": calibration_error(records, kind="width"),
        "brier": brier(records),
        "aurc": aurc(records),
        "auroc": auroc(records),
        **{f"accuracy_{name}": bands[name] for name in BANDS},
        "examples": len(records),
    }
