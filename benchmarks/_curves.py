"""The paper's figures of latency and memory: loss and backward against the number of samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _cases import METHODS, Case, Method
from _measures import FLOAT, step_case
from _meter import MEGABYTE, Meter
from _report import markdown_table, plot_panels

BUDGET = 12e9
"""Bytes that the samples-first evaluation may take; where it would need more it is left out."""
OUT_OF_BUDGET = "out of memory budget"


@dataclass(frozen=True)
class Cell:
    """One step of one method.

    Attributes:
        seconds: median, or None if the cell was left out.
        peak: bytes, likewise.
    """

    seconds: float | None = None
    peak: int | None = None


Curve = dict[Method, list[Cell]]
"""By way, one cell for each number of samples."""


def logits_bytes(case: Case) -> int:
    """Return the bytes of all sampled logits, [B, S, K]."""
    return FLOAT * case.batch * case.samples * case.classes


def copies(cases: Sequence[Case], peaks: Sequence[float]) -> float:
    """Return how many copies of the sampled logits a step holds, from the peaks of two numbers of samples."""
    return (peaks[1] - peaks[0]) / (logits_bytes(cases[1]) - logits_bytes(cases[0]))


def fits(case: Case, measured: Sequence[tuple[Case, float]], budget: float = BUDGET) -> bool:
    """Predict whether a step stays in the budget, from the two largest measured so far."""
    if len(measured) < 2:
        return True
    (first, low), (last, high) = measured[-2:]
    more = logits_bytes(case) - logits_bytes(last)
    return high + copies((first, last), (low, high)) * more <= budget


def measure_curve(meter: Meter, batch: int) -> Curve:
    """Measure all methods at one batch size, over the numbers of samples."""
    curve: Curve = {method: [] for method in METHODS}
    measured: list[tuple[Case, float]] = []
    for samples in meter.sizes.curve_samples:
        case = step_case(meter, batch, samples)
        plain = case.by("samples")
        left_out = not fits(plain, measured)
        methods: list[Method] = [method for method in METHODS if not (left_out and method == "samples")]
        meter.say(f"figures: memory at B = {batch}, S = {samples}")
        # DET does not depend on S, but its time is measured again each time, interleaved with the others.
        peaks = {
            method: meter.peak(case.by(method) if method != "det" else step_case(meter, batch).by("det"))
            for method in methods
        }
        meter.say(f"figures: time at B = {batch}, S = {samples}")
        seconds = dict(zip(methods, meter.by_methods(case, methods, with_bar=False), strict=True))
        for method in METHODS:
            curve[method].append(Cell(seconds.get(method), peaks.get(method)))
        if not left_out:
            measured.append((plain, peaks["samples"]))
    return curve


def curves_table(curves: dict[int, Curve], samples: Sequence[int]) -> str:
    """Return times and peaks of all methods, as markdown."""
    names = list(METHODS.values())
    header = ["B", "S", *(f"{name}, ms" for name in names), *(f"{name}, MB" for name in names)]
    rows = []
    for batch, curve in curves.items():
        for index, count in enumerate(samples):
            cells = [curve[method][index] for method in METHODS]
            times = [OUT_OF_BUDGET if cell.seconds is None else f"{1000 * cell.seconds:,.0f}" for cell in cells]
            sizes = [OUT_OF_BUDGET if cell.peak is None else f"{cell.peak / MEGABYTE:,.0f}" for cell in cells]
            rows.append([str(batch), f"{count:,}", *times, *sizes])
    return markdown_table(header, rows, left=0)


def plot_curves(curves: dict[int, Curve], samples: Sequence[int], folder: Path) -> None:
    """Draw the two figures: time and peak memory against S, one panel for each batch size."""
    for kind, axis in (("time", "loss + backward, seconds"), ("memory", "peak memory, MB")):
        panels = {
            f"B = {batch}": {METHODS[method]: [_value(cell, kind) for cell in cells] for method, cells in curve.items()}
            for batch, curve in curves.items()
        }
        plot_panels(folder / f"engine-{kind}.svg", panels, samples, axis)


def _value(cell: Cell, kind: str) -> float | None:
    """Return the value to draw for a cell; None if it was left out."""
    return cell.seconds if kind == "time" else None if cell.peak is None else cell.peak / MEGABYTE
