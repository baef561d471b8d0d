"""Small arrays for studies of label noise: rows of numbers with right labels, or with some of them flipped."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetxl._files import read_json, write_json
from hetxl_lab.build.packages import debian_package
from hetxl_lab.build.store import packages_directory
from hetxl_lab.datasets.wordnet import build_wordnet, load_wordnet
from hetxl_train.data.dataset import Dataset, InputSpec
from hetxl_train.data.label_noise import with_label_noise
from hetxl_train.data.labels import Labels
from hetxl_train.data.synthetic import FeatureSplit

COMPONENTS = 64
"""Principal components of images and sentences."""


@dataclass(frozen=True)
class Arrays:
    """Features [n, D] float32 with their right labels [n]."""

    features: np.ndarray
    labels: np.ndarray

    @property
    def num_classes(self) -> int:
        """K"""
        return int(self.labels.max()) + 1

    def take(self, rows: np.ndarray) -> "Arrays":
        """Return some rows."""
        return Arrays(self.features[rows], self.labels[rows])

    def flipped(self, kind: str, rate: float, seed: int) -> np.ndarray:
        """Return the labels [n] with flips as `hetxl train --label-noise` draws them."""
        split = FeatureSplit(torch.from_numpy(self.features), Labels(self.labels))
        names = [str(k) for k in range(self.num_classes)]
        spec = InputSpec("features", (self.features.shape[1],))
        noisy = with_label_noise(Dataset("arrays", spec, names, {"train": split}), kind, rate, seed)
        return np.asarray(noisy.splits["train"].labels.ids)


def digits() -> Arrays:
    """Return scikit-learn's digits: 1,797 images of 8 × 8 pixels, 10 classes."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return Arrays(data.data.astype(np.float32), data.target.astype(np.int64))


def fashion() -> Arrays:
    """Return the 10,000 test images of fashion-MNIST (Debian's dataset-fashion-mnist), 64 principal components."""
    root = debian_package("dataset-fashion-mnist", packages_directory(None)).root
    images, labels = (
        np.frombuffer(
            gzip.decompress(next(root.rglob(f"t10k-{name}.gz")).read_bytes()),
            dtype=np.uint8,
        )
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    pixels = images[16:].reshape(-1, 784) / 255.0
    return Arrays(principal_components(pixels), labels[8:].astype(np.int64))


def principal_components(rows: np.ndarray) -> np.ndarray:
    """Return rows [n, D] in the directions of their largest variance, [n, COMPONENTS] float32."""
    centred = rows - rows.mean(0)
    directions = np.linalg.eigh(centred.T @ centred)[1][:, : -COMPONENTS - 1 : -1]
    return (centred @ directions).astype(np.float32)


def sentences() -> Arrays:
    """Return glosses of WordNet by a sentence encoder, 64 principal components, and the lexicographers' files."""
    options: Any = {"labels": "file", "synsets": 1000}
    build_wordnet(**options)
    splits = load_wordnet(**options).splits.values()
    features = np.concatenate([split.fetch(np.arange(len(split))).inputs.numpy() for split in splits])
    labels = np.concatenate([np.asarray(split.labels.ids) for split in splits])
    return Arrays(principal_components(features.astype(np.float64)), np.unique(labels, return_inverse=True)[1])


def twins(rows: int = 6000) -> Arrays:
    """Return 60 Gaussian classes in 32 dimensions, in pairs that overlap."""
    generator = np.random.default_rng(0)
    centres = np.repeat(generator.normal(size=(30, 32)), 2, axis=0) + 0.35 * generator.normal(size=(60, 32))
    labels = generator.integers(60, size=rows)
    return Arrays((centres[labels] + generator.normal(size=(rows, 32))).astype(np.float32), labels)


SMALL_DATA: dict[str, Callable[[], Arrays]] = {
    "digits": digits,
    "twins": twins,
    "fashion-MNIST": fashion,
    "sentences": sentences,
}


def small_data(name: str, limit: int) -> Arrays:
    """Return a dataset of `SMALL_DATA`, at most `limit` rows of it at random."""
    data = SMALL_DATA[name]()
    return data.take(np.random.default_rng(0).permutation(len(data.labels))[:limit])


def stored(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the stored value of a file, or compute and store it, so that a stopped study resumes."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, compute())
    return read_json(path)
