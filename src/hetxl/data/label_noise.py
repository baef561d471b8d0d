"""Label noise on demand: labels of the training rows replaced by wrong ones, and a list of which.

| kind | which rows | the new label |
| --- | --- | --- |
| `symmetric` | each with the same probability | any other class, all alike |
| `confusable` | each with the same probability | one of the 5 nearest classes, the r-th nearest with weight 1/r |
| `feature-dependent` | with sigmoid(2 s + b), s a random linear function of the input | as `confusable` |

What near means is in `hetxl.data.near_classes`.
"""

import math
import os
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from hetxl.data.build.files import write_arrays
from hetxl.data.dataset import Dataset, Fetched, InputSpec, Shown, Split
from hetxl.data.labels import Labels
from hetxl.data.near_classes import as_vectors, blocks, near_classes
from hetxl.functional._checks import integer_at_least, one_of

KINDS = ("symmetric", "confusable", "feature-dependent")

NEAR = 5
"""Classes that a label of the kinds beside "symmetric" may turn into."""

STEEPNESS = 2.0
"""How much the probability of a flip depends on the input, in logits for one standard deviation of the function."""

_STREAMS = {"which": 1, "new": 2, "direction": 3, "entry": 4}


@dataclass(frozen=True)
class LabelNoise:
    """Which labels were replaced.

    Attributes:
        rows: [m] int64, the training rows, ascending.
        old: [m] int64, the label that each had; of a row with several labels, the one that was replaced.
        new: [m] int64, the label that it has now.
        kind: one of `KINDS`.
        rate: that was asked for.
        seed: of the draws.
    """

    rows: np.ndarray
    old: np.ndarray
    new: np.ndarray
    kind: str
    rate: float
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .npz file, whole or not at all.

        Args:
            path: of the file.
        """
        write_arrays(Path(path), {name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LabelNoise":
        """Read what `save` wrote.

        Args:
            path: of the file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                values = {name: file[name] for name in _FIELDS}
        except FileNotFoundError:
            raise FileNotFoundError(f"{os.fspath(path)} does not exist; hetxl train --label-noise writes it") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zlib.error, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{os.fspath(path)} holds no label noise ({error}); write it with LabelNoise.save"
            ) from None
        rows, old, new = lists = [values[name] for name in ("rows", "old", "new")]
        if any(one.dtype != np.int64 or one.ndim != 1 or len(one) != len(lists[0]) for one in lists):
            found = ", ".join(f"{one.dtype} {list(one.shape)}" for one in lists)
            raise ValueError(f"{os.fspath(path)} must have rows, old and new of int64 [m], found {found}")
        return cls(rows, old, new, str(values["kind"]), float(values["rate"]), int(values["seed"]))


_FIELDS = ("rows", "old", "new", "kind", "rate", "seed")


class NoisySplit(Split):
    """A split with some labels replaced; inputs and looks are those of the source.

    Args:
        source: the split as it was; `source.labels` are the clean labels.
        noise: which labels are replaced.
    """

    def __init__(self, source: Split, noise: LabelNoise):
        self.source, self.noise = source, noise
        self.workers = source.workers
        ids = np.array(source.labels.ids, dtype=np.int64)
        ids[_places(source.labels, noise)] = noise.new
        self.labels = Labels(ids, source.labels.offsets)

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows of the source."""
        return self.source.fetch(rows, seeds)

    def show(self, row: int) -> Shown:
        """As the source shows it."""
        return self.source.show(row)


def with_label_noise(dataset: Dataset, kind: str, rate: float, seed: int = 0) -> Dataset:
    """The same data with wrong labels in the training split; validation and test stay clean.

    Each training row that has a label is flipped or not by a draw of its own. Of a row with several labels one, drawn
    at random, is replaced by a class that the row does not have. Classes without training rows are near to nothing.

    Args:
        dataset: any with a training split and two classes or more.
        kind: one of `KINDS`, see the top of this module.
        rate: the mean probability of a flip, above 0 and up to 1.
        seed: of all draws.

    Returns:
        A dataset whose training split is a `NoisySplit`: its `noise` tells which labels are wrong.
    """
    one_of("kind", kind, KINDS)
    integer_at_least("seed", seed, 0)
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate <= 1:
        raise ValueError(f"rate must be above 0 and at most 1, the share of labels to replace, found {rate!r}")
    if "train" not in dataset.splits:
        raise ValueError(
            f"label noise is for the training split; {dataset.name!r} has only {', '.join(dataset.splits)}"
        )
    split = dataset.splits["train"]
    if isinstance(split, NoisySplit):
        raise ValueError(f"the training split of {dataset.name!r} has label noise already; start from the clean data")
    if dataset.num_classes < 2:
        raise ValueError(f"label noise needs two classes or more, {dataset.name!r} has {dataset.num_classes}")
    noise, labelled = _draw(split, dataset, kind, float(rate), seed)
    reached = len(noise) / max(1, labelled)
    note = (
        f"label noise: {kind}, rate {rate:g}, seed {seed}: {len(noise):,} of {labelled:,} training rows "
        f"({reached:.1%}) have a wrong label; validation and test are clean"
    )
    splits = {name: NoisySplit(one, noise) if name == "train" else one for name, one in dataset.splits.items()}
    return replace(dataset, splits=splits, notes=(*dataset.notes, note))


def _draw(split: Split, dataset: Dataset, kind: str, rate: float, seed: int) -> tuple[LabelNoise, int]:
    """The flips, and how many rows might have been flipped."""
    labels = split.labels
    candidates = _labelled(labels)
    near = None
    if kind != "symmetric":
        near = near_classes(split, dataset.input, dataset.num_classes, NEAR)
        if not near.shape[1]:
            raise ValueError(f"{kind} label noise needs training rows of two classes or more; use symmetric")
    probability: float | np.ndarray = rate
    if kind == "feature-dependent":
        probability = _probabilities(_scores(split, dataset.input, candidates, seed), rate)
    rows = candidates[_stream(seed, "which").random(len(candidates)) < probability]
    have = _label_table(labels, rows)  # [m, L], the labels of each row and then −1
    counts = (have >= 0).sum(1)
    pick = (_stream(seed, "entry").random(len(rows)) * counts).astype(np.int64)
    old = have[np.arange(len(rows)), pick]
    level = _stream(seed, "new").random(len(rows))
    new = _any_other(have, level, dataset.num_classes) if near is None else _near_other(have, near[old], level)
    flipped = new >= 0  # a row that has all the classes there are to choose from stays as it is
    return LabelNoise(rows[flipped], old[flipped], new[flipped], kind, rate, seed), len(candidates)


def _labelled(labels: Labels) -> np.ndarray:
    """The rows that have a label, ascending."""
    if labels.offsets is None:
        return np.flatnonzero(np.asarray(labels.ids) >= 0)
    return np.flatnonzero(np.diff(labels.offsets))


def _label_table(labels: Labels, rows: np.ndarray) -> np.ndarray:
    """The labels of some rows, each row's ascending and filled up with −1, [b, L] int64."""
    if labels.offsets is None:
        return np.asarray(labels.ids[rows], dtype=np.int64)[:, None]
    part = labels.subset(rows)
    assert part.offsets is not None
    counts = np.diff(part.offsets)
    owners = np.repeat(np.arange(len(rows)), counts)
    order = np.lexsort((part.ids, owners))
    table = np.full((len(rows), counts.max(initial=1)), -1, dtype=np.int64)
    table[owners, np.arange(len(owners)) - np.repeat(part.offsets[:-1], counts)] = part.ids[order]
    return table


def _places(labels: Labels, noise: LabelNoise) -> np.ndarray:
    """Where in `labels.ids` the replaced labels are, [m]."""
    if labels.offsets is None:
        return noise.rows
    starts, stops = labels.offsets[noise.rows], labels.offsets[noise.rows + 1]
    # Row by row: labels may come in any order.
    found = (
        start + int(np.flatnonzero(np.asarray(labels.ids[start:stop]) == old)[0])
        for start, stop, old in zip(starts.tolist(), stops.tolist(), noise.old.tolist(), strict=True)
    )
    return np.fromiter(found, np.int64, len(noise.rows))


def _any_other(have: np.ndarray, level: np.ndarray, num_classes: int) -> np.ndarray:
    """One of the classes that each row does not have, all alike, [m]; −1 for a row that has all."""
    left = num_classes - (have >= 0).sum(1)
    new = (level * left).astype(np.int64)
    for column in have.T:  # ascending: each label at or below the number moves it up by one
        new += (column >= 0) & (column <= new)
    return np.where(left > 0, new, -1)


def _near_other(have: np.ndarray, near: np.ndarray, level: np.ndarray) -> np.ndarray:
    """One of the near classes [m, NEAR] that each row does not have, by rank, [m]; −1 for a row that has all."""
    weights = np.broadcast_to(1 / np.arange(1, near.shape[1] + 1), near.shape).copy()
    for column in have.T:
        weights[near == column[:, None]] = 0
    cumulated = weights.cumsum(1)
    chosen = (level[:, None] * cumulated[:, -1:] >= cumulated).sum(1).clip(max=near.shape[1] - 1)
    return np.where(cumulated[:, -1] > 0, near[np.arange(len(near)), chosen], -1)


def _scores(split: Split, input: InputSpec, rows: np.ndarray, seed: int) -> np.ndarray:
    """A random linear function of the inputs of some rows, with mean 0 and standard deviation 1, [n].

    Of tokens it is a sum over the context, each token with a weight for its place. Rows that cannot be read get 0.
    """
    rng = _stream(seed, "direction")
    table = torch.from_numpy(rng.standard_normal((*input.shape, input.vocabulary))) if input.kind == "tokens" else None
    weights: torch.Tensor | None = None
    values, seen = np.zeros(len(rows)), np.zeros(len(rows), dtype=bool)
    for read, inputs in blocks(split, input, rows, "How likely flips are"):
        if table is not None:
            found = table[torch.arange(inputs.shape[1]), inputs].sum(1)
        else:
            vectors = as_vectors(inputs)
            if weights is None:
                weights = torch.from_numpy(rng.standard_normal(vectors.shape[1]))
            found = vectors @ weights
        places = np.searchsorted(rows, read)
        values[places], seen[places] = found.numpy(), True
    if not seen.any():
        return values
    values = np.where(seen, values - values[seen].mean(), 0)
    spread = values[seen].std()
    return values / spread if spread > 0 else values


def _probabilities(scores: np.ndarray, rate: float) -> np.ndarray:
    """sigmoid(2 s + b), [n], with the b that makes the mean `rate`."""
    if rate == 1:
        return np.ones(len(scores))
    middle = math.log(rate / (1 - rate))
    most = STEEPNESS * float(np.abs(scores).max(initial=0)) + 1
    low, high = middle - most, middle + most
    for _ in range(60):
        centre = (low + high) / 2
        if _sigmoid(STEEPNESS * scores + centre).mean() < rate:
            low = centre
        else:
            high = centre
    return _sigmoid(STEEPNESS * scores + (low + high) / 2)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(values / 2))  # without overflow


def _stream(seed: int, use: str) -> np.random.Generator:
    """Random numbers for one use, independent of all other uses."""
    return np.random.default_rng([seed, _STREAMS[use]])
