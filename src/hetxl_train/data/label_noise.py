"""Label noise: replace labels of training rows by wrong ones, and record which.

| kind | which rows | the new label |
| --- | --- | --- |
| `symmetric` | each with the same probability | any other class, uniformly |
| `confusable` | each with the same probability | one of the 5 nearest classes, the r-th nearest with weight 1/r |
| `feature-dependent` | with sigmoid(2 s + b), s a random linear function of the input | as `confusable` |

Which classes are near is computed from the data; no model is trained:

| input | a class is described by | near means |
| --- | --- | --- |
| features | the mean of its rows | a small Euclidean distance |
| images | the mean of its images, shrunk to 16 × 16 | a small Euclidean distance |
| tokens | the frequencies of the tokens one and two positions before it | a large overlap (Bhattacharyya) of these |
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hetxl._checks import integer_at_least, one_of
from hetxl_train.config import LABEL_NOISE
from hetxl_train.console import progress_bar
from hetxl_train.data.dataset import Dataset, InputSpec, RelabelledSplit, Split, Stored
from hetxl_train.data.labels import Labels

NEAR = 5
"""Classes that a label of the kinds other than "symmetric" may turn into."""

STEEPNESS = 2.0
"""How much the probability of a flip depends on the input, in logits per standard deviation of the function."""

POSITIONS = 2
"""Tokens before a class that describe it. With one, all names that only ever follow a dot would be equally near."""

BUCKETS = 4096  # of the tokens of texts
SIDE = 16  # side of a shrunk image in pixels: enough for its colours and rough shapes
IMAGES_PER_CLASS = 32  # images of a class, at most, in its mean: decoding is slow, and a mean of these is close enough
BLOCK = 2**21  # approximate number of values that are read or compared at a time
_STREAMS = {"which": 1, "new": 2, "direction": 3, "entry": 4}


@dataclass(frozen=True)
class LabelNoise(Stored):
    """The labels that were replaced."""

    what = "label noise"

    rows: np.ndarray  # [m] int64, the training rows, ascending
    old: np.ndarray  # [m] int64, the label that each had; of a row with several labels, the one that was replaced
    new: np.ndarray  # [m] int64, the label that it has now
    kind: str  # one of `LABEL_NOISE`
    rate: float  # the mean probability of a flip that was requested
    seed: int

    def __len__(self) -> int:
        return len(self.rows)


class NoisySplit(RelabelledSplit):
    """A split with some labels replaced; `source.labels` are the clean ones."""

    def __init__(self, source: Split, noise: LabelNoise):
        ids = np.array(source.labels.ids, dtype=np.int64)
        ids[_replaced(source.labels, noise)] = noise.new
        super().__init__(source, Labels(ids, source.labels.offsets))
        self.noise = noise


def with_label_noise(dataset: Dataset, kind: str, rate: float, seed: int = 0) -> Dataset:
    """Return the data with wrong labels in the training split; validation and test stay clean.

    Each training row that has a label is flipped or not by a draw of its own. Of a row with several labels one, drawn
    at random, is replaced by a class that the row does not have. No class is near a class without training rows. The
    training split becomes a `NoisySplit`, whose `noise` records which labels are wrong. `kind` is one of `LABEL_NOISE`,
    see the top of this module; `rate`, above 0 and up to 1, the mean probability of a flip.
    """
    one_of("kind", kind, LABEL_NOISE)
    integer_at_least("seed", seed, 0)
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate <= 1:
        raise ValueError(f"rate must be above 0 and at most 1, the share of labels to replace, found {rate!r}")
    if "train" not in dataset.splits:
        raise ValueError(
            f"label noise is for the training split; {dataset.name!r} has only {', '.join(dataset.splits)}"
        )
    train = dataset.splits["train"]
    if isinstance(train, NoisySplit):
        raise ValueError(f"the training split of {dataset.name!r} has label noise already; start from the clean data")
    if dataset.num_classes < 2:
        raise ValueError(f"label noise needs two classes or more, {dataset.name!r} has {dataset.num_classes}")
    noise, labelled = _draw(train, dataset, kind, float(rate), seed)
    note = (
        f"label noise: {kind}, rate {rate:g}, seed {seed}: {len(noise):,} of {labelled:,} training rows "
        f"({len(noise) / max(1, labelled):.1%}) have a wrong label; validation and test are clean"
    )
    return replace(dataset, splits={**dataset.splits, "train": NoisySplit(train, noise)}, notes=(*dataset.notes, note))


def _draw(split: Split, dataset: Dataset, kind: str, rate: float, seed: int) -> tuple[LabelNoise, int]:
    """Draw the flips; return them, and how many rows could have been flipped."""
    labels = split.labels
    labelled = np.asarray(labels.ids) >= 0 if labels.offsets is None else np.diff(labels.offsets)
    candidates = np.flatnonzero(labelled)
    near = None
    if kind != "symmetric":
        near = near_classes(split, dataset.input, dataset.num_classes, NEAR)
        if not near.shape[1]:
            raise ValueError(f"{kind} label noise needs training rows of two classes or more; use symmetric")
    probability: float | np.ndarray = rate
    if kind == "feature-dependent":
        probability = _probabilities(_scores(split, dataset.input, candidates, seed), rate)
    rows = candidates[_stream(seed, "which").random(len(candidates)) < probability]
    present = _label_table(labels, rows)  # [m, L], the labels of each row and then −1
    counts = (present >= 0).sum(1)
    pick = (_stream(seed, "entry").random(len(rows)) * counts).astype(np.int64)
    old = present[np.arange(len(rows)), pick]
    level = _stream(seed, "new").random(len(rows))
    new = _any_other(present, level, dataset.num_classes) if near is None else _near_other(present, near[old], level)
    flipped = new >= 0  # a row that has all the classes there are to choose from stays as it is
    return LabelNoise(rows[flipped], old[flipped], new[flipped], kind, rate, seed), len(candidates)


def _label_table(labels: Labels, rows: np.ndarray) -> np.ndarray:
    """Return the labels of some rows, each row's ascending and filled up with −1, [b, L] int64."""
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


def _replaced(labels: Labels, noise: LabelNoise) -> np.ndarray:
    """Return the indices of the replaced labels in `labels.ids`, [m]."""
    if labels.offsets is None:
        return noise.rows
    starts, stops = labels.offsets[noise.rows], labels.offsets[noise.rows + 1]
    # Row by row: labels may come in any order.
    indices = (
        start + int(np.flatnonzero(np.asarray(labels.ids[start:stop]) == old)[0])
        for start, stop, old in zip(starts.tolist(), stops.tolist(), noise.old.tolist(), strict=True)
    )
    return np.fromiter(indices, np.int64, len(noise.rows))


def _any_other(present: np.ndarray, level: np.ndarray, num_classes: int) -> np.ndarray:
    """Choose one of the classes that each row does not have, uniformly, [m]; −1 for a row that has all."""
    left = num_classes - (present >= 0).sum(1)
    new = (level * left).astype(np.int64)
    for column in present.T:  # ascending: each label at or below the number moves it up by one
        new += (column >= 0) & (column <= new)
    return np.where(left > 0, new, -1)


def _near_other(present: np.ndarray, near: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Choose one of the near classes [m, NEAR] that each row does not have, by rank, [m]; −1 for a row that has all."""
    weights = np.broadcast_to(1 / np.arange(1, near.shape[1] + 1), near.shape).copy()
    for column in present.T:
        weights[near == column[:, None]] = 0
    cumulated = weights.cumsum(1)
    chosen = (level[:, None] * cumulated[:, -1:] >= cumulated).sum(1).clip(max=near.shape[1] - 1)
    return np.where(cumulated[:, -1] > 0, near[np.arange(len(near)), chosen], -1)


def _scores(split: Split, input: InputSpec, rows: np.ndarray, seed: int) -> np.ndarray:
    """Return a random linear function of the inputs of some rows, with mean 0 and standard deviation 1, [n].

    Of tokens it is a sum over the context, each token with a weight for its position. Unreadable rows get 0.
    """
    rng = _stream(seed, "direction")
    table = torch.from_numpy(rng.standard_normal((*input.shape, input.vocabulary))) if input.kind == "tokens" else None
    weights: torch.Tensor | None = None
    scores, seen = np.zeros(len(rows)), np.zeros(len(rows), dtype=bool)
    for read, inputs in blocks(split, input, rows, "Drawing flips"):
        if table is not None:
            values = table[torch.arange(inputs.shape[1]), inputs].sum(1)
        else:
            vectors = as_vectors(inputs)
            if weights is None:
                weights = torch.from_numpy(rng.standard_normal(vectors.shape[1]))
            values = vectors @ weights
        indices = np.searchsorted(rows, read)
        scores[indices], seen[indices] = values.numpy(), True
    if not seen.any():
        return scores
    scores = np.where(seen, scores - scores[seen].mean(), 0)
    spread = scores[seen].std()
    return scores / spread if spread > 0 else scores


def _probabilities(scores: np.ndarray, rate: float) -> np.ndarray:
    """Return sigmoid(2 s + b), [n], with the b that makes the mean `rate` (by bisection)."""
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
    """Return random numbers for one use, independent of all other uses."""
    return np.random.default_rng([seed, _STREAMS[use]])


def near_classes(split: Split, input: InputSpec, num_classes: int, count: int = 5) -> np.ndarray:
    """Return the classes nearest to each class, the nearest first, [K, count]; −1 for classes without examples.

    A row with several labels counts for each. There are fewer columns if fewer other classes have rows.
    """
    present = np.flatnonzero(split.labels.counts(num_classes))
    count = min(count, max(0, len(present) - 1))
    near = np.full((num_classes, count), -1, dtype=np.int64)
    if count:
        if input.kind == "tokens":
            nearest = _nearest_overlaps(_contexts(split, input, num_classes, present), count)
        else:
            means = _means(split, input, num_classes)[torch.from_numpy(present)]
            means = means - means.mean(0)  # differences stay exact if all means share a large offset
            squares, step = means.square().sum(1), max(1, BLOCK // len(means))
            # Without a row's own square, which all of its distances share.
            nearest = _nearest(len(means), step, lambda a, b: squares - 2 * means[a:b] @ means.T, count)
        near[present] = present[nearest]
    return near


def as_vectors(inputs: Tensor) -> Tensor:
    """Return features, or images shrunk to 16 × 16, as rows of numbers, [b, P] in double precision."""
    if inputs.dim() == 4:
        inputs = adaptive_avg_pool2d(inputs, (min(SIDE, inputs.shape[-2]), min(SIDE, inputs.shape[-1])))
    return inputs.flatten(1).double()


def bags_of_tokens(ids: Tensor) -> Tensor:
    """Return how often the tokens of texts [b, L] occur, [b, `BUCKETS`]; −1 is none."""
    counts = torch.zeros(len(ids), BUCKETS + 1, dtype=torch.float64)
    counts.scatter_add_(1, torch.where(ids < 0, BUCKETS, ids % BUCKETS), torch.ones(ids.shape, dtype=torch.float64))
    return counts[:, :BUCKETS]


def blocks(split: Split, input: InputSpec, rows: np.ndarray, description: str) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Read rows [n] (ascending) block by block: yield the rows that could be read, and their inputs."""
    step = max(1, BLOCK // int(np.prod(input.shape)))
    with progress_bar(description, len(rows)) as advance:
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            fetched = split.fetch(part)
            yield fetched.rows, bags_of_tokens(fetched.inputs) if input.kind == "text" else fetched.inputs
            advance(len(part))


def _means(split: Split, input: InputSpec, num_classes: int) -> Tensor:
    """Return the mean of each class, [K, P]; zeros for classes without readable rows."""
    rows = _some_of_each(split) if input.kind == "image" else np.arange(len(split))
    sums, counts = torch.zeros(0), torch.zeros(num_classes, 1, dtype=torch.float64)
    for read, inputs in blocks(split, input, rows, "Averaging classes"):
        vectors = as_vectors(inputs)
        if not len(sums):
            sums = torch.zeros(num_classes, vectors.shape[1], dtype=torch.float64)
        indices, classes = map(torch.from_numpy, split.labels.entries(read))
        sums.index_add_(0, classes, vectors[indices])
        counts.index_add_(0, classes, torch.ones(len(classes), 1, dtype=torch.float64))
    return sums / counts.clamp(min=1)


def _some_of_each(split: Split) -> np.ndarray:
    """Draw at most `IMAGES_PER_CLASS` rows of each class by a fixed seed, ascending."""
    order = np.random.default_rng(0).permutation(len(split))
    indices, classes = split.labels.entries(order)
    by_class = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[by_class], prepend=-1))
    sizes = np.diff(starts, append=len(by_class))
    within = np.arange(len(by_class)) - np.repeat(starts, sizes)
    return np.unique(order[indices[by_class[within < IMAGES_PER_CLASS]]])


def _contexts(split: Split, input: InputSpec, num_classes: int, present: np.ndarray) -> Tensor:
    """Return square roots of the frequencies of the tokens before each present class, sparse [k, POSITIONS · V]."""
    positions = min(POSITIONS, input.shape[0])
    width = positions * input.vocabulary
    keys, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for read, inputs in blocks(split, input, np.arange(len(split)), "Counting tokens before each class"):
        indices, classes = split.labels.entries(read)
        tokens = inputs.numpy()[indices, -positions:] + np.arange(positions) * input.vocabulary  # [m, POSITIONS]
        new, new_counts = np.unique(classes[:, None] * width + tokens, return_counts=True)
        keys, back = np.unique(np.concatenate((keys, new)), return_inverse=True)
        counts = np.bincount(back, np.concatenate((counts, new_counts)), len(keys)).astype(np.int64)
    classes = keys // width
    totals = np.bincount(classes, counts, num_classes)
    row_of = np.full(num_classes, -1)
    row_of[present] = np.arange(len(present))
    entries = torch.from_numpy(np.stack((row_of[classes], keys % width)))
    values = torch.from_numpy(np.sqrt(counts / totals[classes]))
    return torch.sparse_coo_tensor(entries, values, (len(present), width), check_invariants=True).coalesce()


def _nearest_overlaps(rows: Tensor, count: int) -> np.ndarray:
    """Return the indices of the other rows with the largest inner product, [k, count]; the first ones among equals."""
    size = rows.shape[0]
    # Many classes overlap equally, often not at all; then the order decides, which is the same on every machine.
    ties = torch.arange(size) * (1e-9 / size)
    indices, values = rows.indices(), rows.values()

    def distances(start: int, stop: int) -> Tensor:
        inside = (indices[0] >= start) & (indices[0] < stop)
        dense = torch.zeros(rows.shape[1], stop - start, dtype=values.dtype)
        dense[indices[1, inside], indices[0, inside] - start] = values[inside]
        return ties - torch.sparse.mm(rows, dense).T

    return _nearest(size, max(1, BLOCK // max(rows.shape)), distances, count)


def _nearest(size: int, step: int, distances: Callable[[int, int], Tensor], count: int) -> np.ndarray:
    """Return the indices of the nearest others of k rows, [k, count], from the distances [step, k] of some to all."""
    nearest = []
    with progress_bar("Comparing classes", size) as advance:
        for start in range(0, size, step):
            block = distances(start, min(start + step, size))
            own = torch.arange(len(block))
            block[own, start + own] = torch.inf
            nearest.append(block.topk(count, largest=False).indices)
            advance(len(block))
    return torch.cat(nearest).numpy()
