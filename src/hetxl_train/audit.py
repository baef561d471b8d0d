"""`hetxl audit`: find the labels of a dataset that are probably wrong, review them on a page, and correct them.

Every row is predicted by a run that was not trained on it: rows are divided into folds, and each fold is predicted by a
run trained on the others (cross-fitting). Only a few numbers of each prediction are stored (`hetxl.metrics.audit`).
"""

import csv
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hetxl._checks import integer_at_least
from hetxl._files import read_arrays, read_json, reading, whole_file, whole_text, write_arrays, write_json
from hetxl._seeds import derive_seed, some_rows
from hetxl.functional import IGNORE_INDEX
from hetxl.metrics.audit import Audit, AuditBuilder
from hetxl.metrics.neighbours import MAX_ROWS, Neighbours
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.dataset import Dataset, PartSplit, Split
from hetxl_train.data.label_noise import NoisySplit, with_label_noise
from hetxl_train.data.labels import SEPARATOR, Labels
from hetxl_train.data.open import open_data
from hetxl_train.distributed import find_device
from hetxl_train.evaluate_runs import data_for
from hetxl_train.loaders import blocks
from hetxl_train.report.audit import write_audit_page
from hetxl_train.runs import Trained, load_run
from hetxl_train.training import train

VALIDATION = 0.1
"""Share of a fold's training rows that are used for validation."""
COLUMNS: tuple[str, ...] = (
    "row", "label", "suggestion", "score", "reason", "suspect", "label_probability", "suggestion_probability", "source",
)  # fmt: skip
NONE = ""
"""Entry in tables for a missing label, or for the suggestion to remove one (several labels per row)."""
CONFUSED, EXPLAINED = -0.5, float(np.log(2))
"""Two classes count as confused below this correlation, and noise explains a label above this gain."""


class AuditResult(NamedTuple):
    """An audit with its data."""

    directory: Path
    audit: Audit  # most suspicious first
    split: Split
    class_names: Sequence[str]
    wrong: np.ndarray | None  # [n] bool, whether a label was replaced; None unless label noise was added


def audit_data(
    config: TrainConfig, directory: Path, *, folds: int = 4, run: str | None = None, console: Console | None = None
) -> AuditResult:
    """Audit the labels of a dataset, and write audit.csv, audit.json and audit.html to a directory.

    The audit covers the training split, or all rows of a dataset without splits. Finished folds are not trained again.

    Args:
        config: the data and the options of the folds' runs; its `out` is not used.
        folds: number of folds.
        run: directory of a trained run that has not seen this data, to use instead of folds.
    """
    console = console or Console()
    if integer_at_least("folds", folds, 2) > 50:
        raise ValueError(f"folds must be at most 50, got {folds}")
    if run is None:
        dataset = _whole(config)
        audit = _cross_fit(config, dataset, directory, folds, console)
    else:
        trained = load_run(run, find_device(config.device))
        dataset = data_for(trained, config.data, config.labels)
        dataset = dataclasses.replace(dataset, splits={"train": dataset.splits["test"]})
        rows = np.arange(len(dataset.splits["train"]))
        audit = _predicted(trained, dataset.splits["train"], rows, rows, config, console)
    split = dataset.splits["train"]
    wrong = None
    if isinstance(split, NoisySplit):
        wrong = np.zeros(len(split), dtype=bool)
        wrong[split.noise.rows] = True
    result = AuditResult(directory, audit.ranked(), split, dataset.class_names, wrong)
    with whole_text(directory / "audit.csv") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows_of(result))
    _write_parquet(result)
    about = {"data": config.data, "labels": config.labels, "data_seed": config.data_seed, "folds": folds, "run": run}
    outcome = summary(result)
    write_json(directory / "audit.json", about | outcome)
    write_audit_page((row for row in rows_of(result) if row["suspect"]), outcome, split, directory / "audit.html")
    return result


def _whole(config: TrainConfig) -> Dataset:
    """Open the data with all rows in the training split, and with the configured label noise."""
    clean = dataclasses.replace(config, validation=None, test=None, label_noise="none", label_noise_rate=0.0)
    dataset = open_data(clean, whole=True)
    rows = dataset.splits.get("train") or dataset.splits["test"]
    dataset = dataclasses.replace(dataset, splits={"train": rows})
    if config.label_noise == "none":
        return dataset
    return with_label_noise(dataset, config.label_noise, config.label_noise_rate, config.data_seed)


def fold_of(labels: Labels, folds: int, seed: int) -> np.ndarray:
    """Return the fold of every row [n], −1 for rows without a label; each class is divided evenly."""
    fold, order = np.full(len(labels), -1), np.random.default_rng(seed).permutation(labels.labelled())
    if not labels.multi:
        order = order[
            np.argsort(np.asarray(labels.ids)[order], kind="stable")
        ]  # by class, in random order within a class
    fold[order] = np.arange(len(order)) % folds
    return fold


def _cross_fit(config: TrainConfig, dataset: Dataset, directory: Path, folds: int, console: Console) -> Audit:
    """Train a run for every fold on the other rows, and predict the fold with it."""
    split, seed = dataset.splits["train"], derive_seed(config.seed, 21)
    fold = fold_of(split.labels, folds, seed)
    if (sizes := np.bincount(fold[fold >= 0], minlength=folds)).min() == 0:
        raise ValueError(f"folds must be at most the number of labelled rows, {sizes.sum()}, got {folds}")
    parts = []
    for number in range(folds):
        path = directory / "folds" / f"fold-{number}"
        stored = path / "audit.npz"
        console.say(
            f"Fold {number + 1} of {folds}: {sizes.sum() - sizes[number]:,} rows train, {sizes[number]:,} audited"
        )
        others = np.flatnonzero((fold >= 0) & (fold != number))
        held_out = np.sort(
            np.random.default_rng(seed + number + 1).permutation(others)[: int(VALIDATION * len(others))]
        )
        training = np.setdiff1d(others, held_out)
        splits: dict[str, Split] = {"train": PartSplit(split, training), "validation": PartSplit(split, held_out)}
        if not len(held_out):
            splits.pop("validation")
        own = dataclasses.replace(config, out=str(path), validation=None, test=None)
        run = train(own, dataset=dataclasses.replace(dataset, splits=splits), console=Console(quiet=True))
        if not stored.exists():
            trained = load_run(run.path, find_device(config.device))
            part = _predicted(trained, split, np.flatnonzero(fold == number), others, config, console)
            write_arrays(stored, dataclasses.asdict(part))
        with reading(stored, "remove it, and run the audit again"):
            parts.append(Audit(**read_arrays(stored)))
    return Audit.concatenate(parts)


def _predicted(
    trained: Trained, split: Split, rows: np.ndarray, reference: np.ndarray, config: TrainConfig, console: Console
) -> Audit:
    """Predict rows of a split, compare them with their neighbours in a reference, and return their audit."""
    parts, read = zip(*trained.features(split, some_rows(reference, MAX_ROWS), config.workers), strict=True)
    compared, classes = np.concatenate(read), len(trained.class_names)
    known = torch.cat(parts).to(trained.model.device), split.labels.take(compared), classes
    neighbours, builder = Neighbours(*known, link=trained.link, rows=compared), AuditBuilder(trained.link)
    options = {"seed": derive_seed(config.seed, 22), "workers": config.workers}
    for features, prediction, some in trained.predictions(
        split, rows, bar=console.bar("predicting", len(rows)), **options
    ):
        builder.add(prediction, split.labels.take(some), some, neighbours.label_frequencies(features, some))
    return builder.build()


# ---- results


def rows_of(result: AuditResult, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of audit.csv, most suspicious first."""
    audit, names = result.audit, [*result.class_names, NONE]  # the last entry is for −1
    columns = [getattr(audit, field.name)[:limit].tolist() for field in dataclasses.fields(Audit)]
    columns.append(audit.is_suspect[:limit].astype(int).tolist())
    for row, label, suggestion, score, own, other, gain, correlation, near, suspect in zip(*columns, strict=True):
        shown = result.split.show(row)
        yield {
            "row": row,
            "label": names[label],
            "suggestion": names[suggestion],
            "score": round(score, 6),
            "suspect": suspect,
            "reason": reason(names[label], names[suggestion], own, other, gain, correlation, near),
            "label_probability": round(own, 6),
            "suggestion_probability": round(other, 6),
            "source": shown.image or shown.text,
        }


def reason(
    label: str, suggestion: str, own: float, other: float, gain: float, correlation: float, near: float = np.nan
) -> str:
    """Explain in one sentence why a label is suspicious or not; the numbers are those of an `Audit`."""
    if label == NONE:
        notes, kind = [f"{suggestion} is not among the labels and has probability {other:.1%}"], f"have {suggestion}"
    elif suggestion == NONE:
        notes, kind = [f"{label} is among the labels and has probability {own:.1%}"], f"do not have {label}"
    elif own >= other:
        return f"{label} is the most probable class, {own:.1%}"
    else:
        notes, kind = [f"{suggestion} has probability {other:.1%}, {label} {own:.1%}"], f"are labelled {suggestion}"
        if correlation < CONFUSED:
            notes.append("the two are confused with each other")
        if gain > EXPLAINED:
            notes.append(f"without noise {label} would be {np.exp(min(gain, 50)):.2g} times less probable")
    if near > 0:  # not NaN
        notes.append(f"{near:.0%} of the nearest rows {kind}")
    return "; ".join(notes)


def summary(result: AuditResult, pairs: int = 20) -> dict[str, Any]:
    """Return the content of audit.json: the numbers of suspect labels, by class and by pair of classes."""
    audit, names = result.audit, result.class_names
    labels, suspects = audit.class_errors(len(names))
    order = np.argsort(-suspects, kind="stable")[:pairs]
    about: dict[str, Any] = {
        "audited": len(audit),
        "suspects": audit.suspects,
        "classes": [
            {"class": names[k], "labels": int(labels[k]), "suspects": int(suspects[k])} for k in order if suspects[k]
        ],
        "pairs": [
            {"label": names[label], "suggestion": names[other], "labels": int(labels[label]), "suspects": count}
            for label, other, count in audit.pair_errors(pairs)
        ],
    }
    if result.wrong is not None:
        about["average_precision"] = average_precision(result.wrong[audit.rows])
    return about


def average_precision(hits: np.ndarray) -> float | None:
    """Return the mean precision at each hit, for hits [m] bool in ranking order; None without hits."""
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean()) if hits.any() else None


def _write_parquet(result: AuditResult) -> None:
    """Write audit.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    audit, names = result.audit, np.asarray([*result.class_names, NONE], dtype=object)
    columns = {field.name: getattr(audit, field.name) for field in dataclasses.fields(Audit)}
    columns |= {name: names[columns[name]] for name in ("label", "suggestion")}
    with whole_file(result.directory / "audit.parquet") as temporary:
        pq.write_table(pa.table(columns), temporary)


# ---- decisions


def apply_decisions(
    directory: Path, out: Path, *, decisions: Path | None = None, top: float | None = None
) -> tuple[int, int]:
    """Write a copy of the audited data with corrected labels; return the number of changed rows, and of all rows.

    The original data is not changed. Images and texts are written as a manifest, a .csv file with the columns `image`
    or `text` and `label`; arrays as an .npz file with `features` and `labels`.

    Args:
        directory: directory of the audit.
        decisions: CSV file saved from audit.html, with the columns `row`, `label`, `suggestion` and `decision`.
        top: without decisions, the share of all labels to replace by their suggestion: the most suspicious suspects.
    """
    about = directory / "audit.json"
    if not about.exists():
        raise FileNotFoundError(f"{directory} has no audit.json; pass the --out directory of hetxl audit")
    if (decisions is None) == (top is None):
        raise ValueError("pass either a decisions file or --top SHARE")
    written = read_json(about, dict)
    config = TrainConfig(data=written["data"], labels=written["labels"], data_seed=written["data_seed"])
    dataset = _whole(config)
    split, names = dataset.splits["train"], {name: index for index, name in enumerate(dataset.class_names)}
    if decisions is None:
        assert top is not None
        if not 0 < top <= 1:
            raise ValueError(f"top must be above 0 and at most 1, a share of all labels, got {top:g}")
        changes = list(_top_suspects(directory / "audit.csv", round(top * written["audited"])))
    else:
        changes = [entry for entry in _table(decisions, "decision") if entry["decision"] == "correct"]
    labels = _labels_of(split)
    changed = {_apply(labels, entry, names, decisions or directory / "audit.csv") for entry in changes}
    _write_corrected(out, split, [sorted(row) for row in labels], dataset.class_names)
    return len(changed), len(split)


def _top_suspects(path: Path, count: int) -> Iterator[dict[str, str]]:
    for entry, _ in zip(_table(path, "suspect"), range(count), strict=False):
        if entry["suspect"] == "1":
            yield entry


def _table(path: Path, column: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file with decisions."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; save it from audit.html, or pass --top")
    with open(path, encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        for name in ("row", "label", "suggestion", column):
            if name not in (table.fieldnames or ()):
                columns = ", ".join(table.fieldnames or ()) or "none"
                raise ValueError(f"{path} must have the columns row, label, suggestion and {column}, got {columns}")
        yield from table


def _labels_of(split: Split) -> list[set[int]]:
    """Return the class ids of every row."""
    labels: list[set[int]] = [set() for _ in range(len(split))]
    for row, label in zip(*split.labels.entries(np.arange(len(split))), strict=True):
        labels[int(row)].add(int(label))
    return labels


def _apply(labels: list[set[int]], entry: Mapping[str, str], names: Mapping[str, int], path: Path) -> int:
    """Replace, add or remove a label in place; return its row."""
    text, old, new = entry["row"], entry["label"], entry["suggestion"]
    if not text.isdecimal() or int(text) >= len(labels):
        raise ValueError(f"{path}: row {text!r} is not one of the {len(labels):,} rows of the audited data")
    for name in (old, new):
        if name != NONE and name not in names:
            raise ValueError(f"{path}: {name!r} is not a class of the audited data")
    row = int(text)
    if old != NONE:
        if names[old] not in labels[row]:
            raise ValueError(
                f"{path}: row {row} does not have the label {old!r}; was the data changed since the audit?"
            )
        labels[row].remove(names[old])
    if new != NONE:
        labels[row].add(names[new])
    return row


def _write_corrected(out: Path, split: Split, labels: list[list[int]], names: Sequence[str]) -> None:
    """Write a manifest of images or texts, or arrays."""
    first = split.show(0)
    if first.image or first.text:
        column = "image" if first.image else "text"
        if out.suffix != ".csv":
            raise ValueError(f"--out must end with .csv, a manifest of this data's {column}s, got {out}")
        with whole_text(out) as file:
            table = csv.writer(file)
            table.writerow((column, "label"))
            for row, own in enumerate(labels):
                shown = split.show(row)
                source = str(Path(shown.image).resolve()) if shown.image else shown.text
                table.writerow((source, SEPARATOR.join(names[label] for label in own)))
        return
    if out.suffix != ".npz":
        raise ValueError(f"--out must end with .npz, arrays of features and labels, got {out}")
    features = np.concatenate([split.fetch(rows).inputs.numpy() for rows in blocks(np.arange(len(split)), 4096)])
    if split.labels.multi:
        ids = {
            "labels": np.array([*itertools.chain(*labels)], dtype=np.int64),
            "label_offsets": np.cumsum([0, *map(len, labels)]),
        }
    else:
        ids = {"labels": np.array([own[0] if own else IGNORE_INDEX for own in labels])}
    write_arrays(out, {"features": features, **ids, "class_names": np.asarray(names)})
