"""One look for each head, the same in every plot: a colour, a dash and a marker, any one of which tells it apart.

The colours are variables of the style sheet, chosen to be told apart by colour-blind eyes on light and dark pages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetxl.report.markup import Markup, coordinate, tag

COLOURS = 8
"""How many `--series-…` variables the style sheet has."""
DASHES = (None, None, "7 3", "2 3", "9 3 2 3", "5 5", "12 4", "1 4")
MARKERS = ("square", "circle", "triangle", "diamond", "cross", "plus", "down", "star")
_NAMES = (
    "DET",
    "HET-XL",
    "HET",
    "HET-H",
    "DET + temperature scaling",
    "DET + label smoothing",
    "HET-XL + scaling",
)
KNOWN = {name: place for place, name in enumerate(_NAMES)}
"""Heads that look the same in every report."""


@dataclass(frozen=True)
class Style:
    """How one head is drawn.

    Attributes:
        colour: CSS for it.
        dash: of lines, None for a full line.
        marker: of points.
    """

    colour: str
    dash: str | None
    marker: str


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """The look of each label: fixed for the heads of the paper, by order for the others."""
    rest = [label for label in labels if label not in KNOWN]
    places = {label: KNOWN[label] if label in KNOWN else len(KNOWN) + rest.index(label) for label in labels}
    found = {}
    for label, place in places.items():
        # Past the last colour, colours repeat with other dashes and markers.
        turn = place // COLOURS
        dash, marker = DASHES[(place + 3 * turn) % COLOURS], MARKERS[(place + 3 * turn) % COLOURS]
        found[label] = Style(f"var(--series-{place % COLOURS})", dash, marker)
    return found


def marker(style: Style, x: float, y: float, size: float = 4, title: str | None = None, **attributes: object) -> Markup:
    """A point.

    Args:
        style: its look.
        x: across.
        y: down.
        size: its half width.
        title: what is said of it when it is pointed at.
        attributes: more of them.
    """
    note = tag("title", title) if title else None
    if style.marker == "circle":
        circle = {"cx": coordinate(x), "cy": coordinate(y), "r": coordinate(size)}
        return tag("circle", note, fill=style.colour, **(circle | attributes))
    if style.marker in ("cross", "plus"):
        turn = math.pi / 4 if style.marker == "cross" else 0.0
        arms = [turn + quarter * math.pi / 2 for quarter in range(4)]
        ends = [(x + 1.2 * size * math.cos(arm), y + 1.2 * size * math.sin(arm)) for arm in arms]
        path = "".join(f"M{coordinate(x)} {coordinate(y)}L{coordinate(a)} {coordinate(b)}" for a, b in ends)
        return tag("path", note, d=path, fill="none", stroke=style.colour, stroke_width="2.5", **attributes)
    shapes = {"square": (4, math.pi / 4, 1.25), "triangle": (3, -math.pi / 2, 1.3), "diamond": (4, 0.0, 1.35)}
    shapes |= {"down": (3, math.pi / 2, 1.3), "star": (5, -math.pi / 2, 1.4)}
    corners, turn, scale = shapes[style.marker]
    radii = [scale * size] * corners
    if style.marker == "star":
        corners, radii = 10, [scale * size, 0.55 * size] * 5
    angles = [turn + corner * 2 * math.pi / corners for corner in range(corners)]
    points = [(x + r * math.cos(angle), y + r * math.sin(angle)) for r, angle in zip(radii, angles, strict=True)]
    path = "M" + "L".join(f"{coordinate(a)} {coordinate(b)}" for a, b in points) + "Z"
    return tag("path", note, d=path, fill=style.colour, **attributes)


def legend(entries: Sequence[tuple[str, Style]], *, lines: bool = True) -> Markup:
    """What belongs to whom, as a list with a sample of each look.

    Args:
        entries: labels and their looks.
        lines: whether the plot has lines; else the marker alone is shown.
    """
    items = []
    for label, style in entries:
        line = None
        if lines:
            line = tag(
                "path", d="M1 7H31", fill="none", stroke=style.colour, stroke_width=2, stroke_dasharray=style.dash
            )
        width = 32 if lines else 14
        sample = tag(
            "svg",
            line,
            marker(style, width / 2, 7),
            width=width,
            height=14,
            viewbox=f"0 0 {width} 14",
            aria_hidden="true",
        )
        items.append(tag("li", sample, " ", label))
    return tag("ul", *items, class_="legend")
