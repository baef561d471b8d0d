"""Plots of bars, and the small reliability diagrams."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetxl.report import format as form
from hetxl.report.figure import DataTable, Frame, axes, drawing, figure
from hetxl.report.markup import Markup, coordinate, join, tag
from hetxl.report.palette import Style, legend, marker
from hetxl.report.scales import Scale, scale
from hetxl.report.statistics import Mean


def grouped_bars(
    ident: str,
    title: str,
    categories: Sequence[str],
    values: Mapping[str, Sequence[Mean | None]],
    looks: Mapping[str, Style],
    y_title: str,
    x_title: str,
) -> Markup:
    """Shares by category, one bar for each label, with its standard error.

    Args:
        ident: unlike any other on the page.
        title: what it is.
        categories: across.
        values: for each label one share for each category, None where there is none.
        looks: how each label is drawn.
        y_title: what the shares are.
        x_title: what the categories are.
    """
    frame = Frame()
    known = [value for row in values.values() for value in row if value is not None]
    up = scale([value.value + (value.error or 0) for value in known], *frame.up, low=0.0, margin=0.06)
    (left, right), (bottom, _) = frame.across, frame.up
    room = (right - left) / len(categories)
    width = min(0.8 * room / len(values), 48)
    drawn = []
    for place, category in enumerate(categories):
        middle = left + (place + 0.5) * room
        drawn.append(
            tag("text", category, x=coordinate(middle), y=coordinate(bottom + 17), class_="tick", text_anchor="middle")
        )
        for order, (label, row) in enumerate(values.items()):
            value = row[place]
            if value is None:
                continue
            start = middle + (order - len(values) / 2) * width
            drawn.append(_bar(start, width, value, looks[label], up, f"{label}, {category}: {_share(value)}"))
    told = [
        f"{label}: {form.listed([f'{_share(value)} {name}' for name, value in zip(categories, row, strict=True)])}."
        for label, row in values.items()
    ]
    rows = [(label, *(_share(value) for value in row)) for label, row in values.items()]
    frame_parts = axes(frame, None, up, x_title, y_title, y_format=lambda value: form.percent(value, 0))
    return figure(
        title,
        drawing(ident, title, " ".join(told), frame, frame_parts, *drawn),
        DataTable(("head", *categories), rows),
        legend=legend([(label, looks[label]) for label in values], lines=False),
    )


def histogram(
    ident: str, title: str, bins: Sequence[tuple[str, str, float]], x_title: str, y_title: str, told: str
) -> Markup:
    """Counts by bin.

    Args:
        ident: unlike any other on the page.
        title: what it is.
        bins: the short name of each bin, its full name, and its count.
        x_title: what the bins are of.
        y_title: what is counted.
        told: what is to be seen.
    """
    frame = Frame()
    up = scale([count for _, _, count in bins], *frame.up, low=0.0, margin=0.06)
    (left, right), (bottom, _) = frame.across, frame.up
    room = (right - left) / len(bins)
    widest = max(len(short) for short, _, _ in bins) * 7.2 + 6
    every = max(1, -int(-widest // room))
    drawn = []
    for place, (short, full, count) in enumerate(bins):
        start, top = left + (place + 0.08) * room, up.place(count)
        box = {"x": start, "y": top, "width": 0.84 * room, "height": bottom - top}
        size = {key: coordinate(value) for key, value in box.items()}
        drawn.append(tag("rect", tag("title", f"{full}: {form.count(count)}"), class_="bar", **size))
        if place % every == 0:
            at = coordinate(left + (place + 0.5) * room)
            drawn.append(tag("text", short, x=at, y=coordinate(bottom + 17), class_="tick", text_anchor="middle"))
    rows = [(full, form.count(count)) for _, full, count in bins]
    return figure(
        title,
        drawing(ident, title, told, frame, axes(frame, None, up, x_title, y_title), *drawn),
        DataTable((x_title, y_title), rows),
    )


@dataclass(frozen=True)
class Reliability:
    """How often a head is right when it is so sure.

    Attributes:
        label: whose it is.
        seeds: for each seed, its bins: confidence, accuracy and number of examples.
        error: its calibration error, if known.
    """

    label: str
    seeds: Sequence[tuple[int | None, Sequence[tuple[float, float, float]]]]
    error: float | None = None


def reliability_charts(ident: str, title: str, items: Sequence[Reliability], looks: Mapping[str, Style]) -> Markup:
    """Small diagrams side by side: accuracy against confidence, a line for each seed, on the diagonal when calibrated.

    Args:
        ident: unlike any other on the page.
        title: what they are.
        items: one for each diagram.
        looks: how each label is drawn.
    """
    frame = Frame(width=190, height=196, left=40, right=12, top=26, bottom=40)
    limit = _limit([value for item in items for _, bins in item.seeds for entry in bins for value in entry[:2]])
    diagrams = []
    for place, item in enumerate(items):
        name = f"{ident}-{place}"
        content = _reliability(item, looks[item.label], frame, limit)
        heading = tag("p", item.label, tag("span", _error(item), class_="error"), class_="panel-title")
        said = f"{item.label}: reliability"
        diagrams.append(
            tag("div", heading, drawing(name, said, _told_reliability(item), frame, content), class_="panel")
        )
    rows = [
        (
            item.label,
            form.MISSING if seed is None else str(seed),
            form.percent(sure),
            form.percent(right),
            form.count(number),
        )
        for item in items
        for seed, bins in item.seeds
        for sure, right, number in bins
    ]
    return figure(
        title,
        tag("div", *diagrams, class_="panels"),
        DataTable(("head", "seed", "confidence", "accuracy", "examples"), rows),
        note="Below the diagonal a head is more sure than it is right; on it, it is calibrated.",
    )


def _bar(start: float, width: float, value: Mean, style: Style, up: Scale, said: str) -> Markup:
    top, bottom, middle = up.place(value.value), up.start, start + width / 2
    box = {"x": start + 1, "y": top, "width": max(width - 2, 1), "height": bottom - top}
    size = {key: coordinate(length) for key, length in box.items()}
    parts = [tag("rect", tag("title", said), fill=style.colour, **size)]
    if width > 12 and bottom - top > 16:  # the marker tells bars apart without their colour
        inside = Style("var(--page)", None, style.marker)
        parts.append(marker(inside, middle, bottom - 8, min(3.5, width / 5)))
    if value.error:
        ends = up.place(value.value - value.error), up.place(value.value + value.error)
        parts.append(
            tag("path", d=f"M{coordinate(middle)} {coordinate(ends[0])}V{coordinate(ends[1])}", class_="spread")
        )
    return join(parts)


def _share(value: Mean | None) -> str:
    if value is None:
        return form.MISSING
    return form.percent(value.value) + (f" ± {form.percent(value.error)}" if value.error else "")


def _limit(values: Sequence[float]) -> float:
    """Where both axes end, the same in all diagrams: with very many classes, heads are seldom sure."""
    return next((limit for limit in (0.1, 0.2, 0.4, 0.6) if max(values) <= limit), 1.0)


def _reliability(item: Reliability, style: Style, frame: Frame, limit: float) -> Markup:
    across = scale((), *frame.across, low=0.0, high=limit, count=3)
    up = scale((), *frame.up, low=0.0, high=limit, count=3)
    corner = [coordinate(value) for value in (frame.across[0], frame.up[0], frame.across[1], frame.up[1])]
    drawn = [
        axes(frame, across, up, "confidence", "accuracy", x_format=_whole_percent, y_format=_whole_percent),
        tag("path", d=f"M{corner[0]} {corner[1]}L{corner[2]} {corner[3]}", class_="reference"),
    ]
    for _, bins in item.seeds:
        places = [(across.place(sure), up.place(right)) for sure, right, _ in bins]
        path = "M" + "L".join(f"{coordinate(a)} {coordinate(b)}" for a, b in places)
        drawn.append(tag("path", d=path, stroke=style.colour, class_="line thin"))
        drawn += [marker(style, a, b, 2.4) for a, b in places]
    return join(drawn)


def _whole_percent(value: float) -> str:
    return form.percent(value, 0)


def _error(item: Reliability) -> str:
    return "" if item.error is None else f" error {form.percent(item.error)}"


def _told_reliability(item: Reliability) -> str:
    bins = [entry for _, entries in item.seeds for entry in entries]
    total = sum(number for _, _, number in bins) or 1
    gap = sum(number * (sure - right) for sure, right, number in bins) / total
    lean = "more sure than right" if gap > 0 else "less sure than right"
    said = f"{item.label} is on average {form.percent(abs(gap))} {lean}"
    return said + ("." if item.error is None else f"; its calibration error is {form.percent(item.error)}.")
