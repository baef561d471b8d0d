"""`hetxl study memory`: which steps fit a memory budget, measured against predicted (figures of memory)."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl.studies.charts import plot_lines
from hetxl.studies.latency import HEADS, described, grid_table, key_of, series_of, steps_of, ways_of
from hetxl.studies.measure import HeadSize, Step, peaks_of, predicted_bytes
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import holds

MEGABYTE = 1e6
NEAR = 1.25
"""Cells are measured whose prediction is up to this multiple of the budget."""


class Memory(Study):
    """Peak memory of a step beyond its parameters."""

    name = "memory"
    question = "How much memory does a head's part of a training step take, and which cells fit a budget?"
    claim = "HET-XL uses less memory than HET, and slightly less than HET-H"

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Peaks of the cells that are predicted to be near the budget or below, in a process of their own."""
        sizes = lab.form.sizes
        size = HeadSize(sizes.features, sizes.classes, sizes.rank)
        measured: dict[str, dict[str, dict[str, float | None]]] = {}
        expected: dict[str, dict[str, dict[str, float | None]]] = {}
        wanted: list[Step] = []
        plans: dict[str, dict[Step, int]] = {}
        for label, name in HEADS.items():
            shape = size.build(name, device="meta")
            steps = [step for way in ways_of(label) for step in steps_of(label, way, sizes)]
            plans[label] = {step: predicted_bytes(shape, step) for step in steps}
            near = [step for step in steps if plans[label][step] <= NEAR * sizes.budget]
            wanted += sorted(near, key=plans[label].__getitem__)
        with lab.narrator.bar("steps", len(wanted)) as bar:
            peaks = dict(zip(wanted, peaks_of(size, wanted, bar.to), strict=True))
        for label in HEADS:
            measured[label] = _by_way(label, peaks, plans[label])
            expected[label] = _by_way(label, plans[label], plans[label])
        return {"megabytes": measured, "predicted": expected, "sizes": described(sizes)}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Measured peaks, and how many cells fit."""
        over = "far above the budget"
        peaks = grid_table("Peak memory of a step, MB", summary["megabytes"], summary["sizes"], 0, over)
        columns = [
            Column("cells"),
            Column("fit, measured", 0),
            Column("fit, predicted", 0),
            Column("median measured / predicted", 2),
        ]
        rows = []
        for (label, way), counts in fitting(summary).items():
            name = label if way == "engine" else f"{label}, the paper's evaluation"
            rows.append(Row(name, [str(counts["cells"]), counts["measured"], counts["predicted"], counts["ratio"]]))
        note = f"the budget is {summary['sizes']['budget'] / MEGABYTE:,.0f} MB beyond the parameters themselves"
        return [peaks, Table("Cells that fit the budget", columns, rows, note)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Peaks over samples at the largest batch, and the budget."""
        axis = "peak memory of a step, MB"
        level = {axis: {"budget": summary["sizes"]["budget"] / MEGABYTE}}
        series = series_of(summary["megabytes"], summary["sizes"])
        return plot_lines({axis: series}, path, "samples", log_x=True, log_y=(axis,), levels=level)

    def conclusion(self, summary: Summary) -> str:
        """Cells that fit, and HET-XL against HET and HET-H in the cells that all have."""
        counts = fitting(summary)
        parts = [
            f"{counts[label, 'engine']['measured']} of {counts[label, 'engine']['cells']} cells of {label} fit by "
            "ours and "
            f"{counts[label, 'paper']['measured']} by the paper's evaluation"
            for label in ("HET", "HET-XL")
        ]
        share = {other: lower_share(summary, other) for other in ("HET", "HET-H")}
        found = share["HET"] == 1 if share["HET"] in (0, 1) else None
        return (
            f"Within the budget {'; '.join(parts)}. By ours HET-XL takes less memory than HET in {share['HET']:.0%} "
            "of the "
            f"cells and less than HET-H in {share['HET-H']:.0%}. {holds(found, 'HET-XL uses less memory than HET')}"
        )


def _by_way(label: str, values: Mapping[Step, int], steps: Iterable[Step]) -> dict[str, dict[str, float | None]]:
    """Megabytes by way and cell; None for what was not measured."""
    return {
        way: {key_of(step): values[step] / MEGABYTE if step in values else None for step in steps if step.way == way}
        for way in ways_of(label)
    }


def fitting(summary: Summary) -> dict[tuple[str, str], dict[str, Any]]:
    """For every head and way: cells, how many fit by measurement and by prediction, and the median of their ratio."""
    budget = summary["sizes"]["budget"] / MEGABYTE
    found = {}
    for label, ways in summary["megabytes"].items():
        for way, cells in ways.items():
            expected = summary["predicted"][label][way]
            ratios = sorted(peak / expected[name] for name, peak in cells.items() if peak is not None)
            found[label, way] = {
                "cells": len(cells),
                "measured": sum(peak is not None and peak <= budget for peak in cells.values()),
                "predicted": sum(value <= budget for value in expected.values()),
                "ratio": ratios[len(ratios) // 2] if ratios else None,
            }
    return found


def lower_share(summary: Summary, other: str) -> float:
    """In which share of the cells our HET-XL takes less than another head."""
    ours, theirs = (summary["megabytes"][label]["engine"] for label in ("HET-XL", other))
    shared = [name for name in ours if ours[name] is not None and theirs[name] is not None]
    return sum(ours[name] < theirs[name] for name in shared) / max(1, len(shared))


STUDY = Memory()
