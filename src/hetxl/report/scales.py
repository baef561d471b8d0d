"""From values to places in a plot, with ticks at round numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """One axis.

    Attributes:
        low: the value at its start.
        high: the value at its end, above `low`.
        start: where it starts, in the units of the drawing.
        end: where it ends.
        log: whether equal ratios take equal room; `low` is above 0 then.
        ticks: round values on it.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Where a value is; one beyond the ends is at the end."""
        low, high, inside = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, inside = math.log(low), math.log(high), math.log(inside)
        return self.start + (self.end - self.start) * (inside - low) / (high - low)


def scale(
    values: Iterable[float],
    start: float,
    end: float,
    *,
    log: bool = False,
    low: float | None = None,
    high: float | None = None,
    count: int = 5,
    margin: float = 0.04,
) -> Scale:
    """An axis that holds some values.

    Args:
        values: those to show; none gives an axis from 0 to 1.
        start: where the axis starts.
        end: where it ends.
        log: whether to use ratios; values that are not above 0 are left out.
        low: the value at the start, instead of the lowest one.
        high: the value at the end, instead of the highest one.
        count: about how many ticks.
        margin: the share of room left beyond the values at an end that was not given.
    """
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    bottom = low if low is not None else min(shown, default=1.0 if log else 0.0)
    top = high if high is not None else max(shown, default=10.0 if log else 1.0)
    if not top > bottom:  # one value: some room around it
        room = abs(bottom) * 0.05 or 0.5
        below, above = (bottom / 1.5, bottom * 1.5) if log else (bottom - room, bottom + room)
        bottom, top = bottom if low is not None else below, above  # an end that was given at the start stays
    elif log:
        ratio = (top / bottom) ** margin
        bottom, top = bottom if low is not None else bottom / ratio, top if high is not None else top * ratio
    else:
        room = margin * (top - bottom)
        bottom, top = bottom if low is not None else bottom - room, top if high is not None else top + room
    ticks = log_ticks(bottom, top, count) if log else nice_ticks(bottom, top, count)
    return Scale(bottom, top, start, end, log, tuple(ticks))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten between two values, about `count` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough * 0.999), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(place * step, digits) for place in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values between two above 0, for an axis of ratios: powers of ten, and 2 and 5 of them if there is room."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        ticks = [value for value in ticks if low * 0.999999 <= value <= high * 1.000001]
        if len(ticks) <= count + 2:
            break
    if len(ticks) > count + 2:
        ticks = ticks[:: math.ceil(len(ticks) / count)]
    # Less than about a decade has hardly any of these: round steps do there.
    return ticks if len(ticks) >= 3 else nice_ticks(low, high, max(2, count - 1))


def thin(indexes: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of some indexes, evenly spread, the first and the last among them."""
    if len(indexes) <= limit:
        return list(indexes)
    if limit < 2:
        return list(indexes[:limit])
    step = (len(indexes) - 1) / (limit - 1)
    return [indexes[round(place * step)] for place in range(limit)]


def downsample(values: Sequence[float], limit: int = 400) -> list[int]:
    """Which points of a line to keep: the lowest and the highest of each stretch, so that no spike is lost.

    Args:
        values: [n], along the line.
        limit: how many to keep at most, at least 4.
    """
    total = len(values)
    if total <= limit:
        return list(range(total))
    stretches = (limit - 2) // 2
    kept = {0, total - 1}
    for stretch in range(stretches):
        inside = range(stretch * total // stretches, (stretch + 1) * total // stretches)
        kept.add(min(inside, key=values.__getitem__))
        kept.add(max(inside, key=values.__getitem__))
    return sorted(kept)
