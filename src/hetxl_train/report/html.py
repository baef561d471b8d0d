"""Write the report of runs as one HTML file."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hetxl._files import write_bytes
from hetxl_train import formatting as form
from hetxl_train.report import charts as draw
from hetxl_train.report.compare import Group, advice, compare_table, group_runs, verdict
from hetxl_train.report.read import PathLike, Run
from hetxl_train.report.render import render
from hetxl_train.report.statistics import mean
from hetxl_train.report.tables import as_html, text_table

FILE = "report.html"
PAIRS = 20
EXAMPLES = 8
TEXT = 600  # longer texts of examples lose their middle
BANDS = (("accuracy_head", "frequent"), ("accuracy_middle", "middle"), ("accuracy_tail", "rare"))
KINDS = (
    ("most_certain", "Most certain", "lowest entropy first"),
    ("least_certain", "Least certain", "highest entropy first"),
    ("most_wrong", "Confident errors", "labels with the lowest probability; some of them may be wrong"),
)
_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+=*")

Looks = Mapping[str, draw.Style]


@dataclass(frozen=True)
class Missing:
    """A missing part of a report, and the reason."""

    what: str
    why: str


Chart = draw.Figure | Missing
CardEntry = dict[str, Any]
Charts = list[Chart]


def write_report(runs: Sequence[Run], path: PathLike, *, created: datetime | None = None) -> Path:
    """Write the report of runs on the same data atomically, and return its path.

    In a directory, the file is `report.html`. The report shows its time of creation [default: now].
    """
    return write_page(path, report_html(runs, created=created))


def write_page(path: PathLike, text: str) -> Path:
    """Write a page atomically, as `report.html` if the path is a directory, and return its path."""
    target = Path(path)
    target = target / FILE if target.is_dir() else target
    write_bytes(target, text.encode())
    return target


def report_html(runs: Sequence[Run], *, created: datetime | None = None) -> str:
    """Return the report of runs as text."""
    groups, table = group_runs(runs), compare_table(runs)
    looks = draw.styles(group.label for group in groups)
    order = [row.label for row in sorted(table.heads, key=table.nll)]
    dataset = next((run.dataset for run in runs if run.dataset), None)
    heads = form.listed([group.label for group in groups]) if len(groups) <= 4 else f"{len(groups)} heads"
    named = [group.label + (f" × {len(group.runs)}" if len(group.runs) > 1 else "") for group in groups]
    return render(
        "report.html",
        title=f"{heads} on {dataset}" if dataset else heads,
        facts=[*data_facts(runs), _origin(runs, created)],
        names=form.listed(named),
        # Numbers stay together where lines break.
        advice=advice(table),
        verdict=re.sub(" ([±<=]) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", verdict(table)),
        table=as_html(table, style="comparison"),
        several_seeds=any(len(group.runs) > 1 for group in groups),
        training=training(groups, looks),
        cost=cost(groups, looks, table.split),
        calibration=calibration(groups, looks, table.split),
        frequency=frequency(groups, looks, table.split),
        confusions=confusions(groups, order),
        examples=examples(groups, order),
        runs=provenance(groups),
    )


def data_facts(runs: Sequence[Run]) -> list[str]:
    """Return classes and rows, from the first run that describes its data."""
    data = next((run.data for run in runs if run.data), {})
    classes, rows = form.finite(data.get("classes")), data.get("rows")
    facts = [] if classes is None else [f"{form.count(classes)} classes"]
    if isinstance(rows, dict):
        sizes = {str(name): form.finite(size) for name, size in rows.items()}
        names = {"train": "training"}
        parts = [f"{form.count(size)} {names.get(name, name)}" for name, size in sizes.items() if size]
        facts += [f"{form.listed(parts)} examples"] if parts else []
    return facts


def _origin(runs: Sequence[Run], created: datetime | None) -> str:
    unfinished = sum(not run.finished for run in runs)
    going = f", {unfinished} of them not finished" if unfinished else ""
    if len(runs) == unfinished == 1:
        going = " that is not finished"
    return f"{created_at(created)} from {form.plural(len(runs), 'run')}{going}"


def created_at(created: datetime | None) -> str:
    """Format the time of creation of a page [default: now]."""
    created = created or datetime.now(timezone.utc)
    return f"created {created:%Y-%m-%d %H:%M} {created:%Z}"


def logged_lines(groups: Sequence[Group], kind: str, x: str, y: str) -> list[draw.Line]:
    """Return the lines of all groups from the records of their logs: "steps" or "evaluations"."""
    lines: list[draw.Line] = []
    for group in groups:
        runs = [(run.seed, draw.pairs(getattr(run, kind), x, y)) for run in group.runs]
        lines += draw.lines_over_seeds(group.label, runs)
    return lines


def line_figure(missing: Missing, ident: str, title: str, lines: Sequence[draw.Line], *rest: Any, **more: Any) -> Chart:
    """Draw lines, or say what is missing if there are none; the other arguments are those of `line_chart`."""
    return draw.line_chart(ident, title, lines, *rest, **more) if lines else missing


def training(groups: Sequence[Group], looks: Looks) -> Charts:
    """Draw validation NLL over steps and over time, and the temperature over steps."""
    nll = draw.Axis("NLL, nats", show=form.decimal)
    steps = draw.Axis("steps", show=form.count, low=0.0)
    best_nll = [value for group in groups for value in group.values("best_nll")]
    options = {"levels": {"true model": best_nll[0]} if best_nll else {}, "cut": True}
    over_steps = logged_lines(groups, "evaluations", "step", "nll")
    over_time = logged_lines(groups, "evaluations", "seconds", "nll")
    missing = Missing("Validation NLL", "no log.jsonl has evaluations")
    charts = [line_figure(missing, "nll-steps", "Validation NLL over steps", over_steps, looks, steps, nll, **options)]
    if over_time:
        longest = max(point.x for line in over_time for point in line.points)
        unit, name = (1.0, "s") if longest < 180 else (60.0, "min") if longest < 10_800 else (3600.0, "h")
        scaled = [replace(line, points=tuple(replace(p, x=p.x / unit) for p in line.points)) for line in over_time]
        time = draw.Axis(f"training time, {name}", show=lambda value: form.decimal(value, 2), low=0.0)
        title = "Validation NLL over training time"
        charts.append(draw.line_chart("nll-time", title, scaled, looks, time, nll, **options))
    elif over_steps:
        charts.append(Missing("Validation NLL over time", "the evaluations in log.jsonl have no times"))
    title, tau = "Temperature over steps", draw.Axis("temperature τ", show=form.decimal)
    temperature = logged_lines(groups, "steps", "step", "temperature")
    missing = Missing(title, "no log.jsonl has it")
    return [*charts, line_figure(missing, "temperature", title, temperature, looks, steps, tau)]


def calibration(groups: Sequence[Group], looks: Looks, split: str) -> Charts:
    """Draw reliability diagrams, and the risk at each coverage."""
    items, risk = [], []
    for group in groups:
        seeds = [(run.seed, bins) for run in group.runs if (bins := _bins(run.curves.get("reliability")))]
        errors = list(group.metrics("calibration_error", split).values())
        if seeds:
            items.append(draw.Reliability(group.label, seeds, mean(errors).value if errors else None))
        curves = [(run.seed, draw.pairs(_entries(run.curves.get("risk_coverage")), 0, 1)) for run in group.runs]
        risk += draw.lines_over_seeds(group.label, curves)
    diagrams = Missing("Reliability", "no run has it in curves.json")
    if items:
        diagrams = draw.reliability_charts("reliability", "Reliability: accuracy at each confidence", items, looks)
    coverage = draw.Axis("share of examples answered", form.percent, lambda v: form.percent(v, 0), low=0.0, high=1.0)
    wrong = draw.Axis("share of them wrong", form.percent, lambda v: f"{form.tick(round(100 * v, 6))}%", low=0.0)
    title = "Risk and coverage: error rate of the most confident answers"
    missing = Missing("Risk and coverage", "no run has it in curves.json")
    return [diagrams, line_figure(missing, "risk-coverage", title, risk, looks, coverage, wrong)]


def cost(groups: Sequence[Group], looks: Looks, split: str) -> Charts:
    """Draw parameters against NLL."""
    dots = []
    for group in groups:
        sizes, losses = group.parameters(), list(group.metrics("nll", split).values())
        if sizes and losses and mean(sizes).value > 0:
            average = mean(losses)
            dots.append(draw.Dot(group.label, mean(sizes).value, average.value, average.error))
    if not dots:
        return [Missing("Parameters against NLL", f"no run has both its parameters and its {split} NLL")]
    x = draw.Axis("parameters", form.short_count, form.tick, log=True)
    y = draw.Axis(f"{split} NLL, nats", lambda value: form.decimal(value, 4 if value < 0.1 else 3))
    return [draw.scatter_chart("parameters-nll", f"Parameters against {split} NLL", dots, looks, x, y)]


def frequency(groups: Sequence[Group], looks: Looks, split: str) -> Charts:
    """Draw accuracy by class frequency, and a histogram of class frequencies."""
    charts: Charts = []
    values = {}
    for group in groups:
        bands = [list(group.metrics(key, split).values()) for key, _ in BANDS]
        if any(bands):
            values[group.label] = [mean(band) if band else None for band in bands]
    if values:
        title, x_title = "Accuracy by class frequency", "classes by their training examples"
        charts.append(draw.grouped_bars("bands", title, [n for _, n in BANDS], values, looks, "accuracy", x_title))
    else:
        charts.append(Missing("Accuracy by class frequency", f"no run has it among its {split} metrics"))
    for run in (run for group in groups for run in group.runs):
        bins = [
            (int(up), number) for _, up, number in draw.pairs(_entries(run.data.get("frequencies")), 0, 1) if up >= 0
        ]
        if bins and sum(number for _, number in bins) > 0:
            charts.append(_frequencies(bins))
            break
    else:
        charts.append(Missing("Class frequencies", "no run describes them in its result.json"))
    return charts


def _frequencies(bins: Sequence[tuple[int, float]]) -> draw.Figure:
    named, below = [], -1
    for up, number in bins:
        full = str(up) if up - below <= 1 or below < 0 else f"{below + 1:,} to {up:,}"
        if below < 0 and up > 0:
            full = f"up to {up:,}"
        named.append((form.tick(up), full, number))
        below = up
    most = max(named, key=lambda entry: entry[2])
    description = (
        f"{form.count(sum(number for _, number in bins))} classes. Most of them, {form.count(most[2])}, have {most[1]} "
        f"training examples; the most frequent have up to {bins[-1][0]:,}."
    )
    title = "Class frequencies"
    return draw.histogram("frequencies", title, named, "training examples, up to", "classes", description)


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _bins(value: Any) -> list[tuple[float, float, float]]:
    return draw.pairs((entry for entry in _entries(value) if isinstance(entry, list) and len(entry) == 3), 1, 2)


def first_runs(
    groups: Sequence[Group], order: Sequence[str], has: Callable[[Run], object]
) -> list[tuple[str, str, Run]]:
    """Return the first run of each label that has something: label, label with the seed, and run; ordered by label."""
    ranked = sorted(groups, key=lambda group: order.index(group.label) if group.label in order else len(order))
    firsts = [(group.label, next((run for run in group.runs if has(run)), None)) for group in ranked]
    return [
        (label, label if run.seed is None else f"{label}, seed {run.seed}", run)
        for label, run in firsts
        if run is not None
    ]


def confusions(groups: Sequence[Group], order: Sequence[str]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return the pairs of classes with the most correlated noise by label, with the confusions between them."""
    firsts = first_runs(groups, order, lambda run: any(map(_correlated, run.confusions)))
    return [
        (name, label, [_pair(pair, run) for pair in run.confusions if _correlated(pair)][:PAIRS])
        for label, name, run in firsts
    ]


def _correlated(pair: Mapping[str, Any]) -> bool:
    return form.finite(pair.get("correlation")) not in (None, 0.0) and "first" in pair and "second" in pair


def _pair(pair: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return a pair with its numbers, and the rows and examples of its confusions."""
    numbers = {key: form.finite(pair.get(key)) for key in ("correlation", "examples", "confused", "confused_share")}
    names = pair["first"], pair["second"]
    behind = [entry for entry in entries_of(run, "confused") if (entry.get("first"), entry.get("second")) == names]
    shown = [entry for entry in _entries(behind[0].get("examples")) if isinstance(entry, dict)] if behind else []
    rows = [row for row in _entries(behind[0].get("rows")) if isinstance(row, int)] if behind else []
    ident = "confused-" + hashlib.sha256(repr((run.name, *names)).encode()).hexdigest()[:12]
    own = {"first": names[0], "second": names[1], "ident": ident, "rows": rows}
    return own | numbers | {"cards": [_example(entry) for entry in shown]}


def make_card(entry: Mapping[str, Any], *, prefix: str = "", alt: str = "", notes: Sequence[str] = ()) -> CardEntry:
    """Return an entry of examples.json for the template of cards, without invalid values.

    The prefix precedes the label; `alt` precedes the label in the description of the image.
    """
    names = entry.get("label")
    label = form.listed([str(name) for name in names]) if isinstance(names, list) else str(names or "")
    texts = {key: value if isinstance(value := entry.get(key), str) else "" for key in ("image", "text", "path")}
    mark = "swapped" if entry.get("swapped") is True else ""
    if isinstance(entry.get("hit"), bool):
        mark = "right" if entry["hit"] else "wrong"
    shares = [pair for pair in _entries(entry.get("top")) if isinstance(pair, list) and len(pair) == 2]
    top = [(str(name), share) for name, value in shares if (share := form.finite(value)) is not None][:3]
    image = texts["image"] if _IMAGE.fullmatch(texts["image"]) else ""
    card = {"label": label, "prefix": prefix, "alt": alt + label, "mark": mark, "top": top, "notes": notes}
    return card | {"image": image, "text": shortened(texts["text"]), "path": texts["path"]}


def shortened(text: str, limit: int = TEXT) -> str:
    """Shorten a text to at most about `limit` characters, by omitting its middle."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-(limit // 2) :]}"


def entries_of(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return the examples of one kind."""
    return [entry for entry in _entries(run.examples.get(kind)) if isinstance(entry, dict)]


def examples(groups: Sequence[Group], order: Sequence[str]) -> list[tuple[str, Any]]:
    """Return test examples by label: the most certain, the least certain and the confident errors."""
    firsts = first_runs(groups, order, lambda run: any(entries_of(run, kind) for kind, _, _ in KINDS))
    return [
        (
            name,
            [
                (title, what, [_example(entry) for entry in entries[:EXAMPLES]])
                for kind, title, what in KINDS
                if (entries := entries_of(run, kind))
            ],
        )
        for _, name, run in firsts
    ]


def _example(entry: Mapping[str, Any]) -> CardEntry:
    entropy = form.finite(entry.get("entropy"))
    notes = [] if entropy is None else [f"entropy {form.decimal(entropy, 2)} nats"]
    return make_card(entry, prefix="label ", alt=f"example {entry.get('row', '')}, labelled ", notes=notes)


def provenance(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the runs with their missing files, notes on the data, and the configurations."""
    runs = [(group.label, run) for group in groups for run in group.runs]
    rows = [
        (
            run.name,
            label,
            form.MISSING if run.seed is None else str(run.seed),
            form.count(run.value("steps")),
            form.count(run.value("examples")),
            "; ".join(run.problems) or "nothing",
        )
        for label, run in runs
    ]
    header = ("run", "head", "seed", "steps", "examples", "missing")
    notes = [str(note) for _, run in runs for note in _entries(run.data.get("notes"))]
    return {
        "table": as_html(text_table("Runs", header, rows), style="plain"),
        "notes": list(dict.fromkeys(notes)),
        "configurations": [
            (run.name, json.dumps(run.config, indent=2, ensure_ascii=False, default=str))
            for _, run in runs
            if run.config
        ],
    }
