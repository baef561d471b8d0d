"""The parts of a report without plots: pairs of classes, examples, and the runs it was made from."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetxl.report import format as form
from hetxl.report.groups import Group
from hetxl.report.markup import Markup, join, tag
from hetxl.report.read import Run
from hetxl.report.render import scrolling
from hetxl.report.sections import left_out

PAIRS = 20
EXAMPLES = 8
TEXT = 600
"""Longer texts of examples lose their middle."""
KINDS = (
    ("most_certain", "Most certain", "lowest entropy first"),
    ("least_certain", "Least certain", "highest entropy first"),
    ("most_wrong", "Confident errors", "the head finds these labels least probable: some may be wrong themselves"),
)
LEAD = (
    "Pairs that are often likely together. Near −1 the noise trades one for the other: the head takes the example for "
    "either. Near +1 they rise and fall together. Beside it, how often one was predicted for the other."
)
_PICTURE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+=*")


def confusions(groups: Sequence[Group], order: Sequence[str]) -> list[Markup]:
    """The pairs of classes whose noise is most correlated, with the confusions between them.

    Args:
        groups: the runs.
        order: labels, that of the table to show first at the front; the others are folded away.
    """
    tables = []
    for label, run in _first_runs(groups, order, lambda run: any(_correlated(pair) for pair in run.confusions)):
        pairs = [pair for pair in run.confusions if _correlated(pair)][:PAIRS]
        tables.append((f"{label}{_seed(run)}", _pair_table(label, pairs)))
    if not tables:
        return [left_out("Pairs of classes", "no run has learned correlations in confusions.json")]
    (name, first), rest = tables[0], tables[1:]
    folded = [tag("details", tag("summary", f"Pairs of {other}"), table) for other, table in rest]
    return [tag("p", LEAD, class_="note"), tag("h3", name), first, *folded]


def examples(groups: Sequence[Group], order: Sequence[str]) -> list[Markup]:
    """Test examples with what one head says of them: the surest, the least sure and the confident errors.

    Args:
        groups: the runs.
        order: labels, that of the head to show first at the front; the others are folded away.
    """
    blocks = []
    for label, run in _first_runs(groups, order, lambda run: any(_examples(run, kind) for kind, _, _ in KINDS)):
        parts = []
        for kind, title, what in KINDS:
            found = _examples(run, kind)
            if found:
                cards = tag("div", *(_card(entry) for entry in found[:EXAMPLES]), class_="cards")
                parts.append(join([tag("h4", title, tag("span", f" {what}", class_="error")), cards]))
        blocks.append((f"{label}{_seed(run)}", join(parts)))
    if not blocks:
        return [left_out("Examples", "no run has examples.json")]
    (name, first), rest = blocks[0], blocks[1:]
    folded = [tag("details", tag("summary", f"Examples of {other}"), block) for other, block in rest]
    return [tag("h3", name), first, *folded]


def provenance(groups: Sequence[Group]) -> list[Markup]:
    """The runs with what is missing from them, notes on the data, and the configurations."""
    header = ("run", "head", "seed", "steps", "examples", "missing")
    rows = []
    runs = [(group.label, run) for group in groups for run in group.runs]
    for label, run in runs:
        seed = form.MISSING if run.seed is None else str(run.seed)
        numbers = (form.count(run.value("steps")), form.count(run.value("examples")))
        missing = "; ".join(run.problems) or "nothing"
        cells = (label, seed, *numbers, missing)
        rows.append(tag("tr", tag("th", run.name, scope="row"), *(tag("td", cell) for cell in cells)))
    head = tag("tr", *(tag("th", name, scope="col") for name in header))
    listing = scrolling(tag("table", tag("thead", head), tag("tbody", *rows), class_="plain"), "Runs")
    found = [listing]
    notes = list(dict.fromkeys(note for _, run in runs for note in _notes(run)))
    if notes:
        body = tag("ul", *(tag("li", note) for note in notes))
        found.append(tag("details", tag("summary", "Notes on the data"), body))
    configurations = []
    for _, run in runs:
        if run.config:
            text = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
            configurations.append(tag("details", tag("summary", run.name), tag("pre", text)))
    if configurations:
        found.append(tag("details", tag("summary", "Configurations"), *configurations))
    return found


def _first_runs(groups: Sequence[Group], order: Sequence[str], has: Any) -> list[tuple[str, Run]]:
    """Of each label the first run that has something, in order."""
    ranked = sorted(groups, key=lambda group: order.index(group.label) if group.label in order else len(order))
    found = []
    for group in ranked:
        run = next((run for run in group.runs if has(run)), None)
        if run is not None:
            found.append((group.label, run))
    return found


def _seed(run: Run) -> str:
    return "" if run.seed is None else f", seed {run.seed}"


def _correlated(pair: Mapping[str, Any]) -> bool:
    return form.finite(pair.get("correlation")) not in (None, 0.0) and "first" in pair and "second" in pair


def _pair_table(label: str, pairs: Sequence[Mapping[str, Any]]) -> Markup:
    header = ("both in the top 5", "confused", "of their errors")
    rows = []
    for pair in pairs:
        correlation = form.finite(pair.get("correlation")) or 0.0
        names = tag("span", pair["first"], " ~ ", pair["second"], class_="name")
        cells = (
            tag("td", _correlation_bar(correlation), class_="bar-cell"),
            tag("td", form.decimal(correlation, 2, sign=True)),
            tag("td", form.count(form.finite(pair.get("examples")))),
            tag("td", form.count(form.finite(pair.get("confused")))),
            tag("td", form.percent(form.finite(pair.get("confused_share")), 0)),
        )
        rows.append(tag("tr", tag("th", names, scope="row"), *cells))
    start = (tag("th", "classes", scope="col"), tag("th", "correlation", scope="col", colspan=2))
    head = tag("tr", *start, *(tag("th", name, scope="col") for name in header))
    return scrolling(
        tag("table", tag("thead", head), tag("tbody", *rows), class_="pairs"), f"Pairs of classes, {label}"
    )


def _correlation_bar(correlation: float) -> Markup:
    """From the middle to the left for negative, to the right for positive."""
    width = 40 * min(abs(correlation), 1)
    start = 41 if correlation > 0 else 41 - width
    bar = tag(
        "rect",
        x=f"{start:.1f}",
        y=3,
        width=f"{width:.1f}",
        height=8,
        class_="negative" if correlation < 0 else "positive",
    )
    middle = tag("path", d="M41 0v14", class_="axis")
    return tag("svg", bar, middle, width=82, height=14, viewbox="0 0 82 14", aria_hidden="true")


def _examples(run: Run, kind: str) -> list[dict[str, Any]]:
    found = run.examples.get(kind)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _card(entry: Mapping[str, Any]) -> Markup:
    """One example: what it is, its label, and what the head says."""
    hit = entry.get("hit")
    label = entry.get("label")
    names = form.listed([str(name) for name in label]) if isinstance(label, list) else str(label)
    parts = []
    image, text, path = entry.get("image"), entry.get("text"), entry.get("path")
    if isinstance(image, str) and _PICTURE.fullmatch(image):
        parts.append(tag("img", src=image, alt=f"example {entry.get('row', '')}, labelled {names}"))
    if isinstance(text, str) and text:
        parts.append(tag("pre", shortened(text)))
    if isinstance(path, str) and path:
        parts.append(tag("p", path, class_="path"))
    mark = None
    if isinstance(hit, bool):
        mark = tag("span", "right" if hit else "wrong", class_="right" if hit else "wrong")
    parts.append(tag("p", "label ", tag("b", names or form.MISSING), " ", mark, class_="label"))
    parts.append(tag("ul", *_top(entry.get("top")), class_="top"))
    entropy = form.finite(entry.get("entropy"))
    if entropy is not None:
        parts.append(tag("p", f"entropy {form.decimal(entropy, 2)} nats", class_="note"))
    return tag("div", *parts, class_="card")


def _top(top: Any) -> list[Markup]:
    found = []
    for entry in top if isinstance(top, list) else []:
        if isinstance(entry, list) and len(entry) == 2 and (share := form.finite(entry[1])) is not None:
            width = f"{100 * min(max(share, 0), 1):.1f}%"
            name = tag("span", str(entry[0]), class_="name", title=str(entry[0]))
            bar = tag("span", style=f"width:{width}", class_="share")
            found.append(tag("li", bar, name, tag("span", form.percent(share), class_="number")))
    return found[:3]


def shortened(text: str, limit: int = TEXT) -> str:
    """A text of at most about `limit` characters, its middle left out if need be."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} … {text[-(limit // 2) :]}"


def _notes(run: Run) -> list[str]:
    notes = run.data.get("notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []
