"""Measured values beside their bars, as tables and figures in a page of the documentation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Verdict = Literal["stretch", "pass", "fail"]


@dataclass(frozen=True)
class Bar:
    """The value that must be reached, and a better one to aim for.

    Attributes:
        value: the bar.
        stretch: the better value, or None.
        at_least: whether values must lie above, as speed-ups do, or below, as costs do.
        unit: "×", "%" (of a share) or "MB"
    """

    value: float
    stretch: float | None = None
    at_least: bool = False
    unit: str = "×"

    def verdict(self, measured: float) -> Verdict:
        """Return whether a measured value reaches the bar, the stretch or neither."""
        if not self._reached(measured, self.value):
            return "fail"
        return "stretch" if self.stretch is not None and self._reached(measured, self.stretch) else "pass"

    def _reached(self, measured: float, value: float) -> bool:
        return measured >= value if self.at_least else measured <= value

    def limit(self, value: float | None) -> str:
        """Return a bar as text, such as "≥ 10×"."""
        return "" if value is None else f"{'≥' if self.at_least else '≤'} {amount(value, self.unit)}"


def amount(value: float, unit: str) -> str:
    """Return a value with its unit, to about three digits."""
    if unit == "×":
        return f"{value:.3g}×" if abs(value) < 100 else f"{value:,.0f}×"
    if unit == "%":
        return f"{100 * value:.3g} %"
    if unit == "MB":
        return f"{value:,.0f} MB"
    return f"{value:.2g}{unit}"


@dataclass(frozen=True)
class Row:
    """A measured value beside its bar.

    Attributes:
        name: name of the measure.
        measured: the value.
        bar: value to reach.
        detail: the times or sizes behind the value.
    """

    name: str
    measured: float
    bar: Bar
    detail: str

    @property
    def verdict(self) -> Verdict:
        """Return whether the bar is reached."""
        return self.bar.verdict(self.measured)

    def cells(self) -> list[str]:
        """Return the cells of the row, under `HEADER`."""
        return [
            self.name,
            self.detail,
            amount(self.measured, self.bar.unit),
            self.bar.limit(self.bar.value),
            self.bar.limit(self.bar.stretch),
            self.verdict,
        ]


HEADER = ("measure", "behind it", "measured", "bar", "stretch", "result")


def missed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that do not reach their bar."""
    return [row for row in rows if row.verdict == "fail"]


def markers(script: str) -> tuple[str, str]:
    """Return the two comments around the measurements of a script of benchmarks/ in a page."""
    return f"<!-- measured by benchmarks/{script}: start -->", f"<!-- measured by benchmarks/{script}: end -->"


def replace_between(text: str, new: str, script: str) -> str:
    """Replace the part of a text between the two markers of a script."""
    start, end = markers(script)
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"The page must hold each of these markers once: {start} {end}")
    return f"{text.split(start)[0]}{start}\n\n{new}\n\n{end}{text.split(end)[1]}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a markdown table; the first `left` columns are words, the others numbers."""
    rules = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rules, *rows))


def plot_panels(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[float | None]]], samples: Sequence[int], axis: str
) -> None:
    """Draw values against the number of samples, both axes logarithmic, panels side by side on one scale.

    Args:
        path: of the SVG file.
        panels: by title, values by label, one for each number of samples, None if left out.
        samples: S.
        axis: title of the axis of values.
    """
    # Imported here, because `_against.py` uses the measures with library versions that do not have these modules.
    from hetxl_lab.studies.drawings import write_svg
    from hetxl_train.report.charts import Axis, Line, Point, line_chart, styles

    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    looks = {label: replace(style, dash=None) for label, style in styles(labels).items()}
    known = [value for lines in panels.values() for values in lines.values() for value in values if value is not None]
    x = Axis("samples S", log=True, ticks=samples)
    y = Axis(axis, log=True, low=min(known) / 1.15, high=max(known) * 1.15)
    figures = []
    for number, (title, lines) in enumerate(panels.items()):
        drawn = [
            Line(label, tuple(Point(s, v, v, v) for s, v in zip(samples, values, strict=True) if v is not None))
            for label, values in lines.items()
        ]
        chart = line_chart(f"panel-{number}", title, drawn, looks, x, y)
        figures.append(replace(chart, panels=[replace(chart.panels[0], heading=title)]))
    write_svg(figures, path)
