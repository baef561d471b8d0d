"""A study at a glance: differences in every setting, with their 95 % intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl.report.statistics import PairedTest, two_sided_p
from hetxl.studies.summary import BASELINE, Summary, judge


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib; where that is missing, an error that says so, worth asking for before a study."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure; the ending of the path says as which kind of picture."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    # Neither the date nor random names: the same numbers give the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """t with P(|T| ≤ t) = level for Student's t distribution, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > 1 - level else (low, middle)
    return (low + high) / 2


def half_width(test: PairedTest) -> float:
    """Half the 95 % interval of a difference; 0 for a single pair, of which nothing is known."""
    return 0.0 if test.error is None else test.error * t_quantile(test.pairs - 1)


def plot_groups(groups: Sequence[tuple[str, Sequence[tuple[str, PairedTest]]]], path: Path, axis: str) -> Path:
    """Differences as dots with their 95 % intervals, one row each, in groups with a title.

    Args:
        groups: a title and its rows: labels and differences, from the top down.
        path: of the picture; its ending says which kind.
        axis: what the differences are.
    """
    figure = new_figure(8.0, 0.9 + 0.22 * sum(1 + len(rows) for _, rows in groups))
    axes = figure.add_subplot()
    axes.axvline(0, color="0.4", linewidth=1)
    labels: list[str] = []
    titles: list[int] = []
    for number, (title, rows) in enumerate(groups):
        titles.append(len(labels))
        labels.append(title)
        axes.errorbar(
            [test.difference for _, test in rows],
            range(len(labels), len(labels) + len(rows)),
            xerr=[half_width(test) for _, test in rows],
            fmt="o",
            markersize=4,
            capsize=2,
            color=f"C{number % 10}",
        )
        labels += [label for label, _ in rows]
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    for place in titles:
        axes.get_yticklabels()[place].set_fontweight("bold")
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(axis, fontsize="small")
    return save_figure(figure, path)


def plot_differences(
    summaries: Sequence[Summary], path: Path, panels: Mapping[str, Sequence[tuple[str, str]]] | None = None
) -> Path:
    """Test NLL of heads less that of others, one row for each setting, written as a picture.

    Args:
        summaries: of the settings, from the top down.
        path: of the picture; its ending says which kind.
        panels: pairs of labels, the head and what it is compared with, by a title; each panel has a scale of its own.
            Pairs that a setting does not have are left out there. HET-XL against DET without.
    """
    panels = {"": [("HET-XL", BASELINE)]} if panels is None else panels
    figure = new_figure(4.5 + 3.0 * len(panels), 1.2 + 0.42 * len(summaries))
    for place, (title, pairs) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        axes.axvline(0, color="0.4", linewidth=1)
        for number, (head, baseline) in enumerate(pairs):
            centres, places, widths = [], [], []
            for row, summary in enumerate(summaries):
                if not {head, baseline} <= set(summary["heads"]):
                    continue
                test = judge(summary, head, baseline).nll
                centres.append(test.difference)
                places.append(row + 0.6 * ((number + 0.5) / len(pairs) - 0.5))
                widths.append(half_width(test))
            axes.errorbar(centres, places, xerr=widths, fmt="o", markersize=4, capsize=2, label=head)
        settings = [str(summary["setting"]) for summary in summaries]
        axes.set_yticks(range(len(settings)), settings if place == 0 else [""] * len(settings))
        axes.set_ylim(len(settings) - 0.5, -0.5)
        axes.set_title(title, fontsize="small")
        if len(pairs) > 1:
            axes.legend(frameon=False, fontsize="small")
    figure.supxlabel(
        "difference of test NLL, paired over seeds, with 95 % intervals (left of 0 is better)", fontsize="small"
    )
    return save_figure(figure, path)
