"""`hetxl study latency`, `memory` (figures of latency and memory) and `samples` (Tables "MC samples", "Training time"):
time and memory of training steps and predictions by head, samples and batch size, and the benefit of more samples."""

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetxl.nn import Head
from hetxl.registry import HEAD_LABELS
from hetxl_lab.studies import study
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.measure import (
    MODES,
    WAYS,
    Cells,
    HeadSize,
    Mode,
    Step,
    Way,
    backbone_seconds,
    peaks_of,
    predicted_bytes,
    seconds_of,
    step_of,
    warm_up,
)
from hetxl_lab.studies.paper import figures
from hetxl_lab.studies.profiles import LEARNED, Profile, Sizes
from hetxl_lab.studies.study import Lab, Line, PaperStudy, Summary, TableStudy
from hetxl_lab.studies.verdicts import agree, change, holds, sign
from hetxl_train.distributed import find_device
from hetxl_train.process_pool import one_thread
from hetxl_train.report.tables import Column, Row, Table
from hetxl_train.runs import load_run

HEADS = {label: name for name, label in HEAD_LABELS.items()}
OUT = "out of memory budget"
MODE_TITLES = {"train": "Training step", "eval": "Prediction"}


def ways_of(label: str) -> list[Way]:
    """Return the ways of evaluating a head; without noise there is only one."""
    return ["engine"] if label == "DET" else list(WAYS)


def steps_of(label: str, way: Way, sizes: Sizes, mode: Mode = "train") -> list[Step]:
    """Return all steps of a head, smallest first; DET has no samples."""
    samples = sizes.samples[:1] if label == "DET" else sizes.samples
    return [Step(HEADS[label], way, batch, count, mode) for batch in sizes.batches for count in samples]


def key_of(step: Step) -> str:
    """Return the name of a cell."""
    return f"B={step.batch},S={step.samples}"


def cell(values: Any, label: str, way: str, batch: int, count: int, first: int) -> float | None:
    """Return the value of a cell; DET's is the same for every S."""
    return values[label][way][f"B={batch},S={first if label == 'DET' else count}"]


def milliseconds_of(head: Head, step: Step, sizes: Sizes, budget: int | None = None) -> float | None:
    """Return the time of a step; None where the paper's evaluation does not fit the budget."""
    if step.way == "paper" and predicted_bytes(head, step) > (budget or sizes.budget):
        return None
    device = next(head.parameters()).device
    return 1000 * seconds_of(step_of(head, step), sizes.repeats, sizes.seconds, str(device))


class CostStudy(PaperStudy):
    """A study of steps in the paper's settings on one device. A stopped study resumes, see `Cells`."""

    def check(self, lab: Lab) -> None:
        """Raise unless the device is available."""
        find_device(lab.options.get("device", "cpu"))

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Measure the cells that no earlier attempt has measured."""
        cells = Cells(lab.directory / "cells.json")
        measurements = {**self.cells(lab, cells), "measuring_seconds": cells.seconds}
        cells.path.unlink(missing_ok=True)
        return measurements

    @abstractmethod
    def cells(self, lab: Lab, cells: Cells) -> dict[str, Any]:
        """Return the measurements for the summary; cells that `Cells` has stored are not measured again."""


def budget_of(lab: Lab) -> int:
    """Return the bytes that a step may take: the profile's on a CPU, else the free memory of the device."""
    device = torch.device(lab.options.get("device", "cpu"))
    return lab.profile.sizes.budget if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[0]


class Latency(CostStudy):
    """Milliseconds per step, by our evaluation and the paper's."""

    name = "latency"
    question = (
        "How long do a training step and a prediction take, over the number of samples and the batch size: the head's "
        "part, and with the backbone?"
    )
    paper = ("tab:latency_vs_perf",)
    claim = "HET-XL is faster than HET for few samples, and HET is faster for many"

    def cells(self, lab: Lab, cells: Cells) -> dict[str, Any]:
        """Measure every cell that fits the budget, and the backbones, with one thread."""
        sizes, device, budget = lab.profile.sizes, lab.options.get("device", "cpu"), budget_of(lab)
        count = sum(len(steps_of(label, way, sizes)) for label in HEADS for way in ways_of(label))
        total = len(sizes.settings) * len(MODES) * (count + len(sizes.batches) + 1)
        settings: dict[str, Any] = {}
        with one_thread(), lab.console.bar("steps", total) as bar:
            done = itertools.count(1)
            for setting, size in sizes.settings.items():
                times: dict[str, Any] = {mode: {label: {} for label in HEADS} for mode in MODES}
                for label, name in HEADS.items():
                    head = _warm(name, size, device)
                    for mode, way in itertools.product(MODES, ways_of(label)):
                        times[mode][label][way] = {}
                        for step in steps_of(label, way, sizes, mode):
                            times[mode][label][way][key_of(step)] = cells.of(
                                f"{device}, {setting}, {mode}, {label}, {way}, {key_of(step)}",
                                lambda head=head, step=step: milliseconds_of(head(), step, sizes, budget),
                            )
                            bar.to(next(done), f"{setting}, {MODES[mode]}, {label} {key_of(step)}")
                settings[setting] = {"milliseconds": times, "sizes": described(sizes, size, budget)}
                report = lambda what: bar.to(next(done), what)  # noqa: E731
                settings[setting] |= _with_backbone(setting, size, sizes, device, cells, report)
        clock = ", its processor time" if torch.device(device).type == "cpu" else ""
        return {"settings": settings, "device": f"{device_name(device)}{clock}"}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return a table for each setting, rows by batch and samples, columns by head; then those with backbone."""
        tables = [
            grid_table(f"{MODE_TITLES[mode]}, ms: {name}", values, setting["sizes"], 1, OUT, summary["device"])
            for name, setting in summary["settings"].items()
            for mode, values in setting["milliseconds"].items()
        ]
        return [*tables, *([_whole_table(summary)] if with_backbone(summary) else [])]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw time over samples at the largest batch, in the first setting."""
        setting = next(iter(summary["settings"].values()))
        panels = {
            f"head's part of a {MODES[mode]} step, ms": series_of(values, setting["sizes"])
            for mode, values in setting["milliseconds"].items()
        }
        return plot_lines(panels, path, "samples", log_x=True, log_y=tuple(panels))

    def conclusion(self, summary: Summary) -> str:
        """Compare HET-XL with HET at the fewest and the most samples, both ways, and heads with their backbone."""
        parts, verdicts = [], []
        for name, setting in summary["settings"].items():
            for mode, values in setting["milliseconds"].items():
                texts = []
                for way, who in WAYS.items():
                    few, many = ratios(values, setting["sizes"], way)
                    texts.append(f"{few[1]:.2f} at S = {few[0]} and {many[1]:.2f} at S = {many[0]} by {who}")
                    verdicts += [few[1] < 1 < many[1]] if way == "paper" and mode == "train" else []
                parts.append(f"{name}, {MODES[mode]}: {'; '.join(texts)}")
        paper = figures()["latency"]
        shares = "; ".join(
            f"{name}, {MODES[mode]}: {100 * _share(setting, mode):.0f} %"
            for name, setting in with_backbone(summary).items()
            for mode in setting["milliseconds"]
        )
        whole = f"Of a whole step, with the backbone and the most samples, our HET-XL head is ({shares})."
        lines = "\n".join(f"- {part}" for part in parts)
        verdict = holds(agree_all(verdicts), self.claim, "in training, by the same evaluation as theirs")
        return (
            f"The time of HET-XL's head over that of HET's, at the largest batch that both fit:\n\n{lines}\n\n"
            f"In the paper HET-XL is faster up to {paper['het_xl_faster_up_to']} samples and HET from "
            f"{paper['het_faster_from']} on. {verdict} {whole if shares else ONLY_HEADS}"
        )


ONLY_HEADS = "Of these steps the head's part in training was measured, and nothing else."
"""What a page says whose numbers are of the time before predictions and backbones were measured."""


def with_backbone(summary: Summary) -> dict[str, Any]:
    """Return the settings that were also measured with the backbone."""
    return {name: setting for name, setting in summary["settings"].items() if "whole" in setting}


def agree_all(verdicts: Sequence[bool]) -> bool | None:
    """Return True or False if all settings agree, else None."""
    return verdicts[0] if len(set(verdicts)) == 1 else None


def device_name(device: str) -> str:
    """Return the name of a device, for a page."""
    kind = torch.device(device)
    return "one thread of a CPU" if kind.type == "cpu" else torch.get_device_module(kind).get_device_name(kind)


def _warm(name: str, size: HeadSize, device: str) -> Callable[[], Head]:
    """Return a function that builds a head when it is first called."""

    def build() -> Head:
        warm_up(name, device)
        return size.build(name, device)

    return functools.cache(build)


def _with_backbone(
    setting: str, size: HeadSize, sizes: Sizes, device: str, cells: Cells, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the backbone's milliseconds by mode and batch, and one whole step with HET-XL to check the sum."""
    backbone = functools.cache(lambda: size.build_backbone(device))
    limits = (sizes.repeats, sizes.seconds)
    alone: dict[str, dict[str, float | None]] = {mode: {} for mode in MODES}
    whole: dict[str, float | None] = {}

    def alone_ms(mode: Mode, batch: int) -> float:
        return 1000 * backbone_seconds(backbone(), batch, mode, device, *limits)

    def whole_ms(mode: Mode) -> float:
        head, step = size.build("het-xl", device), Step("het-xl", "engine", sizes.batches[0], sizes.samples[-1], mode)
        return 1000 * seconds_of(step_of(head, step, backbone()), *limits, device)

    for mode in MODES:
        for batch in sizes.batches:
            name = f"{device}, {setting}, {mode}, backbone, B={batch}"
            alone[mode][str(batch)] = cells.of(name, functools.partial(alone_ms, mode, batch))
            report(f"{size.backbone}, {MODES[mode]} B={batch}")
        whole[mode] = cells.of(f"{device}, {setting}, {mode}, whole", functools.partial(whole_ms, mode))
        report(f"{size.backbone} with HET-XL")
    return {"backbone": alone, "whole": whole}


def _sums(setting: Any, mode: str, batch: int, count: int) -> list[float | None]:
    """Return milliseconds of backbone and head together, for every head, by our evaluation."""
    first, own = setting["sizes"]["samples"][0], setting["backbone"][mode][str(batch)]
    heads = [cell(setting["milliseconds"][mode], label, "engine", batch, count, first) for label in HEADS]
    return [None if head is None else own + head for head in heads]


def _share(setting: Any, mode: str) -> float:
    """Return the share of HET-XL's head in a whole step at the largest batch with the most samples."""
    batch, count = setting["sizes"]["batches"][-1], setting["sizes"]["samples"][-1]
    total = _sums(setting, mode, batch, count)[list(HEADS).index("HET-XL")]
    return 1 - setting["backbone"][mode][str(batch)] / total if total else 0.0


def _whole_table(summary: Summary) -> Table:
    rows, checks = [], []
    for name, setting in with_backbone(summary).items():
        batches, counts = setting["sizes"]["batches"], setting["sizes"]["samples"]
        for mode in setting["milliseconds"]:
            for batch, count in itertools.product(batches, (counts[0], counts[-1])):
                own = setting["backbone"][mode][str(batch)]
                rows.append(
                    Row(f"{MODES[mode]}, B = {batch}, S = {count:,}", [own, *_sums(setting, mode, batch, count)], name)
                )
            sum_of = _sums(setting, mode, batches[0], counts[-1])[list(HEADS).index("HET-XL")]
            checks.append(f"{setting['whole'][mode] / sum_of:.2f}" if sum_of else "–")
    note = (
        f"{summary['device']}, 224 × 224 images, our evaluation; the time of the backbone and that of the head are "
        f"added. A whole step of HET-XL at the smallest batch takes {', '.join(checks)} times the sum: training and "
        "prediction, setting by setting"
    )
    return Table(
        "With the backbone, ms", [Column("backbone alone", 0), *(Column(label, 0) for label in HEADS)], rows, note
    )


def described(sizes: Sizes, size: HeadSize, budget: int) -> dict[str, Any]:
    """Describe the sizes, for a page."""
    letters = {"D": size.features, "K": size.classes, "R": size.rank}
    return {**letters, "batches": list(sizes.batches), "samples": list(sizes.samples), "budget": budget}


def ratios(values: Any, sizes: Any, way: str) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return S and HET-XL over HET at the fewest and the most common samples, at the largest batch with two cells."""
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


def grid_table(title: str, values: Any, sizes: Any, digits: int, missing: str, device: str) -> Table:
    """Return the table of all heads and ways, with rows by batch and samples."""
    kinds = [(label, way) for label in values for way in values[label]]
    names = {"engine": "", "paper": ", the paper's evaluation"}
    rows = []
    for batch in sizes["batches"]:
        for count in sizes["samples"]:
            cells = [cell(values, label, way, batch, count, sizes["samples"][0]) for label, way in kinds]
            rows.append(Row(f"{count:,}", [missing if value is None else value for value in cells], f"B = {batch}"))
    note = (
        f"D = {sizes['D']:,}, K = {sizes['K']:,}, R = {sizes['R']}, float32, {device}; the head alone. "
        f"The memory budget is {sizes['budget'] / 1e6:,.4g} MB"
    )
    return Table(title, [Column(f"{label}{names[way]}", digits) for label, way in kinds], rows, note, head="samples")


def series_of(values: Any, sizes: Any) -> dict[str, list[tuple[float, list[float]]]]:
    """Return lines over samples at the largest batch, by head and way."""
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
NEAR = 1.25  # cells predicted up to this multiple of the budget are measured


class Memory(CostStudy):
    """Peak memory of a step, without its parameters."""

    name = "memory"
    question = (
        "How much memory do a training step and a prediction take: the head's part, which cells fit a budget, and a "
        "whole step with the backbone?"
    )
    claim = "HET-XL uses less memory than HET, and slightly less than HET-H"

    def cells(self, lab: Lab, cells: Cells) -> dict[str, Any]:
        """Measure the peaks of cells predicted to be near or below the budget, in a separate process."""
        sizes, device, budget = lab.profile.sizes, lab.options.get("device", "cpu"), budget_of(lab)
        settings: dict[str, Any] = {}
        for setting, size in sizes.settings.items():
            plans = {label: _predictions(label, size, sizes) for label in HEADS}
            near = [step for label in HEADS for step in _sorted(plans[label], NEAR * budget)]
            steps = [*near, *(step for label in HEADS for step in whole_steps(label, sizes))]
            names = {
                step: f"{device}, {setting}, {step.mode}, {step.head}, {step.way}, {key_of(step)}" for step in steps
            }
            names |= {step: f"{names[step]}, whole" for step in steps if step.whole}
            missing = [step for step in steps if names[step] not in cells.values]
            with lab.console.bar(f"{setting}, steps", len(steps), len(steps) - len(missing)) as bar:
                for number, (step, peak) in enumerate(peaks_of(size, missing, device), 1):
                    cells.put(names[step], peak)
                    bar.to(len(steps) - len(missing) + number)
            peaks = {step: cells.values[names[step]] for step in steps}
            settings[setting] = {
                "megabytes": {
                    mode: {label: _by_way(label, mode, peaks, plans[label]) for label in HEADS} for mode in MODES
                },
                "predicted": {
                    mode: {label: _by_way(label, mode, plans[label], plans[label]) for label in HEADS} for mode in MODES
                },
                "whole": {
                    mode: {
                        label: [_megabytes(peaks, s) for s in whole_steps(label, sizes) if s.mode == mode]
                        for label in HEADS
                    }
                    for mode in MODES
                },
                "sizes": {**described(sizes, size, budget), "whole_batch": sizes.whole_batch},
            }
        return {"settings": settings, "device": device_name(device)}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return tables of measured peaks, of the number of cells that fit, and of whole steps."""
        over = "far above the budget"
        tables = [
            grid_table(f"{MODE_TITLES[mode]}, peak MB: {name}", values, setting["sizes"], 0, over, summary["device"])
            for name, setting in summary["settings"].items()
            for mode, values in setting["megabytes"].items()
        ]
        columns = [Column("cells"), Column("fit, measured", 0), Column("fit, predicted", 0)]
        columns.append(Column("median measured / predicted", 2))
        rows = []
        for name, setting in summary["settings"].items():
            for mode in setting["megabytes"]:
                for (label, way), counts in fitting(setting, mode).items():
                    title = label if way == "engine" else f"{label}, the paper's evaluation"
                    cells = [str(counts["cells"]), counts["measured"], counts["predicted"], counts["ratio"]]
                    rows.append(Row(title, cells, f"{name}, {MODES[mode]}"))
        budget = next(iter(summary["settings"].values()))["sizes"]["budget"]
        note = f"the budget is {budget / MEGABYTE:,.0f} MB beyond the parameters themselves"
        whole = [_whole_memory_table(summary)] if with_backbone(summary) else []
        return [*tables, Table("Cells that fit the budget", columns, rows, note), *whole]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw peaks over samples at the largest batch in the first setting, with the budget."""
        setting = next(iter(summary["settings"].values()))
        panels, levels = {}, {}
        for mode, values in setting["megabytes"].items():
            axis = f"peak memory of a {MODES[mode]} step, MB"
            panels[axis] = series_of(values, setting["sizes"])
            levels[axis] = {"budget": setting["sizes"]["budget"] / MEGABYTE}
        return plot_lines(panels, path, "samples", log_x=True, log_y=tuple(panels), levels=levels)

    def conclusion(self, summary: Summary) -> str:
        """State how many cells fit, and compare HET-XL with HET and HET-H in their common cells."""
        parts, shares = [], []
        for name, setting in summary["settings"].items():
            for mode in setting["megabytes"]:
                counts = fitting(setting, mode)
                fits = ", ".join(
                    f"{counts[label, 'engine']['measured']} of {counts[label, 'engine']['cells']} cells of {label} by "
                    f"ours and {counts[label, 'paper']['measured']} by the paper's evaluation"
                    for label in ("HET", "HET-XL")
                )
                share = {other: lower_share(setting, mode, other) for other in ("HET", "HET-H")}
                shares += [share["HET"]] if mode == "train" else []
                parts.append(
                    f"{name}, {MODES[mode]}: {fits} fit; by ours HET-XL takes less memory than HET in "
                    f"{share['HET']:.0%} of the cells and less than HET-H in {share['HET-H']:.0%}"
                )
        verdict = shares[0] == 1 if shares[0] in (0, 1) and len(set(shares)) == 1 else None
        lines = "\n".join(f"- {part}" for part in parts)
        text = f"{lines}\n\n{holds(verdict, 'HET-XL uses less memory than HET in training')}"
        return text if with_backbone(summary) else f"{text} {ONLY_HEADS}"


def whole_steps(label: str, sizes: Sizes) -> list[Step]:
    """Return the steps of a head with the backbone: training and prediction with the fewest and the most samples."""
    counts = sizes.samples[:1] if label == "DET" else (sizes.samples[0], sizes.samples[-1])
    return [Step(HEADS[label], "engine", sizes.whole_batch, count, mode, True) for mode in MODES for count in counts]


def _predictions(label: str, size: HeadSize, sizes: Sizes) -> dict[Step, int]:
    """Return all steps of a head alone, with their predicted bytes."""
    shape = size.build(HEADS[label], device="meta")
    steps = [step for mode in MODES for way in ways_of(label) for step in steps_of(label, way, sizes, mode)]
    return {step: predicted_bytes(shape, step) for step in steps}


def _sorted(plans: Mapping[Step, int], limit: float) -> list[Step]:
    return sorted((step for step in plans if plans[step] <= limit), key=plans.__getitem__)


def _megabytes(values: Mapping[Step, int], step: Step) -> float | None:
    return values[step] / MEGABYTE if step in values else None


def _by_way(
    label: str, mode: str, values: Mapping[Step, int], steps: Iterable[Step]
) -> dict[str, dict[str, float | None]]:
    """Return megabytes by way and cell; None where not measured."""
    return {
        way: {key_of(step): _megabytes(values, step) for step in steps if (step.way, step.mode) == (way, mode)}
        for way in ways_of(label)
    }


def _whole_memory_table(summary: Summary) -> Table:
    rows = []
    for name, setting in with_backbone(summary).items():
        counts = setting["sizes"]["samples"]
        for mode, values in setting["whole"].items():
            for index, count in enumerate((counts[0], counts[-1])):
                cells = [values[label][index if len(values[label]) > 1 else 0] for label in HEADS]
                rows.append(
                    Row(f"{MODES[mode]}, S = {count:,}", cells, f"{name}, B = {setting['sizes']['whole_batch']}")
                )
    note = "beyond the parameters, our evaluation, 224 × 224 images; with activations and gradients of the backbone"
    return Table("With the backbone, peak MB", [Column(label, 0) for label in HEADS], rows, note)


def fitting(setting: Any, mode: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Count the cells of each head and way, and those that fit as measured and as predicted; with the median ratio."""
    budget = setting["sizes"]["budget"] / MEGABYTE
    counts = {}
    for label, ways in setting["megabytes"][mode].items():
        for way, cells in ways.items():
            expected = setting["predicted"][mode][label][way]
            ratios = sorted(peak / expected[name] for name, peak in cells.items() if peak is not None)
            counts[label, way] = {
                "cells": len(cells),
                "measured": sum(peak is not None and peak <= budget for peak in cells.values()),
                "predicted": sum(value <= budget for value in expected.values()),
                "ratio": ratios[len(ratios) // 2] if ratios else None,
            }
    return counts


def lower_share(setting: Any, mode: str, other: str) -> float:
    """Return the share of cells in which our HET-XL takes less than another head."""
    ours, theirs = (setting["megabytes"][mode][label]["engine"] for label in ("HET-XL", other))
    shared = [name for name in ours if ours[name] is not None and theirs[name] is not None]
    return sum(ours[name] < theirs[name] for name in shared) / max(1, len(shared))


SAMPLED_HEADS: dict[str, tuple[str, dict[str, Any]]] = {"HET": ("het", {}), "HET-XL": ("het-xl", LEARNED)}


def step_times(lab: Lab, line: Line, samples: Sequence[int]) -> dict[str, dict[str, float | None]]:
    """Return milliseconds of the head's part of a step, by way and S; None where it exceeds the budget."""
    run = line.run(lab.seeds[0])
    config, head = run.config, load_run(lab.cache.directory(run)).model.head.train()
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
        """Return both heads with every S."""
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
        """Return the paper's layout with one row for each S, and the time of a step both ways."""
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
        """Draw NLL and the time of a step over S."""
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
        """Compare HET-XL with one sample to HET with the most samples, and to HET-XL with the most."""
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
