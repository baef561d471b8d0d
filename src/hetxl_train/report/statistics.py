"""Compute means over seeds and the paired t test."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)


class Mean(NamedTuple):
    """A mean, its standard error (None for one value) and the number of values."""

    value: float
    error: float | None
    number: int


class PairedTest(NamedTuple):
    """The mean difference of pairs, its standard error and the two-sided p-value (None for one pair)."""

    difference: float
    error: float | None
    p: float | None
    pairs: int


def mean(values: Sequence[float]) -> Mean:
    """Return the mean of at least one value, with its standard error s / √n."""
    if not values:
        raise ValueError("values must have at least one entry, found none")
    number = len(values)
    centre = math.fsum(values) / number
    if number == 1:
        return Mean(centre, None, 1)
    variance = math.fsum((value - centre) ** 2 for value in values) / (number - 1)
    return Mean(centre, math.sqrt(variance / number), number)


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Return the paired t test of first − second, both [n] with one value per seed."""
    if len(first) != len(second):
        raise ValueError(f"first and second must have the same length, found {len(first)} and {len(second)}")
    return t_test(mean([left - right for left, right in zip(first, second, strict=True)]))


def t_test(average: Mean) -> PairedTest:
    """Return the t test of whether the mean difference is 0."""
    if average.error is None:
        return PairedTest(average.value, None, None, 1)
    same = average.error == 0  # the same difference for every seed
    p = float(average.value == 0) if same else two_sided_p(average.value / average.error, average.number - 1)
    return PairedTest(average.value, average.error, p, average.number)


def two_sided_p(t: float, freedom: float) -> float:
    """Return P(|T| ≥ |t|) for Student's t distribution with ν ≥ 1 degrees of freedom.

    With t = √ν tan θ, it is proportional to the integral of cosᵛ⁻¹ from θ to π/2. Gauss–Legendre quadrature computes
    it over at most 12 / √ν, beyond which the integrand is negligible.
    """
    if not freedom >= 1:
        raise ValueError(f"freedom must be at least 1, found {freedom}")
    start = math.atan2(abs(t), math.sqrt(freedom))
    half = min(math.pi / 2 - start, 12 / math.sqrt(freedom)) / 2
    integral = half * float(_WEIGHTS @ np.cos(start + half * (1 + _NODES)) ** (freedom - 1))
    log_factor = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return min(1.0, 2 * math.exp(log_factor) * integral)
