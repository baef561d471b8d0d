"""`hetxl study latency`: time of a training step of each head over samples and batch size (figures of latency)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl.studies.charts import plot_lines
from hetxl.studies.forms import Sizes
from hetxl.studies.measure import WAYS, HeadSize, Step, predicted_bytes, seconds_of, step_of, warm_up
from hetxl.studies.paper import figures
from hetxl.studies.study import Lab, Study, Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import holds
from hetxl.training.parallel import one_thread

HEADS = {"DET": "det", "HET": "het", "HET-H": "het-h", "HET-XL": "het-xl"}
OUT = "out of memory budget"


def ways_of(label: str) -> list[str]:
    """The ways that a head is evaluated: without noise there is one."""
    return ["engine"] if label == "DET" else list(WAYS)


def steps_of(label: str, way: str, sizes: Sizes) -> list[Step]:
    """All steps of a head, the smallest first; DET has no samples."""
    samples = sizes.samples[:1] if label == "DET" else sizes.samples
    return [Step(HEADS[label], way, batch, count) for batch in sizes.batches for count in samples]  # pyright: ignore[reportArgumentType]


def key_of(step: Step) -> str:
    """The name of a cell."""
    return f"B={step.batch},S={step.samples}"


def cell(values: Any, label: str, way: str, batch: int, count: int, first: int) -> float | None:
    """The value of a cell; DET's is the same for every S."""
    return values[label][way][f"B={batch},S={first if label == 'DET' else count}"]


class Latency(Study):
    """Milliseconds a step, by our evaluation and the paper's."""

    name = "latency"
    question = "How long does a head's part of a training step take, over the number of samples and the batch size?"
    paper = ("tab:latency_vs_perf",)
    claim = "HET-XL is faster than HET for few samples, and HET is faster for many"

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Every cell that fits the budget, one thread."""
        sizes = lab.form.sizes
        size = HeadSize(sizes.features, sizes.classes, sizes.rank)
        plans = {(label, way): steps_of(label, way, sizes) for label in HEADS for way in ways_of(label)}
        found: dict[str, dict[str, dict[str, float | None]]] = {label: {} for label in HEADS}
        done = 0
        with one_thread(), lab.narrator.bar("steps", sum(map(len, plans.values()))) as bar:
            for label, name in HEADS.items():
                head = size.build(name)
                warm_up(name)
                for way in ways_of(label):
                    cells: dict[str, float | None] = {}
                    for step in plans[label, way]:
                        fits = way == "engine" or predicted_bytes(head, step) <= sizes.budget
                        cells[key_of(step)] = (
                            1000 * seconds_of(step_of(head, step), sizes.repeats, sizes.seconds) if fits else None
                        )
                        done += 1
                        bar.to(done, f"{label} {key_of(step)}")
                    found[label][way] = cells
                head.zero_grad(set_to_none=True)
        return {"milliseconds": found, "sizes": described(sizes)}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Samples down within batches, heads side by side."""
        return [grid_table("Milliseconds of a step", summary["milliseconds"], summary["sizes"], 1, OUT)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Time over samples at the largest batch."""
        axis = "head's part of a step, ms"
        panels = {axis: series_of(summary["milliseconds"], summary["sizes"])}
        return plot_lines(panels, path, "samples", log_x=True, log_y=(axis,))

    def conclusion(self, summary: Summary) -> str:
        """HET-XL over HET at the fewest and the most samples, by both ways."""
        parts, last = [], {}
        for way, name in WAYS.items():
            few, many = ratios(summary["milliseconds"], summary["sizes"], way)
            last[way] = (few[1], many[1])
            parts.append(
                f"by {name} HET-XL takes {few[1]:.2f} times as long as HET at S = {few[0]} and {many[1]:.2f} times at "
                f"S = {many[0]}"
            )
        paper = figures()["latency"]
        few, many = last["paper"]
        return (
            f"At the largest batch, {', and '.join(parts)}. In the paper HET-XL is faster up to "
            f"{paper['het_xl_faster_up_to']} samples and HET from {paper['het_faster_from']} on. "
            f"{holds(few < 1 < many, self.claim, 'by the same evaluation as theirs')}"
        )


def described(sizes: Sizes) -> dict[str, Any]:
    """The sizes as a page needs them."""
    return {
        "D": sizes.features,
        "K": sizes.classes,
        "R": sizes.rank,
        "batches": list(sizes.batches),
        "samples": list(sizes.samples),
        "budget": sizes.budget,
    }


def ratios(values: Any, sizes: Any, way: str) -> tuple[tuple[int, float], tuple[int, float]]:
    """S and HET-XL over HET, at the fewest samples and the most that both have, at the largest batch with two cells."""
    for batch in reversed(sizes["batches"]):
        cells = [
            (count, values["HET-XL"][way][f"B={batch},S={count}"], values["HET"][way][f"B={batch},S={count}"])
            for count in sizes["samples"]
        ]
        known = [(count, xl / het) for count, xl, het in cells if xl is not None and het is not None]
        if len(known) > 1:
            return known[0], known[-1]
    raise ValueError(
        f"no batch size has two cells of HET and HET-XL by {way!r} within the budget of {sizes['budget']:,}"
    )


def grid_table(title: str, values: Any, sizes: Any, digits: int, missing: str) -> Table:
    """Cells of all heads and ways: samples down within batches."""
    kinds = [(label, way) for label in values for way in values[label]]
    names = {"engine": "", "paper": ", the paper's evaluation"}
    rows = []
    for batch in sizes["batches"]:
        for count in sizes["samples"]:
            cells = [cell(values, label, way, batch, count, sizes["samples"][0]) for label, way in kinds]
            rows.append(Row(f"{count:,}", [missing if one is None else one for one in cells], f"B = {batch}"))
    note = (
        f"D = {sizes['D']:,}, K = {sizes['K']:,}, R = {sizes['R']}, float32, one thread; the head's loss and all "
        f"gradients. The memory budget is {sizes['budget'] / 1e6:,.4g} MB"
    )
    return Table(title, [Column(f"{label}{names[way]}", digits) for label, way in kinds], rows, note, head="samples")


def series_of(values: Any, sizes: Any) -> dict[str, list[tuple[float, list[float]]]]:
    """Lines over samples at the largest batch, by head and way."""
    batch, first = sizes["batches"][-1], sizes["samples"][0]
    names = {"engine": "", "paper": ", the paper's"}
    series = {}
    for label in values:
        for way in values[label]:
            cells = [(count, cell(values, label, way, batch, count, first)) for count in sizes["samples"]]
            series[f"{label}{names[way]}"] = [(float(count), [] if one is None else [one]) for count, one in cells]
    return series


STUDY = Latency()
