"""Write the report of contrastive runs: curves, tables, and images never seen with the names they got."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hetxl._files import read_json
from hetxl_train import formatting as form
from hetxl_train.report import html
from hetxl_train.report.charts import Axis, styles
from hetxl_train.report.compare import Group, baseline_label, group_runs
from hetxl_train.report.read import PathLike, Run, find_runs
from hetxl_train.report.render import render
from hetxl_train.report.statistics import mean, paired_test
from hetxl_train.report.tables import as_html, text_table

NOT_WRITTEN = ("curves.json is missing", "confusions.json is missing")
"""Files that runs of classifiers have, and these do not."""
ZERO_SHOT = [
    (f"{names}top-{k}{how}", ("metrics", "test", key, f"{prefix}top{k}"))
    for key, how in (("zero_shot", ""), ("zero_shot_sampled", ", mean over draws"))
    for names, prefix in (("", ""), ("names never seen, ", "unseen_"))
    for k in (1, 5)
]
SWAPS = [
    ("AUROC of the noise", ("swaps", "noise_auroc")),
    ("AUROC of the distance", ("swaps", "distance_auroc")),
    ("pairs swapped", ("swaps", "swapped")),
]


def write_contrastive_report(
    runs: PathLike | Sequence[PathLike], path: PathLike, *, created: datetime | None = None
) -> Path:
    """Write the report of the contrastive runs in some directories; see `write_report`."""
    return html.write_page(path, contrastive_html(find_runs(runs), created=created))


def contrastive_html(runs: Sequence[Run], *, created: datetime | None = None) -> str:
    """Return the report of some contrastive runs as text."""
    for run in runs:
        if run.result and run.result.get("kind") != "contrastive":
            raise ValueError(f"{run.path} is not a contrastive run; use hetxl report")
    runs = [replace(run, problems=tuple(p for p in run.problems if p not in NOT_WRITTEN)) for run in runs]
    groups = group_runs(runs)
    dataset = next((run.dataset for run in runs if run.dataset), None)
    title = f"{form.listed([group.label for group in groups])}, contrastive"
    rows = next((run.data.get("rows") for run in runs if run.data), None)
    sizes = rows.items() if isinstance(rows, dict) else ()
    return render(
        "contrastive.html",
        title=f"{title}, on {dataset}" if dataset else title,
        facts=[
            *(f"{form.count(form.finite(size))} {name} pairs" for name, size in sizes),
            f"{html.created_at(created)} from {form.plural(len(runs), 'run')}",
        ],
        zero_shot=metric_table(groups, ZERO_SHOT, "Zero-shot accuracy"),
        classes=next((value_at(run, "metrics", "test", "zero_shot", "classes") for run in groups[0].runs), None),
        retrieval=[(split, table) for split in ("validation", "test") if (table := _retrieval(groups, split))],
        named=_cards(groups, [("zero_shot", "")]),
        other=[_other(run, result) for group in groups for run in group.runs for result in _zero_shot_results(run)],
        training=_curves(groups, styles(group.label for group in groups)),
        swaps=metric_table(groups, SWAPS, "Finding swapped pairs"),
        noisy=_cards(groups, [("noisiest", "Most noise, "), ("calmest", "Least noise, ")]),
        runs=html.provenance(groups),
    )


def value_at(run: Run, *keys: str) -> float | None:
    """Return a number of a run's result by the keys that lead to it; None if it is missing."""
    value: Any = run.result
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return form.finite(value)


def metric_table(groups: Sequence[Group], columns: Sequence[tuple[str, tuple[str, ...]]], name: str) -> Markup | None:
    """Return means over seeds with their errors, and the p-value of the first column against the baseline, as HTML.

    Columns have a title and the keys of the result that lead to the value. None if no run has any of the values.
    """
    baseline = next((group for group in groups if group.label == baseline_label(groups)), None)
    shown = [(title, keys) for title, keys in columns if any(_values(group, keys) for group in groups)]
    if not shown:
        return None
    rows = [
        (
            group.label,
            *(_percent(list(_values(group, keys).values())) for _, keys in shown),
            _p_value(group, baseline, shown[0][1]),
        )
        for group in groups
    ]
    return as_html(text_table(name, ("head", *(title for title, _ in shown), f"p, {shown[0][0]}"), rows))


def _values(group: Group, keys: Sequence[str]) -> dict[int | None, float]:
    return {run.seed: value for run in group.runs if (value := value_at(run, *keys)) is not None}


def _percent(values: Sequence[float]) -> str:
    average = mean([100 * value for value in values]) if values else None
    return f"{form.with_error(average.value, average.error, 2)} %" if average else form.MISSING


def _p_value(group: Group, baseline: Group | None, keys: Sequence[str]) -> str:
    ours, theirs = (_values(side, keys) if side else {} for side in (group, baseline))
    common = [seed for seed in ours if seed in theirs]
    if baseline is group or len(common) < 2:
        return form.MISSING
    return form.probability(paired_test([ours[seed] for seed in common], [theirs[seed] for seed in common]).p)


def _retrieval(groups: Sequence[Group], split: str) -> Markup | None:
    columns = [
        (f"{title}, recall@{k}", ("metrics", split, f"{direction}@{k}"))
        for direction, title in (("image_to_text", "image to text"), ("text_to_image", "text to image"))
        for k in (1, 5, 10)
    ]
    return metric_table(groups, columns, f"Recall, {split}")


def _zero_shot_results(run: Run) -> list[dict[str, Any]]:
    """Return what `hetxl contrastive zero-shot` has written into a run."""
    results = []
    for path in sorted(run.path.glob("zero-shot-*.json")):
        with suppress(OSError, ValueError):
            results.append(read_json(path, dict))
    return results


def _other(run: Run, result: Mapping[str, Any]) -> tuple[str, Markup, list[dict[str, Any]]]:
    """Return title, table and cards of other labelled data."""
    columns = [("top-1", "top1"), ("top-5", "top5"), ("mean over classes", "mean_per_class"), ("chance", "chance")]
    columns += [
        (f"{title}, recall@{k}", f"{direction}@{k}")
        for direction, title in (("image_to_text", "image to class"), ("text_to_image", "class to image"))
        for k in (1, 5, 10)
    ]
    values = [form.finite(result.get(key)) for _, key in columns]
    row = (run.name, *(form.MISSING if value is None else form.percent(value, 2) for value in values))
    name = f"{result.get('data')}, {result.get('split')}"
    table = as_html(text_table(name, ("run", *(title for title, _ in columns)), [row]))
    cards = [_pair_card(entry) for entry in result.get("examples", ()) if isinstance(entry, dict)]
    return f"{name}: {run.name}", table, cards


def _curves(groups: Sequence[Group], looks: html.Looks) -> html.Charts:
    steps = Axis("steps", show=form.count, low=0.0)
    loss = Axis("loss, nats", show=form.decimal)
    recall = Axis("recall@1", form.percent, form.percent, low=0.0)
    scale = Axis("scale of the logits", show=lambda value: form.decimal(value, 2))
    charts: html.Charts = []
    for ident, title, kind, key, axis in (
        ("loss", "Training loss over steps", "steps", "loss", loss),
        ("recall", "Recall@1, image to text, on validation pairs", "evaluations", "image_to_text@1", recall),
        ("scale", "Learned scale over steps", "steps", "scale", scale),
    ):
        missing, lines = html.Missing(title, "no log.jsonl has it"), html.logged_lines(groups, kind, "step", key)
        charts.append(html.line_figure(missing, ident, title, lines, looks, steps, axis, cut=ident == "loss"))
    return charts


def _cards(groups: Sequence[Group], kinds: Sequence[tuple[str, str]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the examples of some kinds, each with its title, of the first run of each group; noise before DET."""
    order = sorted((group.label for group in groups), key=lambda label: label == "DET")
    return [
        (title + name, [_pair_card(entry) for entry in html.entries_of(run, kind)])
        for _, name, run in html.first_runs(groups, order, lambda run: html.entries_of(run, kinds[0][0]))
        for kind, title in kinds
    ]


def _pair_card(entry: Mapping[str, Any]) -> dict[str, Any]:
    notes = ["a name that no training pair has"] if entry.get("unseen") is True else []
    noise = form.finite(entry.get("noise"))
    return html.make_card(entry, notes=[*notes, *([] if noise is None else [f"noise {form.decimal(noise, 4)}"])])
