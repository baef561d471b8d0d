"""Prediction sets with a guarantee: they contain the label of a new example with a chosen probability.

The guarantee (split conformal prediction) needs no assumption about the model, only that the calibration examples and
the new ones are exchangeable and that the model has seen neither. A score measures how badly a class fits an example; a
set contains every class whose score is at most a threshold, which is a quantile of the labels' scores.

| score | score of class y | sets |
| --- | --- | --- |
| "lac" | 1 − p_y | smallest on average; empty for some examples |
| "aps" | mass of the classes more probable than y, plus a random share u of p_y | adapt to the example |
| "raps" | score of "aps" + penalty · (rank of y − free_ranks)₊ | smaller if many classes have little mass |

| threshold | coverage holds |
| --- | --- |
| "marginal" | over all examples |
| "class" | for every class with enough examples |
| "clustered" | for clusters of classes with similar scores; suits many classes with few examples each |
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetxl._checks import integer_at_least, non_negative_float, one_of

SCORES = ("lac", "aps", "raps")
GROUPINGS = ("marginal", "class", "clustered")
CLUSTERS = 20
"""Maximum number of clusters of classes."""
RISK_STEPS = 20
"""Number of thresholds that `risk_threshold` tests: those that answer 5 %, 10 %, … of the examples."""
_QUANTILES = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
"""Quantiles of a class's scores by which classes are clustered."""


@dataclass(frozen=True)
class ScoreOptions:
    """The score of a class for an example.

    Attributes:
        kind: one of `SCORES`.
        penalty: penalty of "raps" per rank beyond `free_ranks`.
        free_ranks: number of ranks without penalty in "raps".
    """

    kind: str = "raps"
    penalty: float = 0.01
    free_ranks: int = 5

    def __post_init__(self) -> None:
        one_of("kind", self.kind, SCORES)
        non_negative_float("penalty", self.penalty)
        integer_at_least("free_ranks", self.free_ranks, 0)


def class_scores(probs: Tensor, u: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Return the scores of all classes, most probable class first, and their ids.

    APS, the naive equivalent for class y: probs[probs > probs[y]].sum() + u · probs[y]

    Args:
        probs: [b, K]
        u: [b] uniform numbers that randomise within the steps of the cumulative mass, for exact coverage.

    Returns:
        scores [b, K], which never decrease along a row, and ids [b, K].
    """
    # ONNX guarantees no stable sort; onnxruntime's is stable.
    ordered, ids = probs.double().sort(
        dim=-1, descending=True, **({} if torch.compiler.is_exporting() else {"stable": True})
    )
    if options.kind == "lac":
        return 1 - ordered, ids
    scores = ordered.cumsum(-1) - ordered * (1 - u.double().unsqueeze(-1))
    if options.kind == "raps":
        ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device, dtype=torch.float64)
        scores = scores + options.penalty * (ranks - options.free_ranks).clamp(min=0)
    return scores, ids


def label_scores(probs: Tensor, labels: Tensor, u: Tensor, options: ScoreOptions) -> Tensor:
    """Return the score of each example's label, [b], from probabilities [b, K], class ids [b] and uniforms [b]."""
    scores, ids = class_scores(probs, u, options)
    return scores.gather(-1, (ids == labels.to(ids.device).unsqueeze(-1)).int().argmax(-1, keepdim=True)).squeeze(-1)


def threshold(scores: np.ndarray, coverage: float) -> float:
    """Return the ⌈(n + 1) · coverage⌉-th smallest of n scores, which bounds a new score with probability ≥ coverage.

    Infinite if n is too small for a finite threshold with this guarantee; sets then contain all classes.
    """
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return math.inf if rank > len(scores) else float(np.partition(scores, rank - 1)[rank - 1])


@dataclass(frozen=True)
class Conformal:
    """Thresholds calibrated for a coverage.

    Attributes:
        coverage: minimum share of new examples whose set contains the label.
        options: the score.
        thresholds: [K] float64, threshold of each class.
        grouping: one of `GROUPINGS`.
        examples: number of calibration examples.
    """

    coverage: float
    options: ScoreOptions
    thresholds: np.ndarray
    grouping: str
    examples: int

    def sets(self, probs: Tensor, u: Tensor) -> list[np.ndarray]:
        """Return the prediction set of each example, class ids with the most probable first.

        Args:
            probs: [b, K]
            u: [b] uniform random numbers. Zeros give larger sets without randomness.
        """
        scores, ids = class_scores(probs, u, self.options)
        limits = torch.from_numpy(self.thresholds).to(ids.device)[ids]
        inside = (scores <= limits).cpu().numpy()
        return [row[chosen] for row, chosen in zip(ids.cpu().numpy(), inside, strict=True)]


def calibrate(
    scores: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    coverage: float,
    options: ScoreOptions,
    grouping: str = "marginal",
    seed: int = 0,
) -> Conformal:
    """Choose thresholds from the scores of labels that the model was not trained on.

    Args:
        scores: [n], `label_scores` of the calibration examples.
        labels: [n] class ids.
        coverage: in (0, 1).
        grouping: "class" uses a separate threshold for each class with at least ⌈1 / (1 − coverage)⌉ examples, and one
            threshold for all others together. "clustered" clusters these classes by k-means of their scores' quantiles
            on half of the examples, and computes a threshold per cluster, and one for the others, on the other half.
        seed: seed of the halves and of k-means.
    """
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    one_of("grouping", grouping, GROUPINGS)
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must be above 0 and below 1, got {coverage}")
    if scores.shape != labels.shape or scores.ndim != 1 or not len(scores):
        raise ValueError(f"scores and labels must be [n] with n at least 1, got {scores.shape} and {labels.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite; the probabilities hold NaN or infinity")
    limits = np.full(num_classes, threshold(scores, coverage))
    least = math.ceil(1 / (1 - coverage) - 1e-9)
    if grouping == "class":
        _by_group(limits, scores, labels, np.arange(num_classes), coverage, least)
    elif grouping == "clustered":
        generator = np.random.default_rng(seed)
        first = generator.random(len(scores)) < 0.5
        clusters = _clusters(scores[first], labels[first], num_classes, least, generator)
        limits[:] = threshold(scores[~first], coverage) if (~first).any() else math.inf
        _by_group(limits, scores[~first], labels[~first], clusters, coverage, least)
    return Conformal(coverage, options, limits, grouping, len(scores))


def _by_group(
    limits: np.ndarray, scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, coverage: float, least: int
) -> None:
    """Set the thresholds of groups [K] of classes with enough examples, and one for all other classes, in place."""
    of = groups[labels]
    order = np.argsort(of, kind="stable")
    names, starts = np.unique(of[order], return_index=True)
    alone = np.zeros(len(groups), dtype=bool)
    for name, part in zip(names, np.split(scores[order], starts[1:]), strict=True):
        if name >= 0 and len(part) >= least:
            limits[groups == name] = threshold(part, coverage)
            alone |= groups == name
    # Without a threshold of their own, rare classes would be covered too rarely, and so would all examples together.
    rest = scores[~alone[labels]]
    if len(rest) >= least:
        limits[~alone] = threshold(rest, coverage)


def _clusters(
    scores: np.ndarray, labels: np.ndarray, num_classes: int, least: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the cluster of each class [K] by k-means of quantiles of scores, −1 for classes with too few examples."""
    clusters = np.full(num_classes, -1)
    order = np.argsort(labels, kind="stable")
    names, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    enough = counts >= least
    if not enough.any():
        return clusters
    parts = np.split(scores[order], starts[1:])
    points = np.stack([np.quantile(parts[i], _QUANTILES) for i in np.flatnonzero(enough)])  # [c, 5]
    weights, k = counts[enough], min(CLUSTERS, max(1, int(enough.sum()) // 10))
    centres = points[generator.choice(len(points), k, replace=False)]
    nearest = np.zeros(len(points), dtype=np.int64)
    for _ in range(50):
        nearest = np.square(points[:, None] - centres).sum(-1).argmin(1)
        for c in np.unique(nearest):
            centres[c] = np.average(points[nearest == c], axis=0, weights=weights[nearest == c])
    clusters[names[enough]] = nearest
    return clusters


# ---- selective answers


def risk_threshold(
    confidence: np.ndarray, correct: np.ndarray, risk: float, delta: float = 0.05
) -> tuple[float, float]:
    """Return the lowest confidence at which the error rate of answers is bounded, and the share of answers.

    With probability 1 − delta over the calibration examples, the error rate of answers at or above the threshold is at
    most `risk`. The threshold is the lowest of `RISK_STEPS` candidates whose Clopper–Pearson bound is at most the risk,
    at level delta / RISK_STEPS each, so that all bounds hold simultaneously.

    Args:
        confidence: [n], probability of the most probable class.
        correct: [n] bool, whether that class is the label.
        risk: in (0, 1), maximum error rate.
        delta: in (0, 1), probability that the bound fails.

    Returns:
        The threshold, infinity if no answer is safe enough, and the share of examples at or above it.
    """
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be above 0 and below 1, got {value}")
    order = np.argsort(-confidence, kind="stable")
    ordered, errors = confidence[order], np.cumsum(~correct[order])
    last = np.flatnonzero(np.append(np.diff(ordered) != 0, True))  # the end of each group of equal confidence
    steps = np.arange(1, RISK_STEPS + 1) * len(order) // RISK_STEPS - 1
    ends = np.unique(last[np.searchsorted(last, np.maximum(steps, 0))])
    for index in ends[::-1]:
        if _error_bound(int(errors[index]), int(index) + 1, delta / RISK_STEPS) <= risk:
            return float(ordered[index]), (int(index) + 1) / len(order)
    return math.inf, 0.0


def _error_bound(errors: int, count: int, delta: float) -> float:
    """Return the Clopper–Pearson upper bound of an error rate, where P(at most `errors` of `count`) = delta."""
    low, high = errors / count, 1.0
    if errors == count:
        return 1.0
    terms = torch.arange(errors + 1, dtype=torch.float64)
    total = torch.tensor(float(count), dtype=torch.float64)
    log_choose = torch.lgamma(total + 1) - torch.lgamma(terms + 1) - torch.lgamma(total - terms + 1)
    for _ in range(60):
        middle = (low + high) / 2
        log_tail = (log_choose + terms * math.log(middle) + (total - terms) * math.log1p(-middle)).logsumexp(0)
        low, high = (middle, high) if float(log_tail) > math.log(delta) else (low, middle)
    return high


def label_thresholds(probs: np.ndarray, labels: np.ndarray, precision: float | None = None) -> np.ndarray:
    """Return the probability threshold of each label, [K] (several labels, sigmoid).

    Args:
        probs: [n, K]
        labels: [n, K], zeros and ones.
        precision: return the lowest threshold that reaches this precision, or infinity if none does; None returns the
            threshold of the best F1.
    """
    probs, labels = np.asarray(probs, dtype=np.float64), np.asarray(labels) > 0.5
    if probs.shape != labels.shape or probs.ndim != 2:
        raise ValueError(f"probs and labels must both be [n, K], got {probs.shape} and {labels.shape}")
    if precision is not None and not 0 < precision <= 1:
        raise ValueError(f"precision must be above 0 and at most 1, got {precision}")
    thresholds = np.full(probs.shape[1], math.inf)
    for k in range(probs.shape[1]):
        order = np.argsort(-probs[:, k], kind="stable")
        ordered, hits = probs[order, k], np.cumsum(labels[order, k])
        counts = np.arange(1, len(order) + 1)
        last = np.append(np.diff(ordered) != 0, True)
        if precision is None:
            value = np.where(last, 2 * hits / (counts + max(1, hits[-1])), -1.0)
            if hits[-1]:
                thresholds[k] = ordered[value.argmax()]
        else:
            fine = np.flatnonzero(last & (hits >= precision * counts))
            if len(fine):
                thresholds[k] = ordered[fine[-1]]
    return thresholds
