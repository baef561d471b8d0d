"""Whether probabilities mean what they say: of the predictions made with 80 % confidence, 80 % should be right."""

from itertools import pairwise
from typing import Literal

import numpy as np

from hetxl.evaluation.ordering import by_confidence
from hetxl.evaluation.records import Records
from hetxl.functional._checks import integer_at_least, one_of

BINS = 15
Binning = Literal["mass", "width"]
BINNINGS: tuple[Binning, ...] = ("mass", "width")


def reliability(records: Records, bins: int = BINS, kind: Binning | str = "mass") -> list[tuple[float, float, int]]:
    """Confidence against accuracy of the most probable class, in bins of the confidence.

    Args:
        records: at least one example.
        bins: how many; those without examples are left out of the result.
        kind: "mass" for bins of equally many examples (give or take one); "width" for bins of equal width, each with
            its lower edge and without its upper one, but the last with both.

    Returns:
        Mean confidence, share of hits and number of examples of each bin, by rising confidence.
    """
    integer_at_least("bins", bins, 1)
    one_of("kind", kind, BINNINGS)
    ordered = by_confidence(records)
    confidence, hit = ordered.confidence[::-1], ordered.hit[::-1]
    if kind == "mass":
        starts = np.arange(bins + 1) * len(confidence) // bins
    else:
        starts = np.searchsorted(confidence, np.linspace(0, 1, bins + 1), side="left")
        # Rounding may put a confidence just above 1.
        starts[-1] = len(confidence)
    return [
        (float(confidence[start:stop].mean()), float(hit[start:stop].mean()), int(stop - start))
        for start, stop in pairwise(starts)
        if stop > start
    ]


def calibration_error(records: Records, bins: int = BINS, kind: Binning | str = "mass") -> float:
    """The expected calibration error: the mean over examples of |accuracy − confidence| of their bins.

    Args:
        records: at least one example.
        bins: how many.
        kind: "mass" or "width", see `reliability`.
    """
    found = reliability(records, bins, kind)
    return sum(count * abs(accuracy - confidence) for confidence, accuracy, count in found) / len(records)
