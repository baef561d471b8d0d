"""`hetxl study latency`, `memory` (figures of latency and memory) and `samples` (Tables "MC samples", "Training time"):
what a training step of each head takes over samples and batch size, and what more samples are worth."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl._files import read_json
from hetxl.nn import Head
from hetxl.registry import HEAD_LABELS
from hetxl_lab.studies import study
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.measure import WAYS, HeadSize, Step, Way, peaks_of, predicted_bytes, seconds_of, step_of, warm_up
from hetxl_lab.studies.paper import figures
from hetxl_lab.studies.profiles import LEARNED, Profile, Sizes
from hetxl_lab.studies.study import Lab, Line, PaperStudy, Summary, TableStudy
from hetxl_lab.studies.verdicts import agree, change, holds, sign
from hetxl_train.process_pool import one_thread
from hetxl_train.report.tables import Column, Row, Table

HEADS = {label: name for name, label in HEAD_LABELS.items()}
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


def milliseconds_of(head: Head, step: Step, sizes: Sizes) -> float | None:
    """Return the time of a step; None where the paper's evaluation does not fit the budget."""
    if step.way == "paper" and predicted_bytes(head, step) > sizes.budget:
        return None
    return 1000 * seconds_of(step_of(head, step), sizes.repeats, sizes.seconds)


class Latency(PaperStudy):
    """Milliseconds a step, by our evaluation and the paper's."""

    name = "latency"
    question = "How long does a head's part of a training step take, over the number of samples and the batch size?"
    paper = ("tab:latency_vs_perf",)
    claim = "HET-XL is faster than HET for few samples, and HET is faster for many"

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Every cell that fits the budget, one thread."""
        sizes = lab.profile.sizes
        size = HeadSize(sizes.features, sizes.classes, sizes.rank)
        plans = {(label, way): steps_of(label, way, sizes) for label in HEADS for way in ways_of(label)}
        times: dict[str, dict[str, dict[str, float | None]]] = {label: {} for label in HEADS}
        done = 0
        with one_thread(), lab.console.bar("steps", sum(map(len, plans.values()))) as bar:
            for label, name in HEADS.items():
                head = size.build(name)
                warm_up(name)
                for way in ways_of(label):
                    cells: dict[str, float | None] = {}
                    for step in plans[label, way]:
                        cells[key_of(step)] = milliseconds_of(head, step, sizes)
                        done += 1
                        bar.to(done, f"{label} {key_of(step)}")
                    times[label][way] = cells
                head.zero_grad(set_to_none=True)
        return {"milliseconds": times, "sizes": described(sizes)}

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
    letters = {"D": sizes.features, "K": sizes.classes, "R": sizes.rank}
    return {**letters, "batches": list(sizes.batches), "samples": list(sizes.samples), "budget": sizes.budget}


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
            rows.append(Row(f"{count:,}", [missing if value is None else value for value in cells], f"B = {batch}"))
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
            series[f"{label}{names[way]}"] = [
                (float(count), [] if value is None else [value]) for count, value in cells
            ]
    return series


MEGABYTE = 1e6
NEAR = 1.25  # cells are measured whose prediction is up to this multiple of the budget


class Memory(PaperStudy):
    """Peak memory of a step beyond its parameters."""

    name = "memory"
    question = "How much memory does a head's part of a training step take, and which cells fit a budget?"
    claim = "HET-XL uses less memory than HET, and slightly less than HET-H"

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Peaks of the cells that are predicted to be near the budget or below, in a process of their own."""
        sizes = lab.profile.sizes
        size = HeadSize(sizes.features, sizes.classes, sizes.rank)
        near_budget: list[Step] = []
        plans: dict[str, dict[Step, int]] = {}
        for label, name in HEADS.items():
            shape = size.build(name, device="meta")
            steps = [step for way in ways_of(label) for step in steps_of(label, way, sizes)]
            plans[label] = {step: predicted_bytes(shape, step) for step in steps}
            near = [step for step in steps if plans[label][step] <= NEAR * sizes.budget]
            near_budget += sorted(near, key=plans[label].__getitem__)
        with lab.console.bar("steps", len(near_budget)) as bar:
            peaks = dict(zip(near_budget, peaks_of(size, near_budget, bar.to), strict=True))
        measured = {label: _by_way(label, peaks, steps) for label, steps in plans.items()}
        expected = {label: _by_way(label, steps, steps) for label, steps in plans.items()}
        return {"megabytes": measured, "predicted": expected, "sizes": described(sizes)}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Measured peaks, and how many cells fit."""
        over = "far above the budget"
        peaks = grid_table("Peak memory of a step, MB", summary["megabytes"], summary["sizes"], 0, over)
        columns = [Column("cells"), Column("fit, measured", 0), Column("fit, predicted", 0)]
        columns.append(Column("median measured / predicted", 2))
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
            f"ours and {counts[label, 'paper']['measured']} by the paper's evaluation"
            for label in ("HET", "HET-XL")
        ]
        share = {other: lower_share(summary, other) for other in ("HET", "HET-H")}
        verdict = share["HET"] == 1 if share["HET"] in (0, 1) else None
        return (
            f"Within the budget {'; '.join(parts)}. By ours HET-XL takes less memory than HET in {share['HET']:.0%} "
            f"of the cells and less than HET-H in {share['HET-H']:.0%}. "
            f"{holds(verdict, 'HET-XL uses less memory than HET')}"
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
    counts = {}
    for label, ways in summary["megabytes"].items():
        for way, cells in ways.items():
            expected = summary["predicted"][label][way]
            ratios = sorted(peak / expected[name] for name, peak in cells.items() if peak is not None)
            counts[label, way] = {
                "cells": len(cells),
                "measured": sum(peak is not None and peak <= budget for peak in cells.values()),
                "predicted": sum(value <= budget for value in expected.values()),
                "ratio": ratios[len(ratios) // 2] if ratios else None,
            }
    return counts


def lower_share(summary: Summary, other: str) -> float:
    """In which share of the cells our HET-XL takes less than another head."""
    ours, theirs = (summary["megabytes"][label]["engine"] for label in ("HET-XL", other))
    shared = [name for name in ours if ours[name] is not None and theirs[name] is not None]
    return sum(ours[name] < theirs[name] for name in shared) / max(1, len(shared))


SAMPLED_HEADS: dict[str, tuple[str, dict[str, Any]]] = {"HET": ("het", {}), "HET-XL": ("het-xl", LEARNED)}


def step_times(lab: Lab, line: Line, samples: Sequence[int]) -> dict[str, dict[str, float | None]]:
    """Milliseconds of the head's part of a step, by way and S; None where it does not fit the budget."""
    directory = lab.cache.directory(line.run(lab.seeds[0]))
    config, classes = line.run(lab.seeds[0]).config, len(read_json(directory / "model.json")["class_names"])
    size = HeadSize(config.features or 128, classes, config.rank)
    head = size.build(line.head)
    warm_up(line.head)
    sizes = lab.profile.sizes

    def milliseconds(way: Way, count: int) -> float | None:
        return milliseconds_of(head, Step(line.head, way, config.batch_size, count), sizes)

    with one_thread():
        return {way: {str(count): milliseconds(way, count) for count in samples} for way in WAYS}


class Samples(TableStudy):
    """S from 1 to 1,000 for HET and HET-XL, the same in training and evaluation."""

    name = "samples"
    question = (
        "How many Monte Carlo samples are needed, in training and evaluation alike, and what do they cost: by our "
        "evaluation, and by the paper's, which gives the same numbers?"
    )
    paper = ("tab:latency_vs_perf",)
    claim = (
        "HET-XL is not highly sensitive to the number of samples, and with one sample it still outperforms HET with "
        "1,000"
    )
    title = "Sensitivity to the number of samples"

    def lines(self, profile: Profile) -> Sequence[Line]:
        """Both heads with every S."""
        return [
            Line(str(count), head, profile.sampling, {**options, "train_samples": count, "eval_samples": count}, label)
            for label, (head, options) in SAMPLED_HEADS.items()
            for count in profile.samples
        ]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return the results of the runs, and the time of a step."""
        summary = super().measure(lab)
        first = {line.group: line for line in reversed(self.lines(lab.profile))}
        summary["milliseconds"] = {label: step_times(lab, first[label], lab.profile.samples) for label in SAMPLED_HEADS}
        return summary

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's with samples down, and the time of a step by both ways."""
        counts, groups = _counts(summary), {label: label for label in SAMPLED_HEADS}
        columns, rows = study.side_by_side(summary, counts, groups, (study.NLL, study.PRECISION, study.SECONDS))
        times = [summary["milliseconds"][label][way] for label in SAMPLED_HEADS for way in WAYS]
        steps = [Row(count, [OUT if time[count] is None else time[count] for time in times]) for count in counts]
        head = "samples"
        timed = [Column(f"{label}, {way}, ms", 1) for label in SAMPLED_HEADS for way in WAYS.values()]
        note = f"{summary['lines'][0]['data']}, the same S in training and evaluation"
        return [
            Table(self.title, columns, rows, note, head),
            Table("The head's part of a step", timed, steps, "loss and gradients of one batch, one thread", head),
        ]

    def plot(self, summary: Summary, path: Path) -> Path:
        """NLL and the time of a step over S."""
        counts = _counts(summary)
        nll = {
            label: study.points_of(summary, {float(count): (count, label) for count in counts}, "nll")
            for label in SAMPLED_HEADS
        }
        times = {
            f"{label}, {name}": [
                (float(count), [value] if (value := summary["milliseconds"][label][way][count]) is not None else [])
                for count in counts
            ]
            for label in SAMPLED_HEADS
            for way, name in (("engine", "hetxl"), ("paper", "the paper's"))
        }
        time_axis = "head's part of a step, ms"
        return plot_lines({"test NLL": nll, time_axis: times}, path, "samples", log_x=True, log_y=(time_axis,))

    def conclusion(self, summary: Summary) -> str:
        """HET-XL with one sample against HET with the most, and against itself."""
        first, last = _counts(summary)[0], _counts(summary)[-1]
        rival = study.less(summary, (first, "HET-XL"), (last, "HET"))
        own = study.less(summary, (first, "HET-XL"), (last, "HET-XL"))
        times = summary["milliseconds"]["HET-XL"]
        shared = [
            (count, times["paper"][count] / times["engine"][count])
            for count in _counts(summary)
            if times["paper"][count] is not None
        ]
        speed = ""
        if shared:
            speed = f"At S = {shared[-1][0]} the paper's evaluation takes {shared[-1][1]:.1f} times as long as ours. "
        return (
            f"HET-XL's NLL with S = {first}, compared with its own at S = {last}, is {change(own)}; compared with "
            f"HET's at S = {last} it is {change(rival)}. {speed}"
            f"{holds(agree([sign(rival)], -1), 'HET-XL with one sample outperforms HET with the most')}"
        )


def _counts(summary: Summary) -> list[str]:
    return list(dict.fromkeys(line["label"] for line in summary["lines"]))


STUDIES = (Latency(), Memory(), Samples())
