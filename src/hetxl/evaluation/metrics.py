"""Metrics of a set of records, and the summary that reports show."""

import numpy as np

from hetxl.evaluation.bands import BANDS, band_accuracy
from hetxl.evaluation.calibration import calibration_error
from hetxl.evaluation.records import TOP, Records
from hetxl.evaluation.selective import aurc, auroc
from hetxl.functional._checks import integer_at_least


def nll(records: Records) -> float:
    """The mean negative log-likelihood, in nats; for the sigmoid link summed over the labels."""
    return float(-_some(records).log_prob.mean())


def nll_standard_error(records: Records) -> float | None:
    """The standard error of `nll` as a mean over examples; None with fewer than two, or where a label is impossible."""
    if len(_some(records)) < 2 or not np.isfinite(records.log_prob).all():
        return None
    return float(records.log_prob.std(ddof=1) / np.sqrt(len(records)))


def precision_at(records: Records, k: int) -> float:
    """The share of examples with a label among their k most probable classes.

    Args:
        records: at least one example.
        k: 1 to 5.
    """
    if integer_at_least("k", k, 1) > TOP:
        raise ValueError(f"k must be at most {TOP}, the classes that records keep, found {k}")
    return float((_some(records).rank < k).mean())


def brier(records: Records) -> float:
    """The mean Brier score Σ_k (p_k − y_k)²: from 0 to 2 for the softmax link."""
    return float(_some(records).squared.mean())


def summarise(records: Records, class_counts: np.ndarray | None = None) -> dict[str, float | None]:
    """All metrics by name, ready for JSON: where one is not defined it is None, never NaN.

    Args:
        records: at least one example.
        class_counts: [K], training examples of each class, for the accuracy by frequency (`hetxl.evaluation.bands`).

    Returns:
        nll: mean negative log-likelihood, and nll_standard_error.
        precision@1, precision@5: share of examples with a label among the most probable classes.
        calibration_error, calibration_error_width: with 15 bins of equal mass and of equal width.
        brier: mean of Σ_k (p_k − y_k)².
        aurc: area under the risk–coverage curve.
        auroc: of telling hits from errors by confidence.
        accuracy_head, accuracy_middle, accuracy_tail: precision@1 by how frequent the class is.
        examples: how many.
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


def _some(records: Records) -> Records:
    if not len(records):
        raise ValueError("records must hold at least one example, found none")
    return records
