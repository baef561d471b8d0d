"""The frame that all plots share: axes, text alternatives, legend, and the numbers as a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetxl.report import format as form
from hetxl.report.markup import Child, Markup, coordinate, join, tag
from hetxl.report.render import scrolling
from hetxl.report.scales import Scale, thin

TABLE_ROWS = 40
"""A table beneath a plot has at most so many rows."""


@dataclass(frozen=True)
class Frame:
    """The drawing area of a plot, in units that are about the pixels of a phone.

    Attributes:
        width: of the whole drawing.
        height: of the whole drawing.
        left: room for the values of the y axis.
        right: room beyond the plot.
        top: room for the title of the y axis.
        bottom: room for the values and the title of the x axis.
    """

    width: float = 400
    height: float = 260
    left: float = 52
    right: float = 18
    top: float = 30
    bottom: float = 44

    @property
    def across(self) -> tuple[float, float]:
        """Where the x axis starts and ends."""
        return self.left, self.width - self.right

    @property
    def up(self) -> tuple[float, float]:
        """Where the y axis starts, at the bottom, and ends."""
        return self.height - self.bottom, self.top


@dataclass(frozen=True)
class DataTable:
    """The numbers of a plot.

    Attributes:
        header: names of the columns.
        rows: as text; the first column is that of the x axis.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def axes(
    frame: Frame,
    x: Scale | None,
    y: Scale,
    x_title: str,
    y_title: str,
    *,
    x_format: Callable[[float], str] = form.tick,
    y_format: Callable[[float], str] = form.tick,
) -> Markup:
    """Grid lines, ticks and titles.

    Args:
        frame: the drawing area.
        x: the scale across; None where the plot names its own places.
        y: the scale upwards.
        x_title: what x is, with its unit.
        y_title: what y is, with its unit; above the axis, where it can be read without turning the head.
        x_format: a value of x as text.
        y_format: a value of y as text.
    """
    parts = []
    (left, right), (bottom, _) = frame.across, frame.up
    for value in y.ticks:
        at = coordinate(y.place(value))
        parts.append(tag("path", d=f"M{coordinate(left)} {at}H{coordinate(right)}", class_="grid"))
        parts.append(
            tag("text", y_format(value), x=coordinate(left - 6), y=at, dy="0.33em", class_="tick", text_anchor="end")
        )
    parts.append(tag("path", d=f"M{coordinate(left)} {coordinate(bottom)}H{coordinate(right)}", class_="axis"))
    for value in () if x is None else _apart(x, x_format):
        at = coordinate(x.place(value)) if x else "0"
        parts.append(tag("path", d=f"M{at} {coordinate(bottom)}v4", class_="axis"))
        parts.append(tag("text", x_format(value), x=at, y=coordinate(bottom + 17), class_="tick", text_anchor="middle"))
    parts.append(tag("text", y_title, x=0, y=13, class_="axis-title"))
    parts.append(
        tag(
            "text", x_title, x=coordinate(right), y=coordinate(frame.height - 7), class_="axis-title", text_anchor="end"
        )
    )
    return join(parts)


def drawing(ident: str, title: str, description: str, frame: Frame, *content: Child) -> Markup:
    """An SVG that says in words what it shows.

    Args:
        ident: unlike any other on the page.
        title: what it is.
        description: what is to be seen in it, with numbers.
        frame: its size.
        content: what is drawn.
    """
    return tag(
        "svg",
        tag("title", title, id=f"{ident}-title"),
        tag("desc", description, id=f"{ident}-desc"),
        *content,
        id=ident,
        class_="plot",
        viewbox=f"0 0 {coordinate(frame.width)} {coordinate(frame.height)}",
        role="img",
        aria_labelledby=f"{ident}-title {ident}-desc",
    )


def figure(title: str, content: Markup, table: DataTable, *, legend: Markup | None = None, note: str = "") -> Markup:
    """A plot with its title, legend and numbers.

    Args:
        title: what it is.
        content: one drawing or several.
        table: the numbers in it.
        legend: what belongs to whom.
        note: what a reader should know, beneath the plot.
    """
    return tag(
        "figure",
        tag("figcaption", title),
        legend,
        content,
        tag("p", note, class_="note") if note else None,
        data_details(title, table),
    )


def data_details(title: str, table: DataTable) -> Markup:
    """The numbers of a plot as a table, folded away. A long one keeps evenly spread rows and says so."""
    kept = thin(range(len(table.rows)), TABLE_ROWS)
    head = tag("tr", *(tag("th", name, scope="col") for name in table.header))
    rows = [
        tag("tr", tag("th", table.rows[index][0], scope="row"), *(tag("td", text) for text in table.rows[index][1:]))
        for index in kept
    ]
    cut = None
    if len(kept) < len(table.rows):
        cut = tag("p", f"{len(kept)} of {len(table.rows):,} points, evenly spread.", class_="note")
    body = tag("table", tag("thead", head), tag("tbody", *rows))
    return tag("details", tag("summary", "Numbers"), scrolling(body, f"{title}: numbers"), cut)


def _apart(axis: Scale, show: Callable[[float], str], character: float = 7.2) -> list[float]:
    """The ticks whose texts do not touch, from the left."""
    kept: list[float] = []
    edge = -1e9
    for value in axis.ticks:
        half = len(show(value)) * character / 2
        if axis.place(value) - half > edge:
            kept.append(value)
            edge = axis.place(value) + half + 6
    return kept
