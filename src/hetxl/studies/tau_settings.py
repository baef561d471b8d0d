"""What the study of τ trains on: much data seen once in part, and little data seen many times."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data import open_dataset
from hetxl.data.build.files import write_whole
from hetxl.data.dataset import Dataset
from hetxl.training.config import TrainConfig

COMMON: dict[str, Any] = {
    "batch_size": 256,
    "rank": 10,
    "train_samples": 4,
    "eval_samples": 32,
    "evaluation_examples": 2000,
    "test_examples": 2000,
    "temperature_learning_rate": 1.0,  # τ like any other parameter, as in the paper
    "log_every": 10,
    "device": "cpu",
}


@dataclass(frozen=True)
class Setting:
    """Data and how long to train on it.

    Attributes:
        name: how tables call it, and its directory.
        told: one sentence for readers.
        data: as for `hetxl train`, given the folder that it may write a file into.
        options: of the training.
        searches: whether ways with many trainings take part; otherwise those alone that learn τ, or leave it.
    """

    name: str
    told: str
    data: Callable[[Path], str]
    options: dict[str, Any] = field(default_factory=dict)
    searches: bool = True

    def config(self, folder: Path, **more: Any) -> TrainConfig:
        """The options of its runs; the data is written into the folder if it is made for the study."""
        options = {**COMMON, **self.options, **more}
        options.setdefault("evaluate_every", options["steps"] * 2)  # at the end alone
        return TrainConfig(**{**options, "data": self.data(folder)})


def commonest_classes(dataset: Dataset, count: int, path: Path, rows: int | None = None) -> Path:
    """Write the rows of the commonest classes of a dataset as an array file, unless it is there.

    Args:
        dataset: of features, with all three splits and one label a row.
        count: how many classes.
        path: of the .npz file.
        rows: at most so many training rows; None for all.
    """
    if path.exists():
        return path
    order = np.argsort(-dataset.splits["train"].labels.counts(dataset.num_classes), kind="stable")[:count]
    new_id = np.full(dataset.num_classes, -1, dtype=np.int64)
    new_id[order] = np.arange(len(order))
    arrays: dict[str, np.ndarray] = {"class_names": np.array([dataset.class_names[int(old)] for old in order])}
    for name, split in dataset.splits.items():
        ids = new_id[np.asarray(split.labels.ids)]
        kept = np.flatnonzero(ids >= 0)
        kept = kept[:rows] if name == "train" and rows is not None else kept
        arrays[f"{name}_features"] = split.fetch(kept).inputs.numpy()
        arrays[f"{name}_labels"] = ids[kept]
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

    write_whole(path, save)
    return path


def _little_wordnet(folder: Path) -> str:
    return str(commonest_classes(open_dataset("wordnet"), 100, folder / "wordnet-100.npz"))


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "pycode",
            "Python's source, its commonest tokens: a twenty-fifth of one pass.",
            lambda folder: "pycode:classes=1024",
            {"steps": 160, "learning_rate": 6e-3},
        ),
        Setting(
            "wordnet-100",
            "The 100 commonest hypernyms of WordNet, frozen features: ten passes.",
            _little_wordnet,
            {"steps": 420, "learning_rate": 3e-3},
        ),
    )
}
"""By name, in the order of the page."""

LONGER = Setting(
    "pycode, longer",
    "The same with ten times the steps, still less than half a pass: here the rule learns τ.",
    lambda folder: "pycode:classes=1024",
    {"steps": 1600, "learning_rate": 6e-3},
    searches=False,
)
"""On request: where the rule of `temperature="auto"` does something else than leave τ alone."""

_SYNTHETIC = "synthetic:rows=12000,classes=30,features=8"
_TINY: dict[str, Any] = {
    "steps": 60,
    "batch_size": 64,
    "rank": 4,
    "learning_rate": 0.05,
    "eval_samples": 16,
    "evaluation_examples": 600,
    "test_examples": 600,
}


def _little_synthetic(folder: Path) -> str:
    whole = open_dataset("synthetic", rows=12000, classes=30, features=8)
    return str(commonest_classes(whole, 30, folder / "synthetic-480.npz", rows=480))


QUICK: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "synthetic, once",
            "Drawn from a HET-XL model: a third of one pass.",
            lambda folder: _SYNTHETIC,
            _TINY,
        ),
        Setting(
            "synthetic, many times",
            "The same with few training rows: eight passes.",
            _little_synthetic,
            _TINY,
        ),
    )
}
"""Small ones that need nothing built."""
