"""The study of recovery as a picture: learned against true correlations, and the share of the gap that is closed."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hetxl.report.statistics import mean
from hetxl.studies.plot import new_figure, save_figure
from hetxl.studies.summary import Summary


def plot_recovery(summary: Summary, points: Mapping[str, tuple[np.ndarray, np.ndarray]], path: Path) -> Path:
    """One panel of correlations for each head with noise, and bars of the gap closed by all.

    Args:
        summary: of the study.
        points: by label, the true and the learned correlations, each [m].
        path: of the picture; its ending says which kind.
    """
    figure = new_figure(3.1 * (len(points) + 1.2), 3.3)
    panels = figure.subplots(1, len(points) + 1, width_ratios=[1.0] * len(points) + [1.2])
    for axes, (label, (true, learned)) in zip(panels, points.items(), strict=False):
        agreement = mean(summary["heads"][label]["agreement"]["pearson"]).value
        axes.plot([-1, 1], [-1, 1], color="0.6", linewidth=0.8)
        # Thousands of points: as a picture within the picture where that is made of lines.
        axes.scatter(true, learned, s=3, alpha=0.15, linewidths=0, rasterized=True)
        ticks = (-1, -0.5, 0, 0.5, 1)
        axes.set(xlim=(-1, 1), ylim=(-1, 1), xticks=ticks, yticks=ticks, aspect="equal", xlabel="true correlation")
        axes.set_title(f"{label}: r = {agreement:.2f}".replace("-0", "−0"), fontsize="medium")
    panels[0].set_ylabel("learned correlation")
    bars = panels[-1]
    closed = {label: mean(values["gap_closed"]) for label, values in summary["heads"].items() if label != "DET"}
    places = range(len(closed))
    bars.barh(
        places,
        [100 * found.value for found in closed.values()],
        xerr=[100 * (found.error or 0.0) for found in closed.values()],
        height=0.6,
        color="C0",
        ecolor="0.3",
        capsize=2,
    )
    bars.axvline(100, color="0.4", linewidth=1, linestyle="--")
    bars.axvline(0, color="0.4", linewidth=1)
    bars.set_yticks(places, [label.replace(" + ", " +\n") for label in closed], fontsize="small")
    bars.invert_yaxis()
    bars.set_xlabel("% of the NLL gap between DET\nand the true model", fontsize="small")
    bars.set_title("gap closed", fontsize="medium")
    return save_figure(figure, path)
