"""Draw charts as SVG: lines, points and bars, for a self-contained page.

A label has the same style in all charts: a colour, a dash and a marker, each of which distinguishes it. Colours are
variables of `templates/charts.css`, chosen for colour-blind readers on light and dark backgrounds.

Charts share these arguments: `ident`, a unique name on the page; `title`; `looks`, the style of each label; `x` and
`y`, the horizontal and the vertical axis.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from hetxl.registry import HEAD_LABELS
from hetxl_train import formatting as form
from hetxl_train.report import scales
from hetxl_train.report.scales import Axis, Frame, Scale, draw_axes, element, outline, text_at
from hetxl_train.report.statistics import Mean
from hetxl_train.report.tables import Table, as_html, text_table

COLOURS = 8  # number of `--series-…` variables in the style sheet
OTHERS = (7, 4, 5, 6, 3, 2, 1, 0)  # colours of labels that are not heads of the paper, in order
DASHES = (None, None, "7 3", "2 3", "9 3 2 3", "5 5", "12 4", "1 4")
_PLUS = "M-.3-1.2H.3V-.3H1.2V.3H.3V1.2H-.3V.3H-1.2V-.3H-.3Z"
MARKERS = {
    "square": "M-.9-.9H.9V.9H-.9Z",
    "circle": "M-1 0A1 1 0 1 1 1 0A1 1 0 1 1-1 0Z",
    "triangle": "M0-1.3L1.13.65H-1.13Z",
    "diamond": "M0-1.35L1.35 0L0 1.35L-1.35 0Z",
    "cross": _PLUS,
    "plus": _PLUS,
    "down": "M0 1.3L-1.13-.65H1.13Z",
    "star": "M0-1.4L.32-.44L1.33-.43L.52.17L.82 1.13L0 .55L-.82 1.13L-.52.17L-1.33-.43L-.32-.44Z",
}
"""Outlines of the markers; they reach about one unit to each side of the centre."""
_HEADS = [HEAD_LABELS[name] for name in ("det", "het-xl", "het", "het-h")]
_HEADS += ["DET + temperature scaling", "DET + label smoothing", "HET-XL + scaling"]
KNOWN = {label: index for index, label in enumerate(_HEADS)}
"""Colours of heads that have the same style in every chart."""
MARKERS_UP_TO = 12  # lines with more points than this have a marker only at their end
POINTS = 400  # maximal number of points of a line
TABLE_ROWS = 40  # maximal number of rows of the table below a chart


@dataclass(frozen=True)
class Style:
    """The style of a label."""

    colour: str  # as CSS
    dash: str | None = None  # dashes of lines; None for a solid line
    marker: str = "circle"  # shape of points


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return the style of each label: a fixed one for `KNOWN` heads, the next unused colour for other labels."""
    labels = sorted(dict.fromkeys(labels), key=lambda label: label not in KNOWN)
    taken = [KNOWN[label] for label in labels if label in KNOWN]
    free = [colour for colour in OTHERS if colour not in taken] + [*OTHERS] * (1 + len(labels) // COLOURS)
    looks: dict[str, Style] = {}
    uses = [0] * COLOURS
    for label in labels:
        colour = KNOWN[label] if label in KNOWN else free.pop(0)
        shape = (colour + 3 * uses[colour]) % COLOURS  # colours repeat with other dashes and markers
        looks[label] = Style(f"var(--series-{colour})", DASHES[shape], list(MARKERS)[shape])
        uses[colour] += 1
    return looks


@dataclass(frozen=True)
class Panel:
    """A drawing with a description in words."""

    ident: str  # a unique name on the page
    title: str
    description: str  # what the drawing shows, with numbers
    frame: Frame
    content: Markup  # SVG elements
    heading: str = ""  # a title above the panel, if several panels share a figure
    subheading: str = ""  # a line below the heading


@dataclass(frozen=True)
class Figure:
    """Panels with their title, legend and numbers."""

    title: str
    panels: Sequence[Panel]
    numbers: Table | None = None  # the drawn values as a table; None if there are too many
    legend: Sequence[tuple[str, Style]] = ()  # labels and their styles
    note: str = ""  # a note for the reader
    lines: bool = True  # whether the legend shows lines in addition to markers

    def numbers_html(self) -> Markup:
        """Return the numbers as HTML; a long table shows only evenly spread rows."""
        return as_html(self.numbers, limit=TABLE_ROWS) if self.numbers else Markup()

    def samples(self) -> list[tuple[str, float, Markup]]:
        """Return for each label of the legend a sample of its style and the width of that; the height is 14."""
        width = 32 if self.lines else 14
        path = {"d": "M1 7H31", "fill": "none", "stroke_width": 2}
        samples = []
        for label, style in self.legend:
            line = element("path", **path, stroke=style.colour, stroke_dasharray=style.dash) if self.lines else Markup()
            samples.append((label, width, line + marker(style, width / 2, 7)))
        return samples


def marker(style: Style, x: float, y: float, size: float = 4, title: str | None = None) -> Markup:
    """Draw a marker; `size` is half of its width, and `title` appears on hover."""
    transform = f"translate({scales.number_text(x)} {scales.number_text(y)}) scale({scales.number_text(size)})"
    transform += " rotate(45)" if style.marker == "cross" else ""
    note = element("title", title) if title else None
    return element("path", note, d=MARKERS[style.marker], fill=style.colour, transform=transform, class_="marker")


@dataclass(frozen=True)
class Point:
    """A point of a line, and the range of the band around it."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """A line of a label."""

    label: str
    points: tuple[Point, ...]  # at least one, sorted by x
    seeds: int = 1  # number of runs that the points are the mean of; with two or more, a band shows their range
    note: str = ""  # what distinguishes this line from others of the label, such as its seed

    @property
    def name(self) -> str:
        """The label with the note."""
        return f"{self.label}, {self.note}" if self.note else self.label


def pairs(records: Iterable[Any], x: str | int, y: str | int) -> list[tuple[float, float, float]]:
    """Return a key, x and y of each record as numbers; incomplete records are left out.

    The key matches records of different seeds. It is the "step" of a dict, or the first entry of a list.
    """
    numbers = []
    for record in records:
        try:
            triple = [form.finite(record[key]) for key in ("step" if isinstance(record, dict) else 0, x, y)]
        except (KeyError, IndexError, TypeError):
            continue
        if None not in triple:
            numbers.append(tuple(triple))
    return sorted(numbers)


def lines_over_seeds(label: str, runs: Sequence[tuple[int | None, Sequence[tuple[float, float, float]]]]) -> list[Line]:
    """Return the lines of one label; `runs` has the seed of each run and its points from `pairs`.

    Seeds with measurements at the same steps become one line of means, with their range. Otherwise (one stopped early,
    or was evaluated at other steps), each seed has its own line, because a mean over varying sets of seeds would jump.
    """
    filled = [(seed, points) for seed, points in runs if points]
    if not filled:
        return []
    common = set.intersection(*({key for key, _, _ in points} for _, points in filled))
    longest = max(len(points) for _, points in filled)
    if len(filled) > 1 and 2 * len(common) < longest:
        return [
            _shortened(Line(label, tuple(Point(x, y, y, y) for _, x, y in points), 1, f"seed {seed}"))
            for seed, points in filled
        ]
    by_key: dict[float, list[tuple[float, float]]] = {}
    for _, points in filled:
        for key, x, y in points:
            if key in common:
                by_key.setdefault(key, []).append((x, y))
    merged = []
    for _, members in sorted(by_key.items()):
        xs, ys = zip(*members, strict=True)
        merged.append(Point(sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return [_shortened(Line(label, tuple(merged), len(filled)))]


def _shortened(line: Line) -> Line:
    indexes = scales.downsample([point.y for point in line.points], POINTS)
    return replace(line, points=tuple(line.points[index] for index in indexes))


def line_chart(
    ident: str,
    title: str,
    lines: Sequence[Line],
    looks: Mapping[str, Style],
    x: Axis,
    y: Axis,
    *,
    levels: Mapping[str, float] | None = None,
    cut: bool = False,
    diagonal: bool = False,
    markers: bool | None = None,
    frame: Frame | None = None,
    tick_count: int = 5,
) -> Figure:
    """Draw lines over a shared axis, with bands around means over several seeds.

    Args:
        levels: values, by name, to draw as horizontal lines.
        cut: whether to cut off high starts of the lines, so that their ends can be distinguished, and to leave out a
            level that is so far off that it would squeeze the lines; a note mentions both.
        diagonal: whether to draw the line y = x.
        markers: whether every point has a marker; None for all points of short lines and the last one of long lines.
        tick_count: approximate number of ticks of an axis.
    """
    frame = frame or Frame()
    top = _cut_level(lines) if cut and y.high is None else y.high
    heights = [value for line in lines for point in line.points for value in (point.low, point.high)]
    if top is not None and y.high is None:
        heights = [value for value in heights if value <= top]
    notes, described, levels = [], [_describe(line, x, y) for line in lines], dict(levels or {})
    if top is not None and any(point.y > top for line in lines for point in line.points):
        notes.append(f"Values above {y.show(top)} are cut off.")
    for name, level in list(levels.items()):
        if cut and _far(level, heights):
            notes.append(f"The {name} is at {y.show(level)}, beyond the plot.")
            del levels[name]
        else:
            described.append(f"The line across is the {name} at {y.show(level)}.")
    xs = [point.x for line in lines for point in line.points]
    across = x.scale(xs, frame.across, margin=0, count=tick_count)
    up = y.scale([*heights, *levels.values()], frame.up, high=top, count=tick_count)
    (left, right), (bottom, ceiling) = frame.across, frame.up
    drawn = [_level(name, up.position(level), frame) for name, level in levels.items()]
    if diagonal:
        drawn.append(element("path", d=outline([(left, bottom), (right, ceiling)]), class_="reference"))
    drawn += [_band(line, looks[line.label], across, up) for line in lines if line.seeds > 1 and len(line.points) > 1]
    drawn += [_line(line, looks[line.label], across, up, x, y, markers) for line in lines]
    # The clip leaves space for markers at the sides, but cuts lines off at the top.
    box = {"x": left - 8, "y": ceiling - 2, "width": right - left + 16, "height": bottom - ceiling + 8}
    clip = element("clipPath", element("rect", **box), id=f"{ident}-clip")
    plot = element("g", *drawn, clip_path=f"url(#{ident}-clip)")
    content = element("defs", clip) + draw_axes(frame, (across, x), (up, y), (x.title, y.title)) + plot
    panel = Panel(ident, title, " ".join([*described, *notes]), frame, content)
    legend = [(label, looks[label]) for label in dict.fromkeys(line.label for line in lines)]
    return Figure(title, [panel], _line_numbers(title, lines, x, y), legend, " ".join(notes))


def _cut_level(lines: Sequence[Line]) -> float | None:
    """Return where to cut falling lines: above the highest value after their first fifth; None if that gains little."""
    settled = [point.y for line in lines for point in line.points[len(line.points) // 5 :]]
    everything = [point.y for line in lines for point in line.points]
    low, high, top = min(everything), max(everything), max(settled)
    return top + 0.04 * (top - low) if top - low < 0.6 * (high - low) and top > low else None


def _far(level: float, heights: Sequence[float]) -> bool:
    """Return whether a level is so far off that the lines would get less than half of the plot."""
    low, high = min(heights), max(heights)
    return max(low - level, level - high) > max(high - low, 1e-9 * abs(level))


def _level(name: str, at: float, frame: Frame) -> Markup:
    left, right = frame.across
    line = element("path", d=outline([(left, at), (right, at)]), class_="reference")
    return line + text_at(name, right, at, anchor="end", dy="1em" if at < frame.top + 16 else "-0.4em")


def _band(line: Line, style: Style, across: Scale, up: Scale) -> Markup:
    upper = [(across.position(p.x), up.position(p.high, beyond=True)) for p in line.points]
    lower = [(across.position(p.x), up.position(p.low, beyond=True)) for p in reversed(line.points)]
    return element("path", d=outline(upper + lower, closed=True), fill=style.colour, class_="band")


def _line(line: Line, style: Style, across: Scale, up: Scale, x: Axis, y: Axis, markers: bool | None) -> Markup:
    positions = [(across.position(point.x), up.position(point.y, beyond=True)) for point in line.points]
    small = across.end - across.start < 200
    class_ = "line thin" if small else "line"
    drawn = [element("path", d=outline(positions), stroke=style.colour, stroke_dasharray=style.dash, class_=class_)]
    everywhere = len(positions) <= MARKERS_UP_TO if markers is None else markers
    marked = list(zip(positions, line.points, strict=True))
    for at, point in marked if everywhere else marked[-1:] if markers is None else ():
        title = f"{line.label}: {x.show(point.x)}, {y.show(point.y)}"
        drawn.append(marker(style, *at, 2.4 if small else 3.5, title))
    return Markup().join(drawn)


def _describe(line: Line, x: Axis, y: Axis) -> str:
    """Describe a line in one sentence."""
    first, last = line.points[0], line.points[-1]
    name = f"{line.name}," if line.note else line.label
    if len(line.points) == 1:
        return f"{name} is at {y.show(first.y)} ({x.title} {x.show(first.x)})."
    verb = "falls" if last.y < first.y else "rises" if last.y > first.y else "goes"
    return (
        f"{name} {verb} from {y.show(first.y)} to {y.show(last.y)} ({x.title} {x.show(first.x)} to {x.show(last.x)})."
    )


def _line_numbers(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> Table:
    """Return a table of the points: a column per line if the lines share their x, otherwise a row per point."""
    shared = {tuple(point.x for point in line.points) for line in lines}
    if len(shared) == 1:
        columns = [[y.show(point.y) for point in line.points] for line in lines]
        rows = list(zip(map(x.show, shared.pop()), *columns, strict=True))
        return text_table(title, (x.title, *(line.name for line in lines)), rows)
    rows = [(line.name, x.show(point.x), y.show(point.y)) for line in lines for point in line.points]
    return text_table(title, ("head", x.title, y.title), rows)


@dataclass(frozen=True)
class Dot:
    """A point of a scatter plot, with the standard error of y."""

    label: str
    x: float
    y: float
    error: float | None = None


def scatter_chart(ident: str, title: str, dots: Sequence[Dot], looks: Mapping[str, Style], x: Axis, y: Axis) -> Figure:
    """Draw one point for each label."""
    frame = Frame()
    across = x.scale((dot.x for dot in dots), frame.across, margin=0.12)
    reach = [dot.y + sign * (dot.error or 0) for dot in dots for sign in (-1, 1)]
    up = y.scale(reach, frame.up, margin=0.12)
    drawn = [draw_axes(frame, (across, x), (up, y), (x.title, y.title))]
    for dot in dots:
        style, at = looks[dot.label], across.position(dot.x)
        if dot.error:
            ends = [(at, up.position(dot.y + sign * dot.error)) for sign in (-1, 1)]
            drawn.append(element("path", d=outline(ends), class_="whisker", stroke=style.colour))
        drawn.append(marker(style, at, up.position(dot.y), 6, f"{dot.label}: {x.show(dot.x)}, {y.show(dot.y)}"))
    described = [f"{dot.label}: {x.show(dot.x)} {x.title}, {y.title} {y.show(dot.y)}." for dot in dots]
    rows = [(d.label, x.show(d.x), y.show(d.y), form.MISSING if d.error is None else y.show(d.error)) for d in dots]
    numbers = text_table(title, ("head", x.title, y.title, "standard error"), rows)
    panel = Panel(ident, title, " ".join(described), frame, Markup().join(drawn))
    return Figure(title, [panel], numbers, [(dot.label, looks[dot.label]) for dot in dots], lines=False)


def grouped_bars(
    ident: str,
    title: str,
    categories: Sequence[str],
    values: Mapping[str, Sequence[Mean | None]],
    looks: Mapping[str, Style],
    y_title: str,
    x_title: str,
) -> Figure:
    """Draw fractions by category, with a bar and its standard error for each label; None for an unknown fraction."""
    frame = Frame()
    y = Axis(y_title, form.percent, lambda value: form.percent(value, 0), low=0.0)
    known = [value for row in values.values() for value in row if value is not None]
    up = y.scale([value.value + (value.error or 0) for value in known], frame.up, margin=0.06)
    (left, right), (bottom, _) = frame.across, frame.up
    room = (right - left) / len(categories)
    width = min(0.8 * room / len(values), 48)
    drawn = [draw_axes(frame, None, (up, y), (x_title, y_title))]
    for index, category in enumerate(categories):
        middle = left + (index + 0.5) * room
        drawn.append(text_at(category, middle, bottom + 17))
        for order, (label, row) in enumerate(values.items()):
            if (value := row[index]) is not None:
                start = middle + (order - len(values) / 2) * width
                drawn.append(_bar(start, width, value, looks[label], up, f"{label}, {category}: {_share(value)}"))
    described = [
        f"{label}: {form.listed([f'{_share(value)} {name}' for name, value in zip(categories, row, strict=True)])}."
        for label, row in values.items()
    ]
    numbers = text_table(title, ("head", *categories), [(label, *map(_share, row)) for label, row in values.items()])
    panel = Panel(ident, title, " ".join(described), frame, Markup().join(drawn))
    return Figure(title, [panel], numbers, [(label, looks[label]) for label in values], lines=False)


def _bar(start: float, width: float, value: Mean, style: Style, up: Scale, title: str) -> Markup:
    top, bottom, middle = up.position(value.value), up.start, start + width / 2
    box = {"x": start + 1, "y": top, "width": max(width - 2, 1.0), "height": bottom - top}
    bar = element("rect", element("title", title), fill=style.colour, **box)
    if width > 12 and bottom - top > 16:  # the marker distinguishes bars without colour
        bar += marker(replace(style, colour="var(--page)"), middle, bottom - 8, min(3.5, width / 5))
    if value.error:
        ends = [(middle, up.position(value.value + sign * value.error)) for sign in (-1, 1)]
        bar += element("path", d=outline(ends), class_="spread")
    return bar


def _share(value: Mean | None) -> str:
    if value is None:
        return form.MISSING
    return form.percent(value.value) + (f" ± {form.percent(value.error)}" if value.error else "")


def histogram(
    ident: str, title: str, bins: Sequence[tuple[str, str, float]], x_title: str, y_title: str, description: str
) -> Figure:
    """Draw a histogram; each bin has a short name, a full name and a count."""
    frame = Frame()
    y = Axis(y_title, low=0.0)
    up = y.scale([count for _, _, count in bins], frame.up, margin=0.06)
    (left, right), (bottom, _) = frame.across, frame.up
    room = (right - left) / len(bins)
    widest = max(len(short) for short, _, _ in bins) * scales.CHARACTER + 6
    every = max(1, math.ceil(widest / room))
    drawn = [draw_axes(frame, None, (up, y), (x_title, y_title))]
    for index, (short, full, count) in enumerate(bins):
        top = up.position(count)
        box = {"x": left + (index + 0.08) * room, "y": top, "width": 0.84 * room, "height": bottom - top}
        drawn.append(element("rect", element("title", f"{full}: {form.count(count)}"), class_="bar", **box))
        if index % every == 0:
            drawn.append(text_at(short, left + (index + 0.5) * room, bottom + 17))
    numbers = text_table(title, (x_title, y_title), [(full, form.count(count)) for _, full, count in bins])
    return Figure(title, [Panel(ident, title, description, frame, Markup().join(drawn))], numbers)


@dataclass(frozen=True)
class Reliability:
    """The accuracy of a head by confidence: for each seed, bins with confidence, accuracy and number of examples."""

    label: str  # of the head
    seeds: Sequence[tuple[int | None, Sequence[tuple[float, float, float]]]]
    error: float | None = None  # the calibration error, if known


def reliability_charts(ident: str, title: str, items: Sequence[Reliability], looks: Mapping[str, Style]) -> Figure:
    """Draw accuracy against confidence, a panel for each head and a line for each seed; on the diagonal, both agree."""
    frame = Frame(width=190, height=196, left=40, right=12, top=26, bottom=40)
    largest = max(value for item in items for _, bins in item.seeds for entry in bins for value in entry[:2])
    # All panels end at the same confidence, which may be below 1: with very many classes, confidences are low.
    limit = next((limit for limit in (0.1, 0.2, 0.4, 0.6) if largest <= limit), 1.0)
    whole = Axis("", form.percent, lambda value: form.percent(value, 0), low=0.0, high=limit)
    x, y = replace(whole, title="confidence"), replace(whole, title="accuracy")
    panels = []
    for index, item in enumerate(items):
        lines = [Line(item.label, tuple(Point(c, a, a, a) for c, a, _ in bins)) for _, bins in item.seeds]
        options = {"diagonal": True, "markers": True, "frame": frame, "tick_count": 3}
        chart = line_chart(f"{ident}-{index}", f"{item.label}: reliability", lines, looks, x, y, **options)
        error = "" if item.error is None else f"error {form.percent(item.error)}"
        described = _describe_reliability(item)
        panels.append(replace(chart.panels[0], description=described, heading=item.label, subheading=error))
    rows = [
        (item.label, form.MISSING if seed is None else str(seed), form.percent(c), form.percent(a), form.count(number))
        for item in items
        for seed, bins in item.seeds
        for c, a, number in bins
    ]
    numbers = text_table(title, ("head", "seed", "confidence", "accuracy", "examples"), rows)
    note = "Below the diagonal a head is more sure than it is right; on it, it is calibrated."
    return Figure(title, panels, numbers, note=note)


def _describe_reliability(item: Reliability) -> str:
    bins = [entry for _, entries in item.seeds for entry in entries]
    total = sum(number for _, _, number in bins) or 1
    gap = sum(number * (sure - right) for sure, right, number in bins) / total
    lean = "more sure than right" if gap > 0 else "less sure than right"
    text = f"{item.label} is on average {form.percent(abs(gap))} {lean}"
    return text + ("." if item.error is None else f"; its calibration error is {form.percent(item.error)}.")
