"""The report of contrastive runs: one HTML file with curves, tables, and pictures never seen with the names given."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hetxl.data.build.files import write_whole
from hetxl.report import format as form
from hetxl.report.charts import Axis, line_chart
from hetxl.report.contrastive_examples import named_pictures, noisy_pairs
from hetxl.report.details import provenance
from hetxl.report.groups import Group, baseline_label, group_runs
from hetxl.report.lines import lines, pairs
from hetxl.report.markup import Markup, join, tag
from hetxl.report.page import page, section
from hetxl.report.palette import styles
from hetxl.report.read import PathLike, Run, find_runs
from hetxl.report.render import scrolling
from hetxl.report.sections import Looks, left_out
from hetxl.report.statistics import mean, paired_test

FILE = "report.html"
NOT_WRITTEN = ("curves.json is missing", "confusions.json is missing")
"""Files that runs of classifiers have, and these do not."""


def write_contrastive_report(
    runs: PathLike | Sequence[PathLike], path: PathLike, *, made: datetime | None = None
) -> Path:
    """Write the report of some contrastive runs, whole or not at all.

    Args:
        runs: directories, at least one, all of the same data.
        path: the file to write, or a directory to write `report.html` into.
        made: the time to name in it; now without.

    Returns:
        The file.
    """
    target = Path(path)
    target = target / FILE if target.is_dir() else target
    content = contrastive_html(find_runs(runs), made=made).encode("utf-8", "replace")
    write_whole(target, lambda temporary: temporary.write_bytes(content))
    return target


def contrastive_html(runs: Sequence[Run], *, made: datetime | None = None) -> str:
    """The report of some contrastive runs as text.

    Args:
        runs: at least one, all of the same data.
        made: the time to name in it; now without.
    """
    for run in runs:
        if run.result and run.result.get("kind") != "contrastive":
            raise ValueError(f"{run.path} is not a contrastive run; use hetxl report")
    kept = [_without_problems(run) for run in runs]
    groups = group_runs(kept)
    looks = styles([group.label for group in groups])
    title = f"{form.listed([group.label for group in groups])}, contrastive"
    dataset = next((run.dataset for run in kept if run.dataset), None)
    title = f"{title}, on {dataset}" if dataset else title
    return page(
        title,
        _header(title, kept, made or datetime.now(timezone.utc)),
        section("zero-shot", "Zero-shot classification", *_zero_shot(groups)),
        section("retrieval", "Retrieval", *_retrieval(groups)),
        section("pictures", "Pictures never seen", *named_pictures(groups)),
        section("training", "Training", *_curves(groups, looks), plots=True),
        section("noise", "Noise of pairs", *_swaps(groups), *noisy_pairs(groups)),
        section("runs", "Runs, configuration and notes", *provenance(groups)),
    )


def _without_problems(run: Run) -> Run:
    return replace(run, problems=tuple(problem for problem in run.problems if problem not in NOT_WRITTEN))


def _header(title: str, runs: Sequence[Run], made: datetime) -> Markup:
    facts = []
    rows = next((run.data.get("rows") for run in runs if run.data), None)
    if isinstance(rows, dict):
        facts += [f"{form.count(form.finite(size))} {name} pairs" for name, size in rows.items()]
    facts.append(f"made {made:%Y-%m-%d %H:%M} {made:%Z} from {form.plural(len(runs), 'run')}")
    return tag("header", tag("h1", title), tag("p", join([tag("span", fact) for fact in facts], " · "), class_="facts"))


def value_at(run: Run, *keys: str) -> float | None:
    """A number of a run's result by the keys that lead to it; None where there is none."""
    found: Any = run.result
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return form.finite(found)


def metric_table(groups: Sequence[Group], columns: Sequence[tuple[str, tuple[str, ...]]], name: str) -> Markup | None:
    """Means over seeds with their errors, and the p-value of the first column against the baseline.

    Args:
        groups: of runs.
        columns: titles, and the keys of the result that lead to the value.
        name: what the table is.

    Returns:
        None if no run has any of the values.
    """
    baseline = baseline_label(groups)
    by_group = {group.label: group for group in groups}
    shown = [(title, keys) for title, keys in columns if any(_values(group, keys) for group in groups)]
    if not shown:
        return None
    rows = []
    for group in groups:
        cells = []
        for _, keys in shown:
            values = list(_values(group, keys).values())
            cells.append(tag("td", _percent(values)))
        cells.append(tag("td", _p_value(group, by_group.get(baseline or ""), shown[0][1])))
        rows.append(tag("tr", tag("th", group.label, scope="row"), *cells))
    titles = ("head", *(title for title, _ in shown), f"p, {shown[0][0]}")
    head = tag("tr", *(tag("th", title, scope="col") for title in titles))
    return scrolling(tag("table", tag("thead", head), tag("tbody", *rows)), name)


def _values(group: Group, keys: Sequence[str]) -> dict[int | None, float]:
    found = {run.seed: value_at(run, *keys) for run in group.runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _percent(values: Sequence[float]) -> str:
    if not values:
        return form.MISSING
    found = mean(values)
    error = "" if found.error is None else f" ± {form.decimal(100 * found.error, 2)}"
    return f"{form.decimal(100 * found.value, 2)}{error} %"


def _p_value(group: Group, baseline: Group | None, keys: Sequence[str]) -> str:
    if baseline is None or baseline is group:
        return form.MISSING
    ours, theirs = _values(group, keys), _values(baseline, keys)
    common = [seed for seed in ours if seed in theirs]
    if len(common) < 2:
        return form.MISSING
    return form.probability(paired_test([ours[seed] for seed in common], [theirs[seed] for seed in common]).p)


def _zero_shot(groups: Sequence[Group]) -> list[Markup]:
    columns = []
    for key, how in (("zero_shot", ""), ("zero_shot_sampled", ", mean over draws")):
        start = ("metrics", "test", key)
        columns += [(f"top-{k}{how}", (*start, f"top{k}")) for k in (1, 5)]
        columns += [(f"names never seen, top-{k}{how}", (*start, f"unseen_top{k}")) for k in (1, 5)]
    table = metric_table(groups, columns, "Zero-shot accuracy")
    if table is None:
        return [left_out("Zero-shot accuracy", "no run has it in its result.json")]
    classes = next((value_at(run, "metrics", "test", "zero_shot", "classes") for run in groups[0].runs), None)
    told = (
        "Every different text of the test pairs is a class; its row of the classifier is the embedding of its prompts."
    )
    if classes:
        told += f" {form.count(classes)} classes: chance is {form.percent(1 / classes, 3)}."
    return [tag("p", told, class_="note"), table]


def _retrieval(groups: Sequence[Group]) -> list[Markup]:
    found = []
    for split in ("validation", "test"):
        columns = [
            (f"{title}, recall@{k}", ("metrics", split, f"{way}@{k}"))
            for way, title in (("image_to_text", "image to text"), ("text_to_image", "text to image"))
            for k in (1, 5, 10)
        ]
        table = metric_table(groups, columns, f"Recall, {split}")
        if table is not None:
            found += [tag("h3", f"{split.capitalize()} pairs"), table]
    return found or [left_out("Retrieval", "no run has it in its result.json")]


def _swaps(groups: Sequence[Group]) -> list[Markup]:
    columns = [
        ("AUROC of the noise", ("swaps", "noise_auroc")),
        ("AUROC of the distance", ("swaps", "distance_auroc")),
        ("pairs swapped", ("swaps", "swapped")),
    ]
    table = metric_table(groups, columns, "Finding swapped pairs")
    if table is None:
        return []
    told = (
        "How well a score tells training pairs whose texts were swapped from the others; 50 % is chance. The distance "
        "is one minus the similarity of the two embeddings, which needs no noise."
    )
    return [tag("p", told, class_="note"), table]


def _curves(groups: Sequence[Group], looks: Looks) -> list[Markup]:
    steps = Axis("steps", show=form.count, low=0.0)
    number = Axis("loss, nats", show=lambda value: form.decimal(value, 3))
    share = Axis("recall@1", form.percent, form.percent, low=0.0)
    scale = Axis("scale of the logits", show=lambda value: form.decimal(value, 2))
    wanted = (
        ("loss", "Training loss over steps", "steps", "loss", number),
        ("recall", "Recall@1, image to text, on validation pairs", "evaluations", "image_to_text@1", share),
        ("scale", "Learned scale over steps", "steps", "scale", scale),
    )
    found = []
    for ident, title, kind, key, axis in wanted:
        drawn = [
            line
            for group in groups
            for line in lines(group.label, [(run.seed, pairs(getattr(run, kind), "step", key)) for run in group.runs])
        ]
        if drawn:
            found.append(line_chart(ident, title, drawn, looks, steps, axis, cut=ident == "loss"))
        else:
            found.append(left_out(title, "no log.jsonl has it"))
    return found
