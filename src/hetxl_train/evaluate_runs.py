"""`hetxl evaluate` and `hetxl contrastive evaluate`: metrics of a trained run on its own or other data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hetxl._checks import one_of
from hetxl._seeds import derive_seed
from hetxl.metrics.summary import summarise
from hetxl.registry import HEAD_LABELS
from hetxl_train.config import ContrastiveConfig
from hetxl_train.contrastive_runs import load_contrastive_run
from hetxl_train.data import open_dataset
from hetxl_train.data.dataset import SPLITS, Dataset
from hetxl_train.data.open import BUILT_IN, columns_of, open_data, split_spec, tokenizer_of
from hetxl_train.data.pairs import open_pairs
from hetxl_train.data.read import Data
from hetxl_train.distributed import find_device
from hetxl_train.evaluate import evaluate_split
from hetxl_train.report.tables import Column, Row, Table
from hetxl_train.runs import Trained, check_data, load_run
from hetxl_train.tasks.contrastive import KS, ContrastiveTask, evaluate_pairs
from hetxl_train.towers import TextReader


def evaluate_run(
    run: str | Path, data: str | None = None, *, split: str = "test", labels: str | None = None, method: str = "mc",
    num_samples: int | None = None, target: str = "observed", limit: int = 0, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Return metrics by name, as in result.json; a limit of 0 means all examples.

    Args:
        data: other labelled data of the same classes, all rows of it; None for the run's data.
        method: method of `head.predict`.
        num_samples: S; None for the run's value.
        target: target of `head.predict`.
    """
    one_of("split", split, SPLITS)
    if labels is not None and data is None:
        raise ValueError(f"labels = {labels!r} is for other data than the run's own; pass DATA as well")
    trained = load_run(run, find_device(device))
    config = trained.run.config
    dataset = data_for(trained, data, labels)
    if split not in dataset.splits:
        raise ValueError(f"split {split!r} is not in this data, which has {', '.join(dataset.splits)}")
    options = {"seed": derive_seed(config.seed, 15), "method": method, "num_samples": num_samples, "target": target}
    evaluation = evaluate_split(trained.model, dataset.splits[split], limit=limit, workers=config.workers, **options)
    counts = None if trained.class_counts is None else np.asarray(trained.class_counts)
    return summarise(evaluation.records, counts)


def data_for(trained: Trained, data: Data | None = None, labels: str | None = None) -> Dataset:
    """Open data to evaluate a run on, with its classes and its kind of inputs; None is the run's data."""
    config, directory = trained.run.config, trained.run.path
    transform = trained.spec.transform if trained.spec.kind == "image" else None
    if data is None:
        dataset = open_data(config, transform)
    elif isinstance(data, str) and split_spec(data)[0] in BUILT_IN:
        dataset = open_data(replace(config, data=data, labels=labels, validation=None, test=None))
    else:
        options: dict[str, Any] = {"labels": labels, "classes": trained.class_names, "whole": True}
        options |= {"columns": columns_of(config), "tokenizer": tokenizer_of(config), "transform": transform}
        dataset = open_dataset(data, **options)
    if list(dataset.class_names) != list(trained.class_names):
        raise ValueError(f"{directory} was trained on different classes than this data has; was the data changed?")
    if data is None:
        instead = f"train again, or name data of its own: hetxl evaluate {directory} DATA"
        check_data(trained.run, dataset, ("validation", "test"), instead)
    if (dataset.input.kind, tuple(dataset.input.shape)) != (trained.spec.kind, trained.spec.shape):
        raise ValueError(
            f"{directory} takes {trained.spec.kind} of shape {list(trained.spec.shape)}, but this data has "
            f"{dataset.input.kind} of shape {list(dataset.input.shape)}"
        )
    return dataset


def evaluate_contrastive_run(
    path: str | Path, data: str | None = None, *, samples: int = 0, templates: str | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Return the metrics of a contrastive run.

    Args:
        data: pairs as for training; files without splits are evaluated whole. None for the run's data.
        samples: S of a second zero-shot evaluation, with noise; 0 for none.
        templates: prompts separated by |; None for those of the run.

    Returns:
        "run", "label", "data", "metrics" by split, and "swaps" for the run's own pairs if texts were swapped.
    """
    trained = load_contrastive_run(path, find_device(device))
    config = trained.run.config
    if templates is not None:
        config = replace(config, templates=templates)
    if samples and trained.model.loss.image_noise is None:
        raise ValueError(f"num_samples={samples} needs noise on the image side, and {path} has none; leave it out")
    texts = TextReader.of(config)
    seen: set[str] | None = None
    if data is None:
        pairs = ContrastiveTask.open(config)
    else:
        image = trained.specs.image
        pairs = open_pairs(
            data, transform=image.transform if image.kind == "image" else None, seed=config.data_seed, whole=True
        )
        for name, required, spec in zip(
            ("images", "texts"), trained.specs, (pairs.image, texts.spec(pairs)), strict=True
        ):
            if _shape(required) != _shape(spec):
                raise ValueError(f"{data} has {name} {_form(spec)}, and the run's tower takes {_form(required)}")
        seen = _seen(config)
    evaluation = evaluate_pairs(trained.model, pairs, texts, config, samples=samples, seen=seen)
    return {"run": str(path), "label": HEAD_LABELS[config.head], "data": pairs.name, **evaluation.result}


def contrastive_table(result: dict[str, Any]) -> Table:
    """Return the metrics of `evaluate_contrastive_run` as a table with a column per split."""
    splits = list(result["metrics"])
    rows: list[Row] = []

    def add(title: str, values: list[float | None]) -> None:
        if any(value is not None for value in values):
            rows.append(Row(title, ["–" if value is None else f"{value:.1%}" for value in values]))

    for key, how in (("zero_shot", "without noise"), ("zero_shot_sampled", "mean over draws")):
        metrics = [result["metrics"][name].get(key) or {} for name in splits]
        for top in (1, 5):
            add(f"zero-shot top-{top}, {how}", [values.get(f"top{top}") for values in metrics])
            add(f"  names never seen, top-{top}", [values.get(f"unseen_top{top}") for values in metrics])
        if key == "zero_shot":
            add("  chance", [values.get("chance") for values in metrics])
    for direction, title in (("image_to_text", "image to text"), ("text_to_image", "text to image")):
        for k in KS:
            add(f"{title}, recall@{k}", [result["metrics"][name][f"{direction}@{k}"] for name in splits])
    for kind in ("noise", "distance"):
        auroc = result.get("swaps", {}).get(f"{kind}_auroc")
        if auroc is not None:
            cells = [f"{auroc:.3f}", *[""] * (len(splits) - 1)]
            rows.append(Row(f"AUROC of the {kind} for swapped pairs", cells))
    return Table(f"{result['label']} on {result['data']}", [Column(name) for name in splits], rows)


def _seen(config: ContrastiveConfig) -> set[str] | None:
    """Return the texts that the run was trained on; None if they cannot be read."""
    try:
        captions = ContrastiveTask.open(config).splits["train"].captions()
    except (OSError, ValueError, KeyError):
        return None
    return None if captions is None else set(captions)


def _shape(spec: Any) -> Any:
    return None if spec is None else (spec.kind, spec.shape)


def _form(spec: Any) -> str:
    return "as captions" if spec is None else f"as {spec.kind} {list(spec.shape)}"
