"""Answering only when confident: how the errors fall as the least confident predictions are left out."""

import numpy as np

from hetxl.evaluation.ordering import by_confidence
from hetxl.evaluation.records import Records
from hetxl.functional._checks import integer_at_least


def risk_coverage(records: Records, points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """The share of errors among the most confident predictions, against how many are kept.

    Args:
        records: at least one example.
        points: of the curve, evenly spaced in coverage; fewer when there are fewer examples.

    Returns:
        coverage: [p], share of the examples that are kept, rising to 1.
        risk: [p], share of errors among them.
    """
    integer_at_least("points", points, 1)
    risks = _risks(records)
    counts = np.unique(-(-np.arange(1, points + 1) * len(risks) // points))
    return counts / len(risks), risks[counts - 1]


def aurc(records: Records) -> float:
    """Area under the risk–coverage curve: the mean of the risk over all n coverages 1/n, 2/n, …, 1. Lower is better; 0
    without errors, 1 with nothing else."""
    return float(_risks(records).mean())


def auroc(records: Records) -> float | None:
    """How well confidence tells errors: the probability that a hit is more confident than an error, ties counted half.
    None when there are only hits or only errors."""
    ordered = by_confidence(records)
    hits = ordered.hits  # of each group of equal confidence, most confident first
    errors = np.diff(ordered.ends, prepend=0) - hits
    if not hits.any() or not errors.any():
        return None
    above = np.cumsum(hits) - hits
    return float((errors * (above + hits / 2)).sum() / hits.sum() / errors.sum())


def threshold_for(records: Records, precision: float = 0.95) -> tuple[float | None, float]:
    """The lowest confidence from which on predictions are right often enough, and how many have it.

    Args:
        records: at least one example; take those of the validation split, and read the coverage on the test split.
        precision: share of hits among the predictions that are kept.

    Returns:
        threshold: keep predictions of at least this confidence; None when no threshold does.
        coverage: share of the examples that are kept; 0 when no threshold does.
    """
    if not 0 < precision <= 1:
        raise ValueError(f"precision must lie in (0, 1], found {precision}")
    ordered = by_confidence(records)
    # A threshold keeps all examples of a confidence or none.
    enough = np.flatnonzero(np.cumsum(ordered.hits) >= precision * ordered.ends)
    if not len(enough):
        return None, 0.0
    end = int(ordered.ends[enough[-1]])
    return float(ordered.confidence[end - 1]), end / len(records)


def _risks(records: Records) -> np.ndarray:
    """The share of errors among the 1, 2, …, n most confident predictions, [n]."""
    errors = 1 - by_confidence(records).hit
    return np.cumsum(errors) / np.arange(1, len(errors) + 1)
