"""A search as a page: τ over training, and for a search over τ what each value gave."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl.report.charts import Axis, line_chart
from hetxl.report.format import decimal
from hetxl.report.lines import Line, Point, lines, pairs
from hetxl.report.markup import Markup, tag
from hetxl.report.page import page, section
from hetxl.report.palette import styles
from hetxl.training.files import write_bytes

STEP = Axis("step", show=lambda value: f"{value:,.0f}", tick=lambda value: f"{value:,.0f}", low=0)
TAU = Axis("τ", show=decimal, tick=lambda value: f"{value:g}")


def write_plot(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of one search.

    Args:
        result: content of tune.json.
        path: of the page.
    """
    label = str(result["label"])
    charts: list[Markup | None] = []
    if not result["single_training"]:
        charts.append(tried_chart(label, result["trials"], str(result["chosen_on"])))
    charts.append(path_chart({label: [(result["seed"], result["path"])]}, "path"))
    title = f"τ of {str(result['head']).upper()}: {label}"
    told = (
        f"τ = {result['temperature']:.3f}, chosen on the {result['chosen_on']} split, after {result['trainings']} "
        f"trainings and {result['seconds']:.0f} s of training."
    )
    body = section("tau", "τ", *(chart for chart in charts if chart is not None), plots=True)
    write_bytes(path, page(title, tag("h1", title), tag("p", told), body).encode())
    return path


def write_paths(settings: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write τ over training for several methods, a plot for each setting; methods that leave τ alone are left out.

    Args:
        settings: each with "setting" and "methods", as the study of τ writes them.
        path: of the page.
    """
    parts = []
    for number, setting in enumerate(settings):
        moving = {
            label: list(zip(values["seeds"], values["path"], strict=True))
            for label, values in setting["methods"].items()
            if any(len({tau for _, tau in one}) > 1 for one in values["path"])
        }
        chart = path_chart(moving, f"path-{number}")
        if chart is not None:
            parts.append(section(f"setting-{number}", str(setting["setting"]), chart, plots=True))
    title = "τ over training"
    write_bytes(path, page(title, tag("h1", title), *parts).encode())
    return path


def path_chart(paths: Mapping[str, Sequence[tuple[int | None, Any]]], ident: str) -> Markup | None:
    """τ over the steps of training; None where nothing was logged.

    Args:
        paths: by label, for each run its seed and its [step, τ] pairs.
        ident: of the drawing, unlike any other on its page.
    """
    drawn = [line for label, runs in paths.items() for line in lines(label, _points(runs))]
    if not drawn:
        return None
    return line_chart(ident, "τ over training", drawn, styles(list(paths)), STEP, TAU)


def _points(runs: Sequence[tuple[int | None, Any]]) -> list[tuple[int | None, list[tuple[float, float, float]]]]:
    return [(seed, pairs(path, 0, 1)) for seed, path in runs]


def tried_chart(label: str, trials: Sequence[Mapping[str, Any]], split: str) -> Markup | None:
    """The NLL of every τ that was tried; None where none ended."""
    ended = sorted((one["temperature"], one["nll"]) for one in trials if one.get("nll") is not None)
    if not ended:
        return None
    line = Line(label, tuple(Point(tau, nll, nll, nll) for tau, nll in ended))
    across = Axis("τ", show=decimal, tick=lambda value: f"{value:g}", log=True)
    up = Axis(f"{split} NLL", show=decimal)
    return line_chart("tried", "NLL over τ", [line], styles([label]), across, up)
