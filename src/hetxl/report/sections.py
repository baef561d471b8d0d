"""The plots of a report, by what they are about. One without data is a line that says so."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetxl.report import format as form
from hetxl.report.bars import Reliability, grouped_bars, histogram, reliability_charts
from hetxl.report.charts import Axis, Dot, line_chart, scatter_chart
from hetxl.report.groups import Group
from hetxl.report.lines import Line, lines, pairs
from hetxl.report.markup import Markup, tag
from hetxl.report.palette import Style
from hetxl.report.statistics import mean

Looks = Mapping[str, Style]
BANDS = (("accuracy_head", "frequent"), ("accuracy_middle", "middle"), ("accuracy_tail", "rare"))


def left_out(what: str, why: str) -> Markup:
    """The line in place of something that there is no data for."""
    return tag("p", f"{what} left out: {why}.", class_="missing")


def spread(groups: Sequence[Group]) -> Markup | None:
    """What lines and bands are, where there are several seeds."""
    if all(len(group.runs) == 1 for group in groups):
        return None
    bands = "Lines are means over seeds, their bands reach from the lowest to the highest seed"
    return tag("p", f"{bands}; whiskers are ± one standard error.", class_="note")


def training(groups: Sequence[Group], looks: Looks, best_nll: float | None) -> list[Markup]:
    """Validation NLL over steps and over time, and the temperature over steps."""
    found = []
    nll = Axis("NLL, nats", show=lambda value: form.decimal(value, 3))
    steps = Axis("steps", show=form.count, low=0.0)
    reference = None if best_nll is None else ("true model", best_nll)
    over_steps = _from_log(groups, "evaluations", "step", "nll")
    over_time = _from_log(groups, "evaluations", "seconds", "nll")
    if over_steps:
        title = "Validation NLL over steps"
        found.append(line_chart("nll-steps", title, over_steps, looks, steps, nll, reference=reference, cut=True))
    else:
        found.append(left_out("Validation NLL", "no log.jsonl has evaluations"))
    if over_time:
        longest = max(point.x for line in over_time for point in line.points)
        found.append(
            line_chart(
                "nll-time",
                "Validation NLL over training time",
                _rescaled(over_time, _time_unit(longest)[0]),
                looks,
                Axis(f"training time, {_time_unit(longest)[1]}", show=lambda value: form.decimal(value, 2), low=0.0),
                nll,
                reference=reference,
                cut=True,
            )
        )
    elif over_steps:
        found.append(left_out("Validation NLL over time", "the evaluations in log.jsonl have no times"))
    temperature = _from_log(groups, "steps", "step", "temperature")
    if temperature:
        tau = Axis("temperature τ", show=lambda value: form.decimal(value, 3))
        found.append(line_chart("temperature", "Temperature over steps", temperature, looks, steps, tau))
    else:
        found.append(left_out("Temperature over steps", "no log.jsonl has it"))
    return found


def calibration(groups: Sequence[Group], looks: Looks, split: str) -> list[Markup]:
    """Reliability diagrams, and the risk at each coverage."""
    found = []
    items = []
    for group in groups:
        seeds = [(run.seed, bins) for run in group.runs if (bins := _bins(run.curves.get("reliability")))]
        errors = list(group.metrics("calibration_error", split).values())
        if seeds:
            items.append(Reliability(group.label, seeds, mean(errors).value if errors else None))
    if items:
        found.append(reliability_charts("reliability", "Reliability: accuracy at each confidence", items, looks))
    else:
        found.append(left_out("Reliability", "no run has it in curves.json"))
    risk: list[Line] = []
    for group in groups:
        curves = [(run.seed, pairs(_entries(run.curves.get("risk_coverage")), 0, 1)) for run in group.runs]
        risk += lines(group.label, curves)
    if risk:
        show = Axis("share of examples answered", form.percent, _whole, low=0.0, high=1.0)
        errors_axis = Axis("share of them wrong", form.percent, _percent_tick, low=0.0)
        title = "Risk and coverage: errors when only the surest are answered"
        found.append(line_chart("risk-coverage", title, risk, looks, show, errors_axis))
    else:
        found.append(left_out("Risk and coverage", "no run has it in curves.json"))
    return found


def cost(groups: Sequence[Group], looks: Looks, split: str) -> list[Markup]:
    """Parameters against NLL."""
    dots = []
    for group in groups:
        sizes, losses = group.parameters(), list(group.metrics("nll", split).values())
        if sizes and losses and mean(sizes).value > 0:
            average = mean(losses)
            dots.append(Dot(group.label, mean(sizes).value, average.value, average.error))
    if not dots:
        return [left_out("Parameters against NLL", f"no run has both its parameters and its {split} NLL")]
    x = Axis("parameters", form.short_count, form.tick, log=True)
    y = Axis(f"{split} NLL, nats", lambda value: form.decimal(value, 4 if value < 0.1 else 3))
    return [scatter_chart("parameters-nll", f"Parameters against {split} NLL", dots, looks, x, y)]


def frequency(groups: Sequence[Group], looks: Looks, split: str) -> list[Markup]:
    """Accuracy by how frequent a class is, and how many classes are how frequent."""
    found = []
    values = {}
    for group in groups:
        bands = [list(group.metrics(key, split).values()) for key, _ in BANDS]
        if any(bands):
            values[group.label] = [mean(band) if band else None for band in bands]
    if values:
        title = "Accuracy by how frequent the class is"
        names = [name for _, name in BANDS]
        x_title = "classes by their training examples"
        found.append(grouped_bars("bands", title, names, values, looks, "precision@1", x_title))
    else:
        found.append(left_out("Accuracy by class frequency", f"no run has it among its {split} metrics"))
    for run in (run for group in groups for run in group.runs):
        bins = [(int(up), number) for _, up, number in pairs(_entries(run.data.get("frequencies")), 0, 1) if up >= 0]
        if bins and sum(number for _, number in bins) > 0:
            found.append(_frequencies(bins))
            break
    else:
        found.append(left_out("Class frequencies", "no run describes them in its result.json"))
    return found


def _frequencies(bins: Sequence[tuple[int, float]]) -> Markup:
    named, below = [], -1
    for up, number in bins:
        full = str(up) if up - below <= 1 or below < 0 else f"{below + 1:,} to {up:,}"
        if below < 0 and up > 0:
            full = f"up to {up:,}"
        named.append((form.tick(up), full, number))
        below = up
    total = sum(number for _, number in bins)
    most = max(named, key=lambda entry: entry[2])
    told = (
        f"{form.count(total)} classes. Most of them, {form.count(most[2])}, have {most[1]} training examples; "
        f"the most frequent have up to {bins[-1][0]:,}."
    )
    return histogram("frequencies", "How frequent the classes are", named, "training examples, up to", "classes", told)


def _from_log(groups: Sequence[Group], kind: str, x: str, y: str) -> list[Line]:
    found: list[Line] = []
    for group in groups:
        records = [(run.seed, pairs(getattr(run, kind), x, y)) for run in group.runs]
        found += lines(group.label, records)
    return found


def _rescaled(found: Sequence[Line], unit: float) -> list[Line]:
    return [replace(line, points=tuple(replace(p, x=p.x / unit) for p in line.points)) for line in found]


def _time_unit(longest: float) -> tuple[float, str]:
    return (1.0, "s") if longest < 180 else (60.0, "min") if longest < 10_800 else (3600.0, "h")


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _bins(value: Any) -> list[tuple[float, float, float]]:
    found = []
    for entry in _entries(value):
        numbers = [form.finite(number) for number in entry] if isinstance(entry, list) else []
        if len(numbers) == 3 and None not in numbers:
            found.append((numbers[0], numbers[1], numbers[2]))
    return sorted(found)


def _whole(value: float) -> str:
    return form.percent(value, 0)


def _percent_tick(value: float) -> str:
    return f"{form.tick(round(100 * value, 6))}%"
