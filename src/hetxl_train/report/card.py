"""The model card of a run: intended use, data, metrics, confusions and limits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetxl._files import read_checked, read_json, reading
from hetxl.integrations.hub import front_matter
from hetxl.registry import HEAD_LABELS, METRIC_ENTRIES
from hetxl_train import formatting as form
from hetxl_train.report.html import data_facts
from hetxl_train.report.read import Run, read_run
from hetxl_train.report.tables import as_markdown, text_table

PAIRS = 10
"""Maximum number of confused pairs in a card."""
TASKS = {"image": "image-classification", "text": "text-classification", "tokens": "text-classification"}
"""The hub's task by kind of input; other kinds have none."""


def model_card(run: str | Path, *, license: str | None = None) -> str:
    """Return the card of a finished run in markdown, with front matter for the hub.

    Args:
        license: identifier of a license in the hub's list, such as "apache-2.0"; None for no license.
    """
    read = read_run(run)
    if not read.finished:
        raise ValueError(f"{read.path} has no result yet; let hetxl train finish it")
    if damaged := [problem for problem in read.problems if not problem.endswith("is missing")]:
        raise ValueError(f"{read.path} is damaged: {'; '.join(damaged)}. Restore its files or train again")
    about = read_json(read.path / "model.json", dict)
    with reading(read.path, "restore its files or train again"):
        return _text(read, about, license)


def _text(read: Run, about: dict[str, Any], license: str | None) -> str:
    calibrated = read.path / "calibration.json"
    split = "test" if read.metrics("test") else "validation"
    kind = str(about["input"]["kind"])
    head = HEAD_LABELS.get(read.head or "", read.head)
    parts = [
        front_matter(_facts(read, split, kind, license)),
        f"# {head} on {read.dataset}\n",
        f"A classifier of {len(about['class_names']):,} classes with a {head} head of hetxl. It returns probabilities "
        "together with how uncertain they are, and which part of that comes from noise in the labels.\n",
        _use(kind, about["link"]),
        _data(read),
        _metrics(read, split),
        _calibration(read_checked(calibrated, "run hetxl calibrate again") if calibrated.exists() else {}),
        _confusions(read),
        _limits(read, about),
    ]
    return "\n".join(part for part in parts if part)


def _facts(run: Run, split: str, kind: str, license: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"library_name": "hetxl", "tags": ["hetxl", run.head, "uncertainty", "noisy-labels"]}
    if license is not None:
        facts["license"] = license
    if kind in TASKS:
        metrics = run.metrics(split)
        names = {"precision@1": "accuracy", "nll": "nll", "calibration_error": "calibration_error"}
        values = [{"type": name, "value": metrics[key]} for key, name in names.items() if key in metrics]
        data = {"type": run.dataset, "name": run.dataset, "split": split}
        result = {"task": {"type": TASKS[kind]}, "dataset": data, "metrics": values}
        facts["pipeline_tag"] = TASKS[kind]
        facts["model-index"] = [{"name": run.name, "results": [result]}]
    return facts


def _use(kind: str, link: str) -> str:
    answer = "one label" if link == "softmax" else "any number of labels"
    return f"""## Intended use

Inputs of the kind that it was trained on ({kind}), each with {answer} of its classes. Use the entropy and the
prediction sets to decide which answers a person checks. Not for inputs of other kinds or other classes: every input is
assigned to a known class.

```python
from hetxl_train.hub import from_pretrained

trained = from_pretrained("owner/name")
features = trained.model.backbone(inputs)
prediction = trained.model.head.predict(features, top_k=1)
```
"""


def _data(run: Run) -> str:
    facts = "".join(f"- {fact}\n" for fact in [f"Data: {run.dataset}", *data_facts([run])])
    each = run.data.get("examples_per_class")
    if isinstance(each, dict):
        low, middle, high = (form.count(form.finite(each.get(key))) for key in ("min", "median", "max"))
        facts += f"- Training examples of a class: {low} at least, {middle} in the median, {high} at most\n"
    duplicates = run.data.get("duplicates")
    across = duplicates.get("across") if isinstance(duplicates, dict) else None
    for name, number in across.items() if isinstance(across, dict) else ():
        if number:
            facts += f"- Duplicates, {name}: {form.count(form.finite(number))}\n"
    notes = run.data.get("notes")
    for note in notes if isinstance(notes, list) else ():
        facts += f"- {note}\n"
    return f"## Data\n\n{facts}"


def _metrics(run: Run, split: str) -> str:
    metrics = run.metrics(split)
    rows = [("NLL", form.with_error(metrics.get("nll"), metrics.get("nll_standard_error")))]
    for entry in METRIC_ENTRIES:
        if entry.name in metrics:
            value = metrics[entry.name]
            rows.append((entry.title, form.percent(value) if entry.percent else form.decimal(value, entry.digits)))
    for band in ("head", "middle", "tail"):
        if f"accuracy_{band}" in metrics:
            rows.append((f"accuracy, {_BANDS[band]} classes", form.percent(metrics[f"accuracy_{band}"])))
    examples = form.count(metrics.get("examples"))
    table = as_markdown(text_table("Metrics", ("metric", "value"), rows))
    return (
        f"## Metrics\n\nOn the {examples} examples of the {split} split, against their labels as they are:\n\n{table}\n"
    )


_BANDS = {"head": "frequent", "middle": "less frequent", "tail": "rare"}


def _calibration(about: Mapping[str, Any]) -> str:
    lines = []
    if "coverage" in about:
        how = f"{about['score']['kind']} score, {about['grouping']} thresholds, {about['examples']:,} examples"
        lines.append(f"Prediction sets hold the label of at least {about['coverage']:.0%} of new examples ({how}).")
    if isinstance(about.get("test"), dict):
        test = about["test"]
        lines.append(
            f"On the test split they hold {test['coverage']:.1%}, with {test['set_size']:.2f} classes on average."
        )
    if about.get("risk") is not None:
        lines.append(f"Answers of an error rate of at most {about['risk']:g}: {about['answered']:.1%} of the examples.")
    if "label_thresholds" in about:
        lines.append("Every label has a probability of its own from which it is assigned.")
    if not lines:
        lines = ["The run has no calibrated prediction sets; `hetxl calibrate` adds them."]
    return "## Calibration\n\n" + "\n".join(lines) + "\n"


def _confusions(run: Run) -> str:
    numbers = [
        (form.finite(pair.get("confused")) or 0, pair)
        for pair in run.confusions
        if isinstance(pair, dict) and {"first", "second"} <= pair.keys()
    ]
    pairs = sorted((item for item in numbers if item[0]), key=lambda item: -item[0])[:PAIRS]
    if not pairs:
        return "## Known confusions\n\nThe evaluation lists no pair of classes that are confused.\n"
    rows = [
        (
            f"{pair['first']} / {pair['second']}",
            form.count(confused),
            form.count(form.finite(pair.get("examples"))),
            form.decimal(form.finite(pair.get("correlation")), 2, sign=True),
        )
        for confused, pair in pairs
    ]
    header = ("classes", "confused", "examples of both", "correlation of their noise")
    return "## Known confusions\n\n" + as_markdown(text_table("Confusions", header, rows)) + "\n"


def _limits(run: Run, about: Mapping[str, Any]) -> str:
    limits = [
        "The metrics compare with labels that may be wrong themselves; on clean labels they differ.",
        "Prediction sets and calibration hold for inputs like those of the data above, and not for others.",
    ]
    counts = about.get("class_counts")
    if isinstance(counts, list) and (rare := sum(number < 10 for number in counts)):
        limits.append(f"{rare:,} of {len(counts):,} classes have fewer than 10 training examples.")
    if run.result.get("broken"):
        limits.append(f"{len(run.result['broken']):,} inputs of the data could not be read.")
    options = json.dumps({key: run.config.get("head", {}).get(key) for key in ("rank", "temperature", "covariance")})
    return "## Limits\n\n" + "".join(f"- {line}\n" for line in limits) + f"\nOptions of the head: `{options}`.\n"
