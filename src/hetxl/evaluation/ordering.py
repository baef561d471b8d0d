"""Hits in the order of confidence. Examples of equal confidence have no order of their own, so each stands for the mean
of its group: what a random order would give, and the same however the examples were shuffled."""

from typing import NamedTuple

import numpy as np

from hetxl.evaluation.records import Records


class Ordered(NamedTuple):
    """Examples from the most to the least confident.

    Attributes:
        confidence: [n], falling.
        hit: [n], the share of hits among all examples of the same confidence.
        ends: [g] int64, how many examples there are up to the end of each group of equal confidence.
        hits: [g] int64, how many of each group are hits.
    """

    confidence: np.ndarray
    hit: np.ndarray
    ends: np.ndarray
    hits: np.ndarray


def by_confidence(records: Records) -> Ordered:
    """The examples from the most to the least confident; raises when there are none."""
    if not len(records):
        raise ValueError("records must hold at least one example, found none")
    confidence = records.confidence
    order = np.argsort(-confidence, kind="stable")
    confidence = confidence[order]
    ends = np.append(np.flatnonzero(np.diff(confidence)) + 1, len(confidence))
    sizes = np.diff(ends, prepend=0)
    hits = np.add.reduceat(records.hit[order].astype(np.int64), ends - sizes)
    return Ordered(confidence, np.repeat(hits / sizes, sizes), ends, hits)
