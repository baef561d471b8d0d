"""A study at a glance: the differences to DET in every setting, with their 95 % intervals."""

from collections.abc import Sequence
from pathlib import Path

from hetxl.report.statistics import two_sided_p
from hetxl.studies.summary import Summary, judge


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """t with P(|T| ≤ t) = level for Student's t distribution, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > 1 - level else (low, middle)
    return (low + high) / 2


def plot_differences(summaries: Sequence[Summary], path: Path, heads: Sequence[str] = ("HET-XL",)) -> Path:
    """Test NLL of heads less that of DET, one row for each setting, written as a picture.

    Args:
        summaries: of the settings, from the top down.
        path: of the picture; its ending says which kind.
        heads: labels; those that a setting does not have are left out there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'hetxl[plots]'") from None
    figure = Figure(figsize=(7.5, 0.9 + 0.42 * len(summaries)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="0.4", linewidth=1)
    for number, head in enumerate(heads):
        centres, places, widths = [], [], []
        for row, summary in enumerate(summaries):
            if head not in summary["heads"]:
                continue
            test = judge(summary, head).nll
            centres.append(test.difference)
            places.append(row + 0.6 * ((number + 0.5) / len(heads) - 0.5))
            widths.append(0.0 if test.error is None else test.error * t_quantile(test.pairs - 1))
        axes.errorbar(centres, places, xerr=widths, fmt="o", markersize=4, capsize=2, label=head)
    axes.set_yticks(range(len(summaries)), [str(summary["setting"]) for summary in summaries])
    axes.invert_yaxis()
    axes.set_xlabel("test NLL less that of DET, paired over seeds, with 95 % intervals (left of 0 is better)")
    if len(heads) > 1:
        axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
