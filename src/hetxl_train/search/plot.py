"""Write the page of a search: τ over training, and the NLL of each tried τ."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetxl_train.formatting import decimal
from hetxl_train.report.charts import Axis, Figure, Line, Point, line_chart, lines_over_seeds, pairs, styles
from hetxl_train.report.html import write_page
from hetxl_train.report.render import render

STEP = Axis("step", show=lambda value: f"{value:,.0f}", tick=lambda value: f"{value:,.0f}", low=0)
TAU = Axis("τ", show=decimal, tick=lambda value: f"{value:g}")


def write_plot(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of one search, the content of tune.json."""
    label = str(result["label"])
    charts = [path_chart({label: [(result["seed"], result["path"])]}, "path")]
    if not result["single_training"]:
        charts.insert(0, tried_chart(label, result["trials"], str(result["chosen_on"])))
    lead = (
        f"τ = {result['temperature']:.3f}, chosen on the {result['chosen_on']} split, after {result['trainings']} "
        f"runs and {result['seconds']:.0f} s of training."
    )
    sections = [("τ", [chart for chart in charts if chart is not None])]
    title = f"τ of {str(result['head']).upper()}: {label}"
    return write_page(path, render("search.html", title=title, lead=lead, sections=sections))


def path_chart(paths: Mapping[str, Sequence[tuple[int | None, Any]]], ident: str) -> Figure | None:
    """Draw τ over the steps of training, from [step, τ] pairs of each seed by label; None if no τ was logged."""
    lines = [
        line
        for label, runs in paths.items()
        for line in lines_over_seeds(label, [(seed, pairs(path, 0, 1)) for seed, path in runs])
    ]
    return line_chart(ident, "τ over training", lines, styles(paths), STEP, TAU) if lines else None


def tried_chart(label: str, trials: Sequence[Mapping[str, Any]], split: str) -> Figure | None:
    """Draw the NLL of every τ that was tried; None if no trial ended."""
    ended = sorted((trial["temperature"], trial["nll"]) for trial in trials if trial.get("nll") is not None)
    if not ended:
        return None
    line = Line(label, tuple(Point(tau, nll, nll, nll) for tau, nll in ended))
    tau, nll = replace(TAU, log=True), Axis(f"{split} NLL", show=decimal)
    return line_chart("tried", "NLL over τ", [line], styles([label]), tau, nll)
