"""Which classes are easily taken for each other, told from the data alone: no model is trained.

| input | a class is described by | near is |
| --- | --- | --- |
| features | the mean of its rows | a small Euclidean distance |
| pictures | the mean of its pictures, shrunk to 16 × 16 | a small Euclidean distance |
| tokens | how often each token stands one and two places before it | a large overlap (Bhattacharyya) of these |
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hetxl.data.dataset import InputSpec, Split
from hetxl.data.progress import progress_bar
from hetxl.functional import LabelLists

PLACES = 2
"""Tokens before a class that describe it. With one, all names that only ever follow a dot would be equally near."""

SIDE = 16
"""Pixels of the side of a shrunk picture: enough for its colours and rough shapes."""

PICTURES = 32
"""Pictures of a class, at most, that its mean is taken of: decoding is slow, and a mean of these is close enough."""

BLOCK = 2**21
"""Numbers that are read or compared at a time, about."""


def near_classes(split: Split, input: InputSpec, num_classes: int, count: int = 5) -> np.ndarray:
    """The classes nearest to each class, the nearest first, with a progress bar on a terminal.

    Args:
        split: whose rows describe the classes; a row with several labels counts for each.
        input: what the rows are.
        num_classes: K
        count: how many near classes to find; fewer where fewer other classes have rows.

    Returns:
        [K, count] int64, and −1 in the rows of classes that no row has.
    """
    present = np.flatnonzero(split.labels.counts(num_classes))
    count = min(count, max(0, len(present) - 1))
    found = np.full((num_classes, count), -1, dtype=np.int64)
    if count:
        if input.kind == "tokens":
            place = _nearest_overlaps(_contexts(split, input, num_classes)[present], count)
        else:
            place = _nearest_means(_means(split, input, num_classes)[torch.from_numpy(present)], count)
        found[present] = present[place]
    return found


def as_vectors(inputs: Tensor) -> Tensor:
    """Features, or pictures shrunk to 16 × 16, as rows of numbers, [b, P] in double precision."""
    if inputs.dim() == 4:
        inputs = adaptive_avg_pool2d(inputs, (min(SIDE, inputs.shape[-2]), min(SIDE, inputs.shape[-1])))
    return inputs.flatten(1).double()


def blocks(split: Split, input: InputSpec, rows: np.ndarray, description: str) -> Iterator[tuple[np.ndarray, Tensor]]:
    """The inputs of some rows, block by block, with a progress bar: the rows that could be read, and their inputs.

    Args:
        split: to read from.
        input: what the rows are.
        rows: [n], ascending.
        description: what is done, for the bar.
    """
    step = max(1, BLOCK // int(np.prod(input.shape)))
    with progress_bar(description, len(rows)) as advance:
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            fetched = split.fetch(part)
            yield fetched.rows, fetched.inputs
            advance(len(part))


def entries(split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The labels of some rows: which of the rows [m], and which class [m]; rows without a label are not among them."""
    targets = split.labels.take(rows)
    if isinstance(targets, LabelLists):
        return targets.examples.numpy(), targets.classes.numpy()
    places = np.flatnonzero(targets.numpy() >= 0)
    return places, targets.numpy()[places]


def _means(split: Split, input: InputSpec, num_classes: int) -> Tensor:
    """[K, P]; zeros for classes without rows that could be read."""
    rows = _some_of_each(split) if input.kind == "image" else np.arange(len(split))
    sums, counts = torch.zeros(0), torch.zeros(num_classes, 1, dtype=torch.float64)
    for read, inputs in blocks(split, input, rows, "Means of the classes"):
        vectors = as_vectors(inputs)
        if not len(sums):
            sums = torch.zeros(num_classes, vectors.shape[1], dtype=torch.float64)
        places, classes = map(torch.from_numpy, entries(split, read))
        sums.index_add_(0, classes, vectors[places])
        counts.index_add_(0, classes, torch.ones(len(classes), 1, dtype=torch.float64))
    return sums / counts.clamp(min=1)


def _some_of_each(split: Split) -> np.ndarray:
    """At most `PICTURES` rows of each class, drawn by a fixed seed, ascending."""
    order = np.random.default_rng(0).permutation(len(split))
    places, classes = entries(split, order)
    by_class = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[by_class], prepend=-1))
    sizes = np.diff(starts, append=len(by_class))
    within = np.arange(len(by_class)) - np.repeat(starts, sizes)
    return np.unique(order[places[by_class[within < PICTURES]]])


def _nearest_means(means: Tensor, count: int) -> np.ndarray:
    """[k, count] places of the nearest other means."""
    means = means - means.mean(0)  # differences stay exact where all means share a large offset
    squares = means.square().sum(1)
    step = max(1, BLOCK // len(means))
    found = []
    with progress_bar("Comparing classes", len(means)) as advance:
        for start in range(0, len(means), step):
            block = means[start : start + step]
            found.append(_smallest(squares - 2 * block @ means.T, start, count))  # without a row's own square
            advance(len(block))
    return torch.cat(found).numpy()


def _smallest(distances: Tensor, start: int, count: int) -> Tensor:
    """Places [b, count] of the smallest entries [b, k], a row's own left out."""
    own = torch.arange(len(distances))
    distances[own, start + own] = torch.inf
    return distances.topk(count, largest=False).indices


class _Contexts:
    """Square roots of the shares of the tokens before each class, as sparse rows."""

    def __init__(self, classes: np.ndarray, tokens: np.ndarray, values: np.ndarray, shape: tuple[int, int]):
        self.classes, self.tokens, self.values, self.shape = classes, tokens, values, shape

    def __getitem__(self, chosen: np.ndarray) -> Tensor:
        """The rows of some classes [k] that have entries, as a sparse matrix [k, PLACES · V]."""
        place = np.full(self.shape[0], -1)
        place[chosen] = np.arange(len(chosen))
        indices = torch.from_numpy(np.stack((place[self.classes], self.tokens)))
        values = torch.from_numpy(self.values)
        return torch.sparse_coo_tensor(indices, values, (len(chosen), self.shape[1]), check_invariants=True).coalesce()


def _contexts(split: Split, input: InputSpec, num_classes: int) -> _Contexts:
    places = min(PLACES, input.shape[0])
    width = places * input.vocabulary
    keys, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for read, inputs in blocks(split, input, np.arange(len(split)), "Tokens before each class"):
        which, classes = entries(split, read)
        tokens = inputs.numpy()[which, -places:] + np.arange(places) * input.vocabulary  # [m, PLACES]
        new, new_counts = np.unique(classes[:, None] * width + tokens, return_counts=True)
        keys, back = np.unique(np.concatenate((keys, new)), return_inverse=True)
        counts = np.bincount(back, np.concatenate((counts, new_counts)), len(keys)).astype(np.int64)
    classes = keys // width
    totals = np.bincount(classes, counts, num_classes)
    return _Contexts(classes, keys % width, np.sqrt(counts / totals[classes]), (num_classes, width))


def _nearest_overlaps(rows: Tensor, count: int) -> np.ndarray:
    """[k, count] places of the other rows with the largest inner product; the first ones among equals."""
    size = rows.shape[0]
    step = max(1, BLOCK // max(rows.shape))
    # Many classes overlap equally, often not at all; then the order decides, and nothing that differs between machines.
    ties = torch.arange(size) * (1e-9 / size)
    indices, values = rows.indices(), rows.values()
    found = []
    with progress_bar("Comparing classes", size) as advance:
        for start in range(0, size, step):
            stop = min(start + step, size)
            inside = (indices[0] >= start) & (indices[0] < stop)
            dense = torch.zeros(rows.shape[1], stop - start, dtype=values.dtype)
            dense[indices[1, inside], indices[0, inside] - start] = values[inside]
            found.append(_smallest(ties - torch.sparse.mm(rows, dense).T, start, count))
            advance(stop - start)
    return torch.cat(found).numpy()
