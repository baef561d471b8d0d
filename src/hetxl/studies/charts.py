"""Pictures that several studies share: means with their errors as dots, and lines over a number."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl.report.statistics import mean
from hetxl.studies.plot import new_figure, save_figure

Group = tuple[str, Sequence[tuple[str, Sequence[float]]]]
"""A title, and rows of a label with values over seeds."""


def plot_dots(panels: Mapping[str, Sequence[Group]], path: Path) -> Path:
    """Means over seeds with their standard errors, one row each, in groups with a title; panels side by side.

    Args:
        panels: what each axis shows, and its groups; all panels have the same rows.
        path: of the picture; its ending says which kind.
    """
    rows = max(sum(bool(title) + len(lines) for title, lines in groups) for groups in panels.values())
    figure = new_figure(2.2 + 3.4 * len(panels), 0.9 + 0.24 * rows)
    axes_of = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (axis, groups) in zip(axes_of, panels.items(), strict=True):
        labels: list[str] = []
        titles: list[int] = []
        for number, (title, lines) in enumerate(groups):
            if title:
                titles.append(len(labels))
                labels.append(title)
            found = [mean(values) if values else None for _, values in lines]
            known = [place for place, one in enumerate(found) if one is not None]
            shown = [one for one in found if one is not None]
            axes.errorbar(
                [one.value for one in shown],
                [len(labels) + place for place in known],
                xerr=[one.error or 0.0 for one in shown],
                fmt="o",
                markersize=4,
                capsize=2,
                color=f"C{number % 10}",
            )
            labels += [label for label, _ in lines]
        first = axes is axes_of[0]
        axes.set_yticks(range(len(labels)), labels if first else [""] * len(labels), fontsize="small")
        for place in titles:
            axes.get_yticklabels()[place].set_fontweight("bold")
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlabel(axis, fontsize="small")
        axes.grid(axis="x", linewidth=0.4, color="0.85")
    return save_figure(figure, path)


STYLES = ("-", "--", ":", "-.")
"""Of lines that share a colour."""

Series = Mapping[str, Sequence[tuple[float, Sequence[float]]]]
"""By label, places on the axis with values over seeds."""


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
    """Lines over a number, means with bands of their standard errors; panels side by side.

    Lines whose labels are alike up to a comma, as in "HET" and "HET, the paper's", share a colour.

    Args:
        panels: what each vertical axis shows, and its lines.
        path: of the picture; its ending says which kind.
        axis: what the number is.
        log_x: whether its axis is logarithmic.
        log_y: names of panels whose vertical axis is.
        levels: of a panel, horizontal lines by label, such as a reference.
        marked: whether places have a mark.
    """
    long = sum(len(series) > 3 for series in panels.values())
    figure = new_figure(4.3 * len(panels) + 1.6 * long, 3.3)
    axes_of = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, series) in zip(axes_of, panels.items(), strict=True):
        colours: dict[str, str] = {}
        drawn: list[str] = []
        for label, points in series.items():
            known = [(place, mean(values)) for place, values in points if values]
            places = [place for place, _ in known]
            centres = [found.value for _, found in known]
            errors = [found.error or 0.0 for _, found in known]
            head = label.partition(",")[0]
            colour = colours.setdefault(head, f"C{len(colours) % 10}")
            style = STYLES[drawn.count(head) % len(STYLES)]
            drawn.append(head)
            axes.plot(places, centres, f"o{style}" if marked else style, markersize=4, color=colour, label=label)
            if any(errors):
                low, high = ([c + s * e for c, e in zip(centres, errors, strict=True)] for s in (-1, 1))
                axes.fill_between(places, low, high, alpha=0.2, linewidth=0, color=colour)
        for number, (label, level) in enumerate((levels or {}).get(name, {}).items()):
            style = ("--", ":", "-.")[number % 3]
            axes.axhline(level, color="0.3", linewidth=1, linestyle=style, label=label)
        if log_x:
            axes.set_xscale("log")
            ticks = sorted({place for points in series.values() for place, _ in points})
            axes.set_xticks(ticks, [f"{place:,g}" for place in ticks], fontsize="small")
            axes.set_xticks([], minor=True)
        if name in log_y:
            axes.set_yscale("log")
        axes.set_xlabel(axis, fontsize="small")
        axes.set_ylabel(name, fontsize="small")
        axes.grid(linewidth=0.4, color="0.85")
        _legend(axes)
    return save_figure(figure, path)


def _legend(axes: Any) -> None:
    """Beside what is drawn, never on it: above where it is short, to the right where it is long."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(labels)}
    if len(labels) > 3:
        place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend(frameon=False, fontsize="small", **place)
