"""Plots of lines and of points, drawn by hand so that the page needs nothing but itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetxl.report import format as form
from hetxl.report.figure import DataTable, Frame, axes, drawing, figure
from hetxl.report.lines import Line
from hetxl.report.markup import Markup, coordinate, join, tag
from hetxl.report.palette import Style, legend, marker
from hetxl.report.scales import Scale, scale

MARKERS_UP_TO = 12
"""Lines with more points than this have markers at their end alone."""


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        title: with its unit.
        show: a value of it as text, in sentences and tables.
        tick: a value at the axis.
        log: whether equal ratios take equal room.
        low: the value at its start; None for the lowest one.
        high: the value at its end; None for the highest one.
    """

    title: str
    show: Callable[[float], str] = form.tick
    tick: Callable[[float], str] = form.tick
    log: bool = False
    low: float | None = None
    high: float | None = None


def line_chart(
    ident: str,
    title: str,
    lines: Sequence[Line],
    looks: Mapping[str, Style],
    x: Axis,
    y: Axis,
    *,
    reference: tuple[str, float] | None = None,
    cut: bool = False,
) -> Markup:
    """Lines over a shared axis, with the range of the seeds as a band.

    Args:
        ident: unlike any other on the page.
        title: what it is.
        lines: at least one, with at least one point each.
        looks: how each label is drawn.
        x: the axis across.
        y: the axis upwards.
        reference: a name and a level, drawn as a line across; one so far off that it would squeeze the lines is told.
        cut: whether high starts of the lines may be cut off, so that their ends can be told apart.
    """
    frame = Frame()
    top = _top(lines) if cut and y.high is None else y.high
    heights = [value for line in lines for point in line.points for value in (point.low, point.high)]
    if top is not None and y.high is None:
        heights = [value for value in heights if value <= top]
    notes = []
    if top is not None and any(point.y > top for line in lines for point in line.points):
        notes.append(f"Values above {y.show(top)} are cut off.")
    if reference and _far(reference[1], heights):
        notes.append(f"The {reference[0]} is at {y.show(reference[1])}, beyond the plot.")
        reference = None
    elif reference:
        heights.append(reference[1])
    across = scale(
        (p.x for line in lines for p in line.points), *frame.across, log=x.log, low=x.low, high=x.high, margin=0
    )
    up = scale(heights, *frame.up, log=y.log, low=y.low, high=top)
    drawn = []
    for line in lines:
        drawn.append(_band(line, looks[line.label], across, up))
    for line in lines:
        drawn.append(_line(line, looks[line.label], across, up, x, y))
    if reference:
        drawn.insert(0, _level(reference[0], reference[1], frame, up))
    (left, right), (bottom, ceiling) = frame.across, frame.up
    # Markers may reach over the sides, lines not over the top.
    box = {"x": left - 8, "y": ceiling - 2, "width": right - left + 16, "height": bottom - ceiling + 8}
    clip = tag("clipPath", tag("rect", **{key: coordinate(value) for key, value in box.items()}), id=f"{ident}-clip")
    plot = tag("g", *drawn, clip_path=f"url(#{ident}-clip)")
    frame_parts = axes(frame, across, up, x.title, y.title, x_format=x.tick, y_format=y.tick)
    description = " ".join([*_told(lines, x, y), *notes])
    if reference:
        description += f" The line across is the {reference[0]} at {y.show(reference[1])}."
    shown = list(dict.fromkeys(line.label for line in lines))
    return figure(
        title,
        drawing(ident, title, description, frame, tag("defs", clip), frame_parts, plot),
        _line_table(lines, x, y),
        legend=legend([(label, looks[label]) for label in shown]),
        note=" ".join(notes),
    )


@dataclass(frozen=True)
class Dot:
    """A point of a scatter plot, with its standard error upwards."""

    label: str
    x: float
    y: float
    error: float | None = None


def scatter_chart(ident: str, title: str, dots: Sequence[Dot], looks: Mapping[str, Style], x: Axis, y: Axis) -> Markup:
    """One point for each label.

    Args:
        ident: unlike any other on the page.
        title: what it is.
        dots: at least one.
        looks: how each label is drawn.
        x: the axis across.
        y: the axis upwards.
    """
    frame = Frame()
    across = scale((dot.x for dot in dots), *frame.across, log=x.log, low=x.low, high=x.high, margin=0.12)
    reach = [dot.y + sign * (dot.error or 0) for dot in dots for sign in (-1, 1)]
    up = scale(reach, *frame.up, log=y.log, low=y.low, high=y.high, margin=0.12)
    drawn = []
    for dot in dots:
        style, at = looks[dot.label], across.place(dot.x)
        if dot.error:
            whisker = (
                f"M{coordinate(at)} {coordinate(up.place(dot.y - dot.error))}V{coordinate(up.place(dot.y + dot.error))}"
            )
            drawn.append(tag("path", d=whisker, class_="whisker", stroke=style.colour))
        said = f"{dot.label}: {x.show(dot.x)}, {y.show(dot.y)}"
        drawn.append(marker(style, at, up.place(dot.y), 6, said))
    told = [f"{dot.label}: {x.show(dot.x)} {x.title}, {y.title} {y.show(dot.y)}." for dot in dots]
    rows = [
        (dot.label, x.show(dot.x), y.show(dot.y), form.MISSING if dot.error is None else y.show(dot.error))
        for dot in dots
    ]
    frame_parts = axes(frame, across, up, x.title, y.title, x_format=x.tick, y_format=y.tick)
    return figure(
        title,
        drawing(ident, title, " ".join(told), frame, frame_parts, *drawn),
        DataTable(("head", x.title, y.title, "standard error"), rows),
        legend=legend([(dot.label, looks[dot.label]) for dot in dots], lines=False),
    )


def _top(lines: Sequence[Line]) -> float | None:
    """Where to cut the starts of falling lines: at the highest that any has a fifth of the way along, if that helps."""
    settled = [point.y for line in lines for point in line.points[len(line.points) // 5 :]]
    everything = [point.y for line in lines for point in line.points]
    low, high, top = min(everything), max(everything), max(settled)
    return top + 0.04 * (top - low) if top - low < 0.6 * (high - low) and top > low else None


def _far(level: float, heights: Sequence[float]) -> bool:
    """Whether showing a level would leave the lines less than half of the plot."""
    low, high = min(heights), max(heights)
    return max(low - level, level - high) > max(high - low, 1e-9 * abs(level))


def _level(name: str, value: float, frame: Frame, up: Scale) -> Markup:
    (left, right), at = frame.across, coordinate(up.place(value))
    line = tag("path", d=f"M{coordinate(left)} {at}H{coordinate(right)}", class_="reference")
    return join([line, tag("text", name, x=coordinate(right), y=at, dy="-0.4em", text_anchor="end", class_="tick")])


def _band(line: Line, style: Style, across: Scale, up: Scale) -> Markup | None:
    if line.seeds < 2 or len(line.points) < 2:
        return None
    upper = [f"{coordinate(across.place(p.x))} {coordinate(_beyond(up, p.high))}" for p in line.points]
    lower = [f"{coordinate(across.place(p.x))} {coordinate(_beyond(up, p.low))}" for p in reversed(line.points)]
    return tag("path", d=f"M{'L'.join(upper + lower)}Z", fill=style.colour, class_="band")


def _line(line: Line, style: Style, across: Scale, up: Scale, x: Axis, y: Axis) -> Markup:
    places = [(across.place(point.x), _beyond(up, point.y)) for point in line.points]
    path = "M" + "L".join(f"{coordinate(a)} {coordinate(b)}" for a, b in places)
    drawn = [tag("path", d=path, stroke=style.colour, stroke_dasharray=style.dash, class_="line")]
    marked = range(len(places)) if len(places) <= MARKERS_UP_TO else [len(places) - 1]
    for index in marked:
        point, (a, b) = line.points[index], places[index]
        drawn.append(marker(style, a, b, 3.5, f"{line.label}: {x.show(point.x)}, {y.show(point.y)}"))
    return join(drawn)


def _beyond(up: Scale, value: float) -> float:
    """Where a value is, also past the top of a linear axis: the line keeps its slope up to where it is cut."""
    if up.log or value <= up.high:
        return up.place(value)
    return up.start + (up.end - up.start) * (value - up.low) / (up.high - up.low)


def _told(lines: Sequence[Line], x: Axis, y: Axis) -> list[str]:
    """What is to be seen, one sentence for each line."""
    told = []
    for line in lines:
        first, last = line.points[0], line.points[-1]
        name = f"{line.label}, {line.note}," if line.note else line.label
        if len(line.points) == 1:
            told.append(f"{name} is at {y.show(first.y)} ({x.title} {x.show(first.x)}).")
            continue
        verb = "falls" if last.y < first.y else "rises" if last.y > first.y else "goes"
        where = f"{x.title} {x.show(first.x)} to {x.show(last.x)}"
        told.append(f"{name} {verb} from {y.show(first.y)} to {y.show(last.y)} ({where}).")
    return told


def _line_table(lines: Sequence[Line], x: Axis, y: Axis) -> DataTable:
    """The points side by side where the lines share their x, else one below the other."""
    names = [f"{line.label}, {line.note}" if line.note else line.label for line in lines]
    shared = {tuple(point.x for point in line.points) for line in lines}
    if len(shared) == 1:
        rows = [
            (x.show(place), *(y.show(line.points[index].y) for line in lines))
            for index, place in enumerate(shared.pop())
        ]
        return DataTable((x.title, *names), rows)
    rows = [(name, x.show(p.x), y.show(p.y)) for name, line in zip(names, lines, strict=True) for p in line.points]
    return DataTable(("head", x.title, y.title), rows)
