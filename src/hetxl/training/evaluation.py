"""`hetxl evaluate`: metrics of a trained run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data import open_dataset
from hetxl.data.dataset import SPLITS, Dataset
from hetxl.data.open import BUILT_IN
from hetxl.data.spec import split_spec
from hetxl.evaluation.metrics import summarise
from hetxl.functional._checks import one_of
from hetxl.training.distributed import find_device
from hetxl.training.order import derive
from hetxl.training.results import evaluate_split
from hetxl.training.run import Trained, check_data, load_run
from hetxl.training.train import open_data


def evaluate_run(
    run: str | Path,
    data: str | None = None,
    *,
    split: str = "test",
    labels: str | None = None,
    method: str = "mc",
    num_samples: int | None = None,
    limit: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Metrics by name, as in result.json.

    Args:
        run: directory of a run.
        data: other data of the same classes, all of it; None for the run's own.
        split: which one, of data that has several.
        labels: file with the labels of `data`.
        method: of prediction.
        num_samples: S, the run's own without.
        limit: at most this many examples; 0 for all.
        device: where to compute.
    """
    one_of("split", split, SPLITS)
    if labels is not None and data is None:
        raise ValueError(
            f"labels is for other data than the run's own, found {labels!r} and no data; give DATA as well"
        )
    trained = load_run(run, find_device(device))
    config = trained.run.config
    dataset = data_for(trained, data, labels)
    if split not in dataset.splits:
        raise ValueError(f"split {split!r} is not in this data, which has {', '.join(dataset.splits)}")
    found = evaluate_split(
        trained.model,
        dataset.splits[split],
        limit=limit,
        seed=derive(config.seed, 15),
        workers=config.workers,
        method=method,
        num_samples=num_samples,
    )
    counts = None if trained.class_counts is None else np.asarray(trained.class_counts)
    return summarise(found.records, counts)


def data_for(trained: Trained, data: str | None = None, labels: str | None = None) -> Dataset:
    """Data that a run can be evaluated on: of the same classes, and of inputs that it takes.

    Args:
        trained: the run.
        data: other data than the run's own, all of it; None for the run's own.
        labels: file with the labels of `data`.
    """
    config, place = trained.run.config, trained.run.path
    if data is None:
        dataset = open_data(config)
    elif split_spec(data)[0] in BUILT_IN:
        dataset = open_data(replace(config, data=data, labels=labels, validation=None, test=None))
    else:
        pictures: dict[str, Any] = {}
        if trained.spec.kind == "image":
            pictures = {"image_size": trained.spec.shape[-1], "grey": trained.spec.shape[0] == 1}
        dataset = open_dataset(data, labels=labels, classes=trained.class_names, whole=True, **pictures)
    if list(dataset.class_names) != list(trained.class_names):
        raise ValueError(f"{place} was trained on other classes than this data has; was the data changed since?")
    if data is None:
        check_data(
            trained.run,
            dataset,
            ("validation", "test"),
            f"train again, or name data of its own: hetxl evaluate {place} DATA",
        )
    if (dataset.input.kind, tuple(dataset.input.shape)) != (trained.spec.kind, trained.spec.shape):
        raise ValueError(
            f"{place} takes {trained.spec.kind} of shape {list(trained.spec.shape)}, but this data has "
            f"{dataset.input.kind} of shape {list(dataset.input.shape)}"
        )
    return dataset
