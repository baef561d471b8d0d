"""Map values to positions in a drawing, choose ticks at round numbers, and draw axes as SVG."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from hetxl_train import formatting as form

CHARACTER = 7.2  # approximate width of a character in a drawing


@dataclass(frozen=True)
class Scale:
    """The mapping of values to positions along an axis."""

    low: float  # the value at the start of the axis
    high: float  # the value at its end, above `low`
    start: float  # the position of its start, in the units of the drawing
    end: float  # the position of its end
    log: bool  # whether the axis is logarithmic; `low` is positive then
    ticks: tuple[float, ...]  # round values within the axis

    def position(self, value: float, *, beyond: bool = False) -> float:
        """Return the position of a value, clamped to the ends of the axis.

        On a linear axis, `beyond` does not clamp values above `high`, so that a line that is cut off keeps its slope.
        """
        low, high = self.low, self.high
        inside = max(value, low) if beyond and not self.log else min(max(value, low), high)
        if self.log:
            low, high, inside = math.log(low), math.log(high), math.log(inside)
        return self.start + (self.end - self.start) * (inside - low) / (high - low)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` multiples of 1, 2, 2.5 or 5 times a power of ten between two values."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough * 0.999), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(multiple * step, digits) for multiple in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values between two positive values: powers of ten, and if they fit, 2 and 5 times these."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        ticks = [value for value in ticks if low * 0.999999 <= value <= high * 1.000001]
        if len(ticks) <= count + 2:
            break
    if len(ticks) > count + 2:
        ticks = ticks[:: math.ceil(len(ticks) / count)]
    # A range below about one decade has hardly any of these values and gets linear ticks.
    return ticks if len(ticks) >= 3 else nice_ticks(low, high, max(2, count - 1))


def thin(indexes: Sequence[int], limit: int) -> list[int]:
    """Return at most `limit` (two or more) evenly spread indexes, including the first and the last."""
    if len(indexes) <= limit:
        return list(indexes)
    step = (len(indexes) - 1) / (limit - 1)
    return [indexes[round(number * step)] for number in range(limit)]


def downsample(values: Sequence[float], limit: int = 400) -> list[int]:
    """Return the indexes of at most `limit` (4 or more) points of a line to draw.

    They are both ends, and the lowest and the highest point of each stretch, so that no spike is lost.
    """
    total = len(values)
    if total <= limit:
        return list(range(total))
    stretches = (limit - 2) // 2
    indexes = {0, total - 1}
    for stretch in range(stretches):
        inside = range(stretch * total // stretches, (stretch + 1) * total // stretches)
        indexes.add(min(inside, key=values.__getitem__))
        indexes.add(max(inside, key=values.__getitem__))
    return sorted(indexes)


@dataclass(frozen=True)
class Axis:
    """The quantity that an axis shows, and its format."""

    title: str  # including the unit
    show: Callable[[float], str] = form.tick  # formats a value in sentences and tables
    tick: Callable[[float], str] = form.tick  # formats a value at the axis
    log: bool = False  # whether the axis is logarithmic
    low: float | None = None  # the value at the start; None for the lowest value
    high: float | None = None  # the value at the end; None for the highest value
    ticks: Sequence[float] | None = None  # the values with a tick; None for round values

    def scale(
        self,
        values: Iterable[float],
        ends: tuple[float, float],
        *,
        high: float | None = None,
        count: int = 5,
        margin: float = 0.04,
    ) -> Scale:
        """Return the scale for some values between two positions; without values, it shows 0 to 1, or 1 to 10.

        `high` applies if the axis has no `high`. `margin` is the fraction of space beyond the values at an end that is
        not fixed. A logarithmic scale leaves out values that are not positive.
        """
        low, high = self.low, self.high if high is None else high
        shown = [value for value in values if math.isfinite(value) and (value > 0 or not self.log)]
        bottom = low if low is not None else min(shown, default=1.0 if self.log else 0.0)
        top = high if high is not None else max(shown, default=10.0 if self.log else 1.0)
        if not top > bottom:  # leave space around a single value
            room = abs(bottom) * 0.05 or 0.5
            below, above = (bottom / 1.5, bottom * 1.5) if self.log else (bottom - room, bottom + room)
            bottom, top = bottom if low is not None else below, above
        elif self.log:
            ratio = (top / bottom) ** margin
            bottom, top = bottom if low is not None else bottom / ratio, top if high is not None else top * ratio
        else:
            room = margin * (top - bottom)
            bottom, top = bottom if low is not None else bottom - room, top if high is not None else top + room
        ticks = self.ticks
        if ticks is None:
            ticks = log_ticks(bottom, top, count) if self.log else nice_ticks(bottom, top, count)
        return Scale(bottom, top, *ends, self.log, tuple(value for value in ticks if bottom <= value <= top))


@dataclass(frozen=True)
class Frame:
    """The size of a drawing and the margins around its plot, in units of about one pixel of a phone."""

    width: float = 400
    height: float = 260
    left: float = 52
    right: float = 18
    top: float = 30
    bottom: float = 44

    @property
    def across(self) -> tuple[float, float]:
        """The start and the end of the x axis."""
        return self.left, self.width - self.right

    @property
    def up(self) -> tuple[float, float]:
        """The start of the y axis, at the bottom, and its end."""
        return self.height - self.bottom, self.top


def element(name: str, /, *children: Markup | str | None, **attributes: object) -> Markup:
    """Return an SVG element with escaped text.

    In the names of attributes, `_` stands for `-`, and a `_` at the end is dropped (`class_`). None leaves an attribute
    out.
    """
    opening = name
    for key, value in attributes.items():
        if value is not None:
            text = number_text(value) if isinstance(value, float) else value
            opening += f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"'
    content = "".join(escape(child) for child in children if child is not None)
    return Markup(f"<{opening}>{content}</{name}>" if content else f"<{opening}/>")


def number_text(value: float) -> str:
    """Format a length to a hundredth of a unit, which is precise enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if round(value, 2) else "0"


def outline(points: Iterable[tuple[float, float]], closed: bool = False) -> str:
    """Return the `d` of an SVG path through some points."""
    return "M" + "L".join(f"{number_text(x)} {number_text(y)}" for x, y in points) + ("Z" if closed else "")


def text_at(text: str, x: float, y: float, *, anchor: str = "middle", class_: str = "tick", **more: Any) -> Markup:
    """Draw text with its anchor at a position."""
    return element("text", text, x=float(x), y=float(y), class_=class_, text_anchor=anchor, **more)


def draw_axes(
    frame: Frame, x: tuple[Scale, Axis] | None, y: tuple[Scale, Axis] | None, titles: tuple[str, str]
) -> Markup:
    """Draw grid lines, ticks and titles, the y title above its axis; None for an axis whose ticks the chart draws."""
    parts = []
    (left, right), (bottom, ceiling) = frame.across, frame.up
    if y:
        for value in y[0].ticks:
            at = y[0].position(value)
            parts.append(element("path", d=outline([(left, at), (right, at)]), class_="grid"))
            parts.append(text_at(y[1].tick(value), left - 6, at, anchor="end", dy="0.33em"))
    parts.append(element("path", d=outline([(left, bottom), (right, bottom)]), class_="axis"))
    for at, text in _apart(*x) if x else ():
        if not y:
            parts.append(element("path", d=outline([(at, ceiling), (at, bottom)]), class_="grid"))
        parts.append(element("path", d=outline([(at, bottom), (at, bottom + 4)]), class_="axis"))
        parts.append(text_at(text, at, bottom + 17))
    parts.append(text_at(titles[1], 0, 13, anchor="start", class_="axis-title"))
    parts.append(text_at(titles[0], right, frame.height - 7, anchor="end", class_="axis-title"))
    return Markup().join(parts)


def _apart(scale: Scale, axis: Axis) -> list[tuple[float, str]]:
    """Return positions and texts of ticks from the left; leave out ticks whose text would touch the one before."""
    ticks, edge = [], -math.inf
    for value in scale.ticks:
        at, text = scale.position(value), axis.tick(value)
        half = len(text) * CHARACTER / 2
        if at - half > edge:
            ticks.append((at, text))
            edge = at + half + 6
    return ticks
