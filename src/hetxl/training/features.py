"""The features of a frozen backbone, computed once and read from disk from then on."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import SPLITS, Dataset, Fetched, Shown, Split
from hetxl.data.labels import Labels
from hetxl.training.backbones import Backbone
from hetxl.training.config import TrainConfig
from hetxl.training.model import Model
from hetxl.training.progress import Narrator
from hetxl.training.reading import reader

BATCH = 64


class FeatureFile(Split):
    """Rows of a memory-mapped [n, D] file, with the labels and the looks of the split they were computed from.

    Args:
        path: of the .npy file.
        source: the split; rows of it that cannot be read are not in the file.
        rows: [n] which rows of the source the file has.
    """

    def __init__(self, path: Path, source: Split, rows: np.ndarray):
        self.array = np.load(path, mmap_mode="r")
        self.source, self.rows = source, rows
        self.labels: Labels = source.labels.subset(rows)

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Features [b, D]; there is nothing to augment."""
        return Fetched(torch.from_numpy(np.ascontiguousarray(self.array[rows])), np.asarray(rows))

    def show(self, row: int) -> Shown:
        """As the source shows it."""
        return self.source.show(int(self.rows[row]))


def cached_features(
    folder: Path, model: Model, dataset: Dataset, config: TrainConfig, narrator: Narrator
) -> tuple[Model, dict[str, Split]]:
    """The head behind features that are read instead of computed, and the splits that give them.

    Args:
        folder: where the files are, or will be.
        model: whose backbone is frozen; the returned model shares its head.
        dataset: the inputs.
        config: of the run.
        narrator: shows how far it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    splits: dict[str, Split] = {}
    for name in SPLITS:
        if name in dataset.splits:
            path = folder / f"{name}.npy"
            if not path.exists():
                _compute(path, model.backbone, dataset.splits[name], config.workers, device, narrator, name)
            splits[name] = FeatureFile(path, dataset.splits[name], np.load(folder / f"{name}_rows.npy"))
    return Model(Backbone(nn.Identity(), model.backbone.out_features), model.head), splits


@torch.no_grad()
def feature_batches(
    backbone: Backbone,
    split: Split,
    rows: np.ndarray,
    workers: int,
    device: torch.device,
    broken: BrokenLimit | None = None,
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Features [b, D] in float32 and their rows [b], batch by batch, from a backbone in evaluation mode.

    Args:
        backbone: on `device`.
        split: to read from.
        rows: which ones, [n]; those that cannot be read are left out.
        workers: processes that decode pictures.
        device: where inputs go.
        broken: counts examples that cannot be read, and raises when they are too many; None not to count.
    """
    requests = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    read = reader(split, workers)
    training = backbone.training
    backbone.eval()
    try:
        for fetched in map(split.fetch, requests) if read is None else read(requests):
            if broken is not None:
                broken.add(fetched)
            if len(fetched.rows):
                yield backbone(fetched.inputs.to(device)).float().cpu(), fetched.rows
    finally:
        backbone.train(training)


def _compute(
    path: Path, backbone: Backbone, split: Split, workers: int, device: torch.device, narrator: Narrator, name: str
) -> None:
    """Write the rows that could be read, then their features; each file gets its name when it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.npy")
    rows_path = path.with_name(f"{name}_rows.npy")
    broken = BrokenLimit(path=path.with_name(f"{name}_broken.txt"))
    kept: list[np.ndarray] = []
    done = 0
    try:
        out = np.lib.format.open_memmap(temporary, "w+", np.float32, (len(split), backbone.out_features))
        with narrator.bar(f"features of {name}", len(split)) as bar:
            for features, rows in feature_batches(backbone, split, np.arange(len(split)), workers, device, broken):
                out[done : done + len(rows)] = features.numpy()
                kept.append(rows)
                done += len(rows)
                bar.to(done)
        out.flush()
        del out
        if not kept:
            first = broken.broken[0]
            raise ValueError(f"none of the {len(split)} {name} examples could be read: {first.path}: {first.reason}")
        # Rows first: features without rows would be taken for whole.
        np.save(temporary.with_suffix(".rows.npy"), np.concatenate(kept))
        os.replace(temporary.with_suffix(".rows.npy"), rows_path)
        if done < len(split):  # some could not be read: the file is cut to those that could
            np.save(temporary, np.load(temporary, mmap_mode="r")[:done].copy())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
