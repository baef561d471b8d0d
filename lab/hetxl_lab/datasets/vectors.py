"""Small sets of vectors as a user would bring them: a training file, whose labels may be wrong, and a clean test file.

| set | rows | features | classes | source |
| --- | ---: | ---: | ---: | --- |
| digits, wine, breast-cancer | 1,797, 178, 569 | 64, 13, 30 | 10, 3, 2 | scikit-learn |
| overlap | 6,000 | 20 | 7, unequal | scikit-learn's make_classification |
| fashion | 8,000 of 60,000 to train on | 64 principal components | 10 | Debian's dataset-fashion-mnist |
| glosses | 6,000 to train on | 384, encoded sentences | 26 | WordNet's nouns, by lexicographers' file |
"""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetxl._checks import one_of
from hetxl._files import write_arrays
from hetxl_lab.build import store
from hetxl_lab.build.packages import debian_package
from hetxl_lab.datasets import wordnet
from hetxl_lab.datasets.sentence_encoder import MINILM

PACKAGE, IMAGES = "dataset-fashion-mnist", 28 * 28
COMPONENTS = 64
TRAIN_ROWS, TEST_ROWS, GLOSSES = 8_000, 4_000, 6_000  # at most; training rows of glosses
NOISES = ("none", "twins", "next", "symmetric")


class Vectors(NamedTuple):
    """Rows to train on and rows to test on."""

    features: np.ndarray  # [n, D] float32
    labels: np.ndarray  # [n]
    test_features: np.ndarray  # [m, D]
    test_labels: np.ndarray  # [m]

    @property
    def num_classes(self) -> int:
        """Return K."""
        return int(max(self.labels.max(), self.test_labels.max())) + 1


def load_vectors(name: str, *, seed: int = 0, cache: Path | None = None) -> Vectors:
    """Return a set of `SETS`; the seed divides its rows, or draws the training rows."""
    one_of("name", name, SETS)
    return SETS[name](seed, cache)


def with_wrong_labels(vectors: Vectors, noise: str, rate: float, seed: int = 0) -> Vectors:
    """Return the same with a share of the training labels wrong: the twin class, the next class, or any other alike.

    The twin of a class is the one whose mean is nearest among those that have none yet, so that twins come in pairs.
    """
    one_of("noise", noise, NOISES)
    if noise == "none":
        return vectors
    generator, labels, classes = np.random.default_rng([seed, 7]), vectors.labels.copy(), vectors.num_classes
    chosen = generator.random(len(labels)) < rate
    if noise == "twins":
        labels[chosen] = twins_of(vectors)[labels[chosen]]
    elif noise == "next":
        labels[chosen] = (labels[chosen] + 1) % classes
    else:
        labels[chosen] = (labels[chosen] + generator.integers(1, classes, chosen.sum())) % classes
    return vectors._replace(labels=labels)


def twins_of(vectors: Vectors) -> np.ndarray:
    """Return the twin of each class, [K]; a class left over is its own twin."""
    classes = vectors.num_classes
    means = np.stack([vectors.features[vectors.labels == label].mean(0) for label in range(classes)])
    distances = np.linalg.norm(means[:, None] - means, axis=-1)
    twins = np.arange(classes)
    pairs = sorted((distances[a, b], a, b) for a in range(classes) for b in range(a))
    free = set(range(classes))
    for _, a, b in pairs:
        if a in free and b in free:
            twins[a], twins[b] = b, a
            free -= {a, b}
    return twins


def write_vectors(directory: Path, stem: str, vectors: Vectors) -> tuple[Path, Path]:
    """Write the files STEM.npz and STEM-test.npz, as `hetxl train` reads them, unless they exist; return both."""
    paths = directory / f"{stem}.npz", directory / f"{stem}-test.npz"
    for path, features, labels in zip(paths, vectors[::2], vectors[1::2], strict=True):
        if not path.exists():
            write_arrays(path, {"features": features, "labels": labels}, compressed=False)
    return paths


def _divided(features: np.ndarray, labels: np.ndarray, seed: int) -> Vectors:
    """Divide the rows: a quarter of each class for the test, the others for training."""
    generator, test = np.random.default_rng([seed, 5]), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        test[rows[: max(1, len(rows) // 4)]] = True
    features, labels = features.astype(np.float32), labels.astype(np.int64)
    return Vectors(features[~test], labels[~test], features[test], labels[test])


def _bundled(name: str) -> Callable[[int, Path | None], Vectors]:
    """Return the loader of a set that comes with scikit-learn."""

    def load(seed: int, cache: Path | None) -> Vectors:
        import sklearn.datasets

        features, labels = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
        return _divided(features, labels, seed)

    return load


def _overlap(seed: int, cache: Path | None) -> Vectors:
    from sklearn.datasets import make_classification

    shares = [0.36, 0.3, 0.14, 0.09, 0.06, 0.03, 0.02]
    options = {"n_features": 20, "n_informative": 10, "n_classes": 7, "weights": shares, "class_sep": 0.8}
    features, labels = make_classification(6_000, random_state=0, **options)
    return _divided(features, labels, seed)


def _fashion(seed: int, cache: Path | None) -> Vectors:
    root = debian_package(PACKAGE, store.packages_directory(cache)).root
    images, labels, test_images, test_labels = (_idx(root, part) for part in ("train-images", "train-labels",
                                                                             "t10k-images", "t10k-labels"))  # fmt: skip
    generator = np.random.default_rng([seed, 5])
    rows = generator.permutation(len(labels))[:TRAIN_ROWS]
    test_rows = np.random.default_rng(5).permutation(len(test_labels))[:TEST_ROWS]
    pixels, mean = images.reshape(-1, IMAGES) / np.float32(255), images.mean(0).ravel() / np.float32(255)
    _, axes = np.linalg.eigh(np.cov((pixels - mean)[:20_000].T))
    project = axes[:, ::-1][:, :COMPONENTS].astype(np.float32)
    test_pixels = test_images[test_rows].reshape(-1, IMAGES) / np.float32(255)
    projected = [((part - mean) @ project).astype(np.float32) for part in (pixels[rows], test_pixels)]
    return Vectors(projected[0], labels[rows].astype(int), projected[1], test_labels[test_rows].astype(int))


def _idx(root: Path, part: str) -> np.ndarray:
    """Return the array of a file in MNIST's format, compressed or not."""
    path = next(root.rglob(f"{part}-idx*"))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _glosses(seed: int, cache: Path | None) -> Vectors:
    files = debian_package(wordnet.PACKAGE, store.packages_directory(cache)).root / "usr/share/wordnet"
    synsets = wordnet.read_synsets(files, "noun")
    # The same rows for every seed, which only divides them, so that the encoding of a minute runs once.
    chosen = [synsets[row] for row in np.random.default_rng(5).permutation(len(synsets))[: TEST_ROWS + GLOSSES]]
    features = MINILM.encode([wordnet.definition(synset.gloss) for synset in chosen], cache)
    _, labels = np.unique([synset.file for synset in chosen], return_inverse=True)
    test, train = np.split(np.random.default_rng([seed, 5]).permutation(len(labels)), [TEST_ROWS])
    return Vectors(features[train], labels[train], features[test], labels[test])


SETS: dict[str, Callable[[int, Path | None], Vectors]] = {
    "digits": _bundled("digits"),
    "wine": _bundled("wine"),
    "breast-cancer": _bundled("breast_cancer"),
    "overlap": _overlap,
    "fashion": _fashion,
    "glosses": _glosses,
}
"""Loaders by name: of a seed and the directory of caches, None for the default."""
