"""What a finished run writes: metrics of its evaluation, and what a report shows."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hetxl.data.dataset import Dataset, Split
from hetxl.evaluation.calibration import reliability
from hetxl.evaluation.evaluate import Evaluation, evaluate
from hetxl.evaluation.examples import extreme_examples
from hetxl.evaluation.metrics import summarise
from hetxl.evaluation.selective import risk_coverage
from hetxl.training.files import write_json
from hetxl.training.model import Model
from hetxl.training.reading import reader

LABELS = {"det": "DET", "het": "HET", "het-h": "HET-H", "het-xl": "HET-XL"}


def evaluate_split(
    model: Model,
    split: Split,
    *,
    class_names: Any = None,
    limit: int = 0,
    seed: int = 0,
    workers: int = 0,
    batch_size: int = 256,
    confusions: bool = False,
    method: str = "mc",
    num_samples: int | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Evaluate a model where its weights are, reading pictures in worker processes.

    Args:
        model: with a head.
        split: with labels.
        class_names: for the pairs of classes.
        limit: at most this many rows; 0 for all.
        seed: of the draws.
        workers: processes that decode pictures.
        batch_size: examples that go through the backbone at a time.
        confusions: whether to count pairs of classes.
        method: of prediction.
        num_samples: S, the head's own without.
        quiet: no progress bar.
    """
    head: Any = model.head
    return evaluate(
        model.backbone,
        head,
        split,
        batch_size=batch_size,
        limit=limit or None,
        seed=seed,
        device=next(model.parameters()).device,
        confusions=confusions,
        class_names=class_names,
        method=method,
        num_samples=num_samples,
        progress=(lambda done, total: None) if quiet else None,
        fetch=reader(split, workers),
    )


def count(module: nn.Module) -> int:
    """Parameters of a module, those that are shared once."""
    return sum(parameter.numel() for parameter in module.parameters())


def parameters_of(model: Model) -> dict[str, int]:
    """How many the whole model, its head and its backbone have."""
    return {"total": count(model), "head": count(model.head), "backbone": count(model.backbone)}


def write_evaluation(
    directory: Path,
    evaluation: Evaluation,
    dataset: Dataset,
    split: str,
    class_counts: np.ndarray | None,
) -> dict[str, float | None]:
    """Write records, curves, confusions and examples of an evaluation; gives its metrics."""
    records = evaluation.records
    (directory / "records").mkdir(exist_ok=True)
    records.save(directory / "records" / f"{split}.safetensors")
    coverage, risk = risk_coverage(records)
    write_json(
        directory / "curves.json",
        {
            "split": split,
            "reliability": [list(point) for point in reliability(records)],
            "risk_coverage": [[float(x), float(y)] for x, y in zip(coverage, risk, strict=True)],
        },
    )
    write_json(directory / "confusions.json", evaluation.pairs)
    write_json(directory / "examples.json", extreme_examples(records, dataset.splits[split], dataset.class_names))
    return summarise(records, class_counts)


def result_of(
    label: str, model: Model, dataset: Dataset, metrics: dict[str, Any], evaluation: Evaluation, **more: Any
) -> dict[str, Any]:
    """The content of result.json."""
    head: Any = model.head
    with torch.no_grad():
        temperature = float(head.temperature())
    return {
        "label": label,
        "dataset": dataset.name,
        "parameters": parameters_of(model),
        "metrics": metrics,
        "predict_seconds_per_1000": 1000 * evaluation.seconds / max(len(evaluation.records), 1),
        "temperature": temperature,
        "noise_scale": head.noise_scale,
        "best_nll": dataset.best_nll,
        "broken": [list(item) for item in evaluation.broken[:100]],
        **more,
    }
