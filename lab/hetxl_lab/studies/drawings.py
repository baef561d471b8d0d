"""Draw the charts that only the studies have, with the parts of `hetxl_train.report.charts`: ranges and clouds; and
write charts as files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from markupsafe import Markup

from hetxl._files import write_bytes
from hetxl_train.report.charts import Figure, Panel, Style, marker
from hetxl_train.report.render import render
from hetxl_train.report.scales import CHARACTER, Axis, Frame, Scale, draw_axes, element, outline, text_at
from hetxl_train.report.tables import text_table


@dataclass(frozen=True)
class Range:
    """A value with its error to both sides, drawn in the look of a label."""

    label: str
    value: float
    error: float = 0.0


@dataclass(frozen=True)
class RangeRow:
    """A line of a range chart: its name and what is drawn beside it; a heading has nothing beside it."""

    name: str
    ranges: Sequence[Range] = ()
    heading: bool = False


def range_chart(
    ident: str,
    title: str,
    rows: Sequence[RangeRow],
    looks: Mapping[str, Style],
    x: Axis,
    *,
    levels: Sequence[float] = (),
    bars: bool = False,
    named: bool = True,
    width: float = 340,
    step: float = 22,
    heading: str = "",
    legend: bool = False,
) -> Figure:
    """Draw values with error bars beside the names of their rows, from the top down.

    Args:
        bars: whether bars reach from 0 to the values.
        named: whether the names of the rows are shown; panels to the right of the first one leave them out.
        width: of the plot without the names.
        step: height of a row.
    """
    names = max(len(row.name) * (7.5 if row.heading else 6.9) for row in rows) + 14 if named else 16.0
    frame = Frame(names + width, len(rows) * step + 58, names, 18, 8, 50)
    known = [entry for row in rows for entry in row.ranges]
    ends = [entry.value + sign * entry.error for entry in known for sign in (-1, 1)]
    across = x.scale([*ends, *levels, *([0.0] if bars else [])], frame.across, margin=0.05)
    bottom, ceiling = frame.up
    drawn = [draw_axes(frame, (across, x), None, (x.title, ""))]
    for value in levels:
        at = across.position(value)
        drawn.append(element("path", d=outline([(at, ceiling), (at, bottom)]), class_="reference"))
    described, numbers = [], []
    for index, row in enumerate(rows):
        middle = ceiling + (index + 0.5) * step
        if named and row.name:
            at, anchor, class_ = (2, "start", "row-heading") if row.heading else (names - 8, "end", "row-name")
            drawn.append(text_at(row.name, at, middle, anchor=anchor, class_=class_, dy="0.33em"))
        for order, entry in enumerate(row.ranges):
            y = middle + 0.66 * step * ((order + 0.5) / len(row.ranges) - 0.5)
            value = x.show(entry.value) + (f" ± {x.show(entry.error)}" if entry.error else "")
            drawn.append(_range(entry, looks[entry.label], across, y, bars, f"{row.name}: {value}"))
            described.append(f"{row.name}: {value}.")
            numbers.append((row.name, entry.label, value))
    panel = Panel(ident, title, " ".join(described), frame, Markup().join(drawn), heading)
    entries = [(label, looks[label]) for label in dict.fromkeys(entry.label for entry in known)] if legend else []
    return Figure(title, [panel], text_table(title, ("", "head", x.title), numbers), entries, lines=False)


def _range(entry: Range, style: Style, across: Scale, y: float, bars: bool, title: str) -> Markup:
    zero, at = across.position(0.0), across.position(entry.value)
    ends = [across.position(entry.value + sign * entry.error) for sign in (-1, 1)]
    drawn = Markup()
    if bars:
        box = {"x": min(zero, at), "y": y - 6, "width": abs(at - zero), "height": 12.0}
        drawn += element("rect", element("title", title), fill=style.colour, **box)
    if entry.error:
        caps = "".join(outline([(end, y - 3), (end, y + 3)]) for end in ends)
        look = {"class_": "spread"} if bars else {"class_": "whisker", "stroke": style.colour}
        drawn += element("path", d=outline([(end, y) for end in ends]) + caps, **look)
    return drawn if bars else drawn + marker(style, at, y, 3.6, title)


def cloud_chart(
    ident: str, title: str, points: Sequence[tuple[float, float]], style: Style, x: Axis, y: Axis
) -> Figure:
    """Draw thousands of points of one kind as a cloud, with the line where y equals x."""
    frame = Frame(width=250, height=260)
    across, up = x.scale([point[0] for point in points], frame.across), y.scale([p[1] for p in points], frame.up)
    diagonal = outline([(frame.across[0], frame.up[0]), (frame.across[1], frame.up[1])])
    # A path of dots is a tenth of the size of as many circles.
    dots = "".join(f"M{across.position(a):.1f} {up.position(b):.1f}h0" for a, b in points)
    content = (
        draw_axes(frame, (across, x), (up, y), (x.title, y.title))
        + element("path", d=diagonal, class_="reference")
        + element("path", d=dots or "M0 0", stroke=style.colour, class_="cloud")
    )
    return Figure(title, [Panel(ident, title, f"{len(points):,} points.", frame, content, title)])


def write_svg(figures: Figure | Sequence[Figure], path: Path) -> Path:
    """Write figures side by side, with one legend above them, as an SVG file; a label has the same look in all."""
    figures = [figures] if isinstance(figures, Figure) else list(figures)
    panels = [panel for figure in figures for panel in figure.panels]
    room = sum((panel.frame.width for panel in panels), 0.0)
    entries, x, y = [], 0.0, 0.0
    for label, width, sample in {entry[0]: entry for figure in figures for entry in figure.samples()}.values():
        across = width + 6 + CHARACTER * len(label) + 18
        if x and x + across > room:
            x, y = 0.0, y + 20
        entries.append((x, y, width, label, sample))
        x += across
    top = y + 30 if entries else 0.0
    top += 22 if any(panel.heading for panel in panels) else 0
    placed = list(zip(accumulate((panel.frame.width for panel in panels), initial=0.0), panels, strict=False))
    height = top + max(panel.frame.height for panel in panels)
    title = figures[0].title
    svg = render("figure.svg", title=title, width=room, height=height, top=top, entries=entries, panels=placed)
    write_bytes(path, svg.encode())
    return path
