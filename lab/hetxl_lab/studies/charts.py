"""Draw the charts that several studies share, as SVG files: ranges over seeds, differences, lines and recovery."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hetxl_lab.studies.drawings import Range, RangeRow, cloud_chart, range_chart, write_svg
from hetxl_lab.studies.verdicts import BASELINE, Summary, half_width, judge
from hetxl_train.report.charts import DASHES, KNOWN, Axis, Line, Point, Style, line_chart, styles
from hetxl_train.report.statistics import PairedTest, mean

Group = tuple[str, Sequence[tuple[str, Sequence[float]]]]  # a title, and rows of a label with values over seeds
Series = Mapping[str, Sequence[tuple[float, Sequence[float]]]]  # by label, positions on the axis with values over seeds


def plot_dots(panels: Mapping[str, Sequence[Group]], path: Path) -> Path:
    """Draw means over seeds with their standard errors, one row each, in groups with a title.

    Panels stand side by side: what each axis shows, and its groups; all have the same rows.
    """
    figures = []
    for number, (axis, groups) in enumerate(panels.items()):
        rows = []
        for title, members in groups:
            rows += [RangeRow(title, heading=True)] if title else []
            averages = [(label, mean(values) if values else None) for label, values in members]
            rows += [RangeRow(k, [Range(head_of(k), m.value, m.error or 0.0)] if m else []) for k, m in averages]
        looks = styles(head_of(row.name) for row in rows)
        figures.append(range_chart(f"dots-{number}", axis, rows, looks, Axis(axis), named=number == 0))
    return write_svg(figures, path)


def plot_groups(groups: Sequence[tuple[str, Sequence[tuple[str, PairedTest]]]], path: Path, axis: str) -> Path:
    """Draw differences as dots with their 95 % intervals, one row each from the top down, in groups with a title."""
    rows = []
    for title, members in groups:
        rows.append(RangeRow(title, heading=True))
        rows += [RangeRow(k, [Range(head_of(k), test.difference, half_width(test))]) for k, test in members]
    looks = styles(head_of(row.name) for row in rows)
    width = max(440.0, 7.0 * len(axis) - 100)
    return write_svg(range_chart("groups", axis, rows, looks, Axis(axis), levels=[0.0], width=width), path)


def plot_differences(
    summaries: Sequence[Summary], path: Path, panels: Mapping[str, Sequence[tuple[str, str]]] | None = None
) -> Path:
    """Draw the test NLL of heads less that of others with 95 % intervals, one row for each setting from the top down.

    `panels` has by title pairs of labels, the head and what it is compared with (by default HET-XL and DET); each panel
    has its own scale. Pairs that a setting does not have are left out.
    """
    panels = {"": [("HET-XL", BASELINE)]} if panels is None else panels
    looks = styles({head: None for pairs in panels.values() for head, _ in pairs})
    axis = Axis("difference of test NLL, 95 % intervals: left is better")
    figures = []
    for number, (title, pairs) in enumerate(panels.items()):
        rows = []
        for summary in summaries:
            known = [(head, base) for head, base in pairs if {head, base} <= set(summary["heads"])]
            tests = {head: judge(summary, head, base).nll for head, base in known}
            ranges = [Range(head, test.difference, half_width(test)) for head, test in tests.items()]
            rows.append(RangeRow(str(summary["setting"]), ranges))
        options = {"levels": [0.0], "named": number == 0, "width": 380, "heading": title, "legend": len(looks) > 1}
        options["step"] = 34.0 if any(len(pairs) > 1 for pairs in panels.values()) else 22.0
        figures.append(range_chart(f"differences-{number}", title, rows, looks, axis, **options))
    return write_svg(figures, path)


def plot_lines(
    panels: Mapping[str, Series],
    path: Path,
    axis: str,
    *,
    log_x: bool = False,
    log_y: Sequence[str] = (),
    levels: Mapping[str, Mapping[str, float]] | None = None,
    marked: bool = True,
) -> Path:
    """Draw lines over a number, means with bands of their standard errors; panels side by side.

    Lines whose labels are alike up to a comma, as in "HET" and "HET, the paper's", share a colour.

    Args:
        log_y: names of panels whose vertical axis is.
        levels: of a panel, horizontal lines by label, such as a reference.
    """
    looks = line_styles([label for series in panels.values() for label in series])
    figures = []
    for number, (name, series) in enumerate(panels.items()):
        lines = [line for label, points in series.items() if (line := _line(label, points)).points]
        ticks = sorted({point.x for line in lines for point in line.points}) if log_x else None
        x = Axis(axis, tick=lambda value: f"{value:,g}", log=log_x, ticks=ticks)
        y = Axis(name, log=name in log_y)
        extra = {"levels": (levels or {}).get(name), "markers": marked}
        figures.append(line_chart(f"lines-{number}", name, lines, looks, x, y, **extra))
    return write_svg(figures, path)


def plot_recovery(summary: Summary, points: Mapping[str, tuple[np.ndarray, np.ndarray]], path: Path) -> Path:
    """Draw learned against true correlations for each head with noise, and the NLL gap that each closes.

    `points` has by label the true and the learned correlations, each [m].
    """
    looks = styles(summary["heads"])
    x, y = (Axis(f"{kind} correlation", low=-1.0, high=1.0) for kind in ("true", "learned"))
    figures = []
    for number, (label, (true, learned)) in enumerate(points.items()):
        agreement = mean(summary["heads"][label]["agreement"]["pearson"]).value
        title = f"{label}: r = {agreement:.2f}".replace("-0", "−0")
        pairs = list(zip(true.tolist(), learned.tolist(), strict=True))
        figures.append(cloud_chart(f"cloud-{number}", title, pairs, looks[label], x, y))
    closed = {label: mean(values["gap_closed"]) for label, values in summary["heads"].items() if label != "DET"}
    rows = [RangeRow(k, [Range(k, 100 * gap.value, 100 * (gap.error or 0.0))]) for k, gap in closed.items()]
    axis = Axis("% of the NLL gap between DET and the true model")
    figures.append(range_chart("gap", axis.title, rows, looks, axis, levels=[100.0], bars=True, heading="gap closed"))
    return write_svg(figures, path)


def head_of(label: str) -> str:
    """Return the head that a label begins with, for its colour; HET-XL, whose options the studies vary, for others."""
    heads = [head for head in KNOWN if label == head or label.startswith((f"{head},", f"{head} "))]
    return max(heads, key=len, default="HET-XL")


def line_styles(labels: Sequence[str]) -> dict[str, Style]:
    """Return the look of lines: one colour up to the comma of a label, and a dash for each line of that colour."""
    heads = list(dict.fromkeys(label.partition(",")[0] for label in labels))
    colours, looks = styles(heads), {}
    for label in labels:
        head = label.partition(",")[0]
        same = [other for other in looks if other.partition(",")[0] == head]
        looks.setdefault(label, replace(colours[head], dash=DASHES[len(same) and 1 + len(same)]))
    return looks


def _line(label: str, points: Sequence[tuple[float, Sequence[float]]]) -> Line:
    averages = [(x, mean(values)) for x, values in points if values]
    seeds = max((average.number for _, average in averages), default=1)
    band = (Point(x, m.value, m.value - (m.error or 0.0), m.value + (m.error or 0.0)) for x, m in averages)
    return Line(label, tuple(band), seeds)
