"""Means over seeds and the paired t test."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Mean(NamedTuple):
    """A mean, its standard error (None for one value) and how many values it is of."""

    value: float
    error: float | None
    number: int


class PairedTest(NamedTuple):
    """Differences of pairs: their mean and standard error, and the two-sided p-value (None for one pair)."""

    difference: float
    error: float | None
    p: float | None
    pairs: int


def mean(values: Sequence[float]) -> Mean:
    """The mean of at least one value, with its standard error, s / √n."""
    if not values:
        raise ValueError("values must have at least one entry, found none")
    number = len(values)
    centre = math.fsum(values) / number
    if number == 1:
        return Mean(centre, None, 1)
    variance = math.fsum((value - centre) ** 2 for value in values) / (number - 1)
    return Mean(centre, math.sqrt(variance / number), number)


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """The paired t test of first − second.

    Args:
        first: [n], one value for each seed.
        second: [n], for the same seeds.
    """
    if len(first) != len(second):
        raise ValueError(f"first and second must have the same length, found {len(first)} and {len(second)}")
    average = mean([one - other for one, other in zip(first, second, strict=True)])
    if average.error is None:
        return PairedTest(average.value, None, None, 1)
    if average.error == 0:  # the same difference for every seed
        p = 1.0 if average.value == 0 else 0.0
    else:
        p = two_sided_p(average.value / average.error, average.number - 1)
    return PairedTest(average.value, average.error, p, average.number)


def two_sided_p(t: float, freedom: float) -> float:
    """P(|T| ≥ |t|) for Student's t distribution.

    Args:
        t: the statistic.
        freedom: degrees of freedom, above 0.
    """
    if not freedom > 0:
        raise ValueError(f"freedom must be above 0, found {freedom}")
    if math.isinf(t):
        return 0.0
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), for 0 ≤ x ≤ 1.

    Args:
        a: above 0.
        b: above 0.
        x: between 0 and 1.
    """
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"a and b must be above 0 and x between 0 and 1, found a={a}, b={b}, x={x}")
    if x in (0, 1):
        return float(x)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    # The continued fraction converges fast below this x; above it, that of the mirrored function does.
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _continued_fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _continued_fraction(b, a, 1 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of I_x(a, b), by Lentz's method."""
    tiny, enough = 1e-300, 1e-15
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1) < enough:
            break
    return fraction
