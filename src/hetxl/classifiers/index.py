"""An approximate nearest-neighbour index over the rows of W that is kept up to date while W is trained.

Logits are inner products of [w_k, b_k] and [φ, 1], so the classes with the largest logits are nearest neighbours. W
changes in every step and the index does not. Three rules keep it accurate:

- Rows that a loss has read are *fresh* from the next step on: the index skips them, and they are scored exactly with
  the current W. When there are too many, the inverted file replaces their vectors.
- The longest rows are always scored exactly, because they are near to queries in many directions.
- Other rows change a little through weight decay or momentum. After `max_stale` steps the index is rebuilt.

Building the inverted file of a million rows of 256 takes a minute or two on two cores.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl._checks import needing

FRESH_SHARE = 16  # one row in this many may be fresh: for a million rows, scoring them costs about as much as a search
FEW_FRESH = 1024  # number of rows that may always be fresh
LONG_SHARE = 256
"""One row in this many, the longest, is always scored exactly."""
QUICK_SHARE = 8
"""At most one cell in this many is searched for a loss, which does not need exact neighbours."""
LEAST_EFFORT = 8  # minimum number of cells that a search visits
TUNED_ON, TUNED_FOR = 128, 10  # number of queries that tune the effort, and of their neighbours that should be found
ALIGNED = 16  # number of columns is a multiple of this, which makes the inner loops several times faster
QUERIES = 2048  # block size when all classes are scored
SCORES = 2**25  # elements of the largest tensor of scores
SEEN = 64  # rows of W that are compared to detect changes
LATE = 0.4  # share of the centres that are added in the second round
POINTS = 32  # rows per centre in k-means; more rows would split fewer clusters, but take longer
BLOCK = 16_384  # block size when all rows are read


class Stamp(NamedTuple):
    """Address, version counter and some values of parameters, to detect changes.

    The values detect changes through `.data`, which are not counted; averaged weights are often assigned that way.
    """

    places: tuple[int, ...]
    versions: tuple[int, ...]
    seen: tuple[float, ...]

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> "Stamp":
        """Return the stamp of the current parameters."""
        tensors = [tensor.detach() for tensor in (weight, bias) if tensor is not None]
        # Tensors created in inference mode have no version counter.
        versions = tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)
        # Products with fixed numbers, so that swapped rows count as a change.
        some = [tensor[:: max(1, len(tensor) // SEEN)].double().flatten() for tensor in tensors]
        seen = tuple(float(values @ torch.arange(1.0, len(values) + 1).to(values)) for values in some)
        return Stamp(tuple(tensor.data_ptr() for tensor in tensors), versions, seen)

    def changed(self, since: "Stamp") -> bool:
        """Return whether the same parameters have changed since another stamp."""
        return (self.versions, self.seen) != (since.versions, since.seen)


def import_faiss() -> Any:
    """Import faiss and set its number of threads to torch's."""
    with needing("RetrievedClassifier needs faiss", "faiss-cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from faiss's wrapper
        import faiss
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


class ClassIndex:
    """The index with its state. Copies and pickles are empty and must be rebuilt."""

    def __init__(self, max_stale: int, recall_target: float):
        self.max_stale, self.recall_target = max_stale, recall_target
        self.clear()

    def clear(self) -> None:
        """Discard the index; the next use rebuilds it."""
        self.built: Stamp | None = None  # stamp of the parameters it was built from
        self.behind = 0  # steps since then
        self.effort = LEAST_EFFORT  # cells that a thorough search visits
        self.index: Any = None
        self.scale = 1.0
        # numpy arrays, because tensors created in inference mode cannot be changed outside of it.
        self.fresh = self.waiting = self.long = np.zeros(0, dtype=bool)

    def __getstate__(self) -> dict[str, Any]:
        return {"max_stale": self.max_stale, "recall_target": self.recall_target}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def staleness(self, weight: Tensor, bias: Tensor | None) -> int | None:
        """Return the number of steps since the index was built; None without an index for these parameters."""
        now = Stamp.of(weight, bias)
        if self.built is None or now.places != self.built.places:
            return None
        return self.behind + now.changed(self.built)

    @torch.no_grad()
    def follow(self, weight: Tensor, bias: Tensor | None, queries: Tensor, *, strictly: bool) -> None:
        """Update the index for W [K, D] and b [K]; a rebuilt index is tuned on some of the queries [n, D].

        With `strictly`, any change of W causes a rebuild. Otherwise a change counts as a step that moved only the rows
        passed to `touch`.
        """
        steps = self.staleness(weight, bias)
        if steps is None:
            self.clear()
        elif steps > self.behind:
            self.behind, self.built = steps, Stamp.of(weight, bias)
            self.fresh |= self.waiting
            self.waiting[:] = False
        if steps is None or (strictly and steps) or steps > self.max_stale:
            self.build(weight, bias, queries)
        elif self.fresh.sum() > max(FEW_FRESH, len(weight) // FRESH_SHARE):
            self._fold(weight, bias)

    def touch(self, classes: Tensor) -> None:
        """Record that a loss reads rows [n] of W; they become fresh with the next step, which moves them."""
        self.waiting[classes.cpu().numpy()] = True

    @torch.no_grad()
    def build(self, weight: Tensor, bias: Tensor | None, queries: Tensor) -> None:
        """Build the index from W and tune it on queries [n, D], or on noisy rows of W if there are few queries."""
        faiss = import_faiss()
        largest = torch.stack([tensor.detach().abs().max().float() for tensor in (weight, bias) if tensor is not None])
        # The maximum of a tensor that contains NaN is NaN.
        if not largest.isfinite().all():
            raise ValueError(
                "weight and bias of a RetrievedClassifier must be finite, found NaN or infinite values; lower the "
                "learning rate, or load other weights"
            )
        # Scale all vectors into the range of half precision, with some margin.
        self.scale = 1 / max(float(largest.max()), 1e-30)
        generator = torch.Generator().manual_seed(0)
        self.index = self._inverted_file(faiss, weight, bias, generator)
        self.fresh, self.long = np.zeros(len(weight), dtype=bool), _longest(weight, bias)
        if len(self.waiting) != len(weight):
            self.waiting = np.zeros(len(weight), dtype=bool)
        self.built, self.behind = Stamp.of(weight, bias), 0
        self._tune(weight, bias, queries, generator)

    @torch.no_grad()
    def search(
        self, weight: Tensor, bias: Tensor | None, queries: Tensor, k: int, *, thorough: bool
    ) -> tuple[Tensor, Tensor]:
        """Return logits and ids [n, k] of the classes with the largest logits, in descending order; id −1 if missing.

        Fresh rows are scored from W [K, D] and b [K] for queries [n, D]. `thorough` favours recall over speed.
        """
        faiss, effort, beside = import_faiss(), self.effort, self.fresh | self.long
        apart = torch.from_numpy(beside.nonzero()[0]).to(weight.device)
        bits = np.packbits(beside, bitorder="little")  # keep a reference, because faiss stores pointers
        bitmap = faiss.IDSelectorBitmap(bits)
        selected = faiss.IDSelectorNot(bitmap)
        if not thorough:
            effort = max(LEAST_EFFORT, min(effort, self.index.nlist // QUICK_SHARE))
        # Far more cells than k rows of the index need.
        least = 2 + 4 * k * self.index.nlist // max(1, len(beside) - len(apart))
        options = faiss.SearchParametersIVF(sel=selected, nprobe=min(max(effort, least), self.index.nlist))
        rows = _extended(queries.detach(), None if bias is None else 1.0)
        nearest_rows = self.index.search(rows.cpu().numpy(), k, params=options)
        scores, ids = (torch.from_numpy(values).to(weight.device) for values in nearest_rows)
        exact, own = top_logits(weight, bias, queries, min(k, len(apart)), apart)
        together = torch.cat(((scores / self.scale).masked_fill(ids < 0, -torch.inf).to(exact.dtype), exact), -1)
        scores, places = together.topk(k)
        return scores, torch.cat((ids, own), -1).gather(-1, places)

    @torch.no_grad()
    def recall(self, weight: Tensor, bias: Tensor | None, queries: Tensor, k: int, *, thorough: bool) -> float:
        """Return the share of the true top k classes that a search finds."""
        true = top_logits(weight, bias, queries, k)[1]
        retrieved = self.search(weight, bias, queries, k, thorough=thorough)[1]
        return float((true.unsqueeze(-1) == retrieved.unsqueeze(-2)).any(-1).double().mean())

    def _tune(self, weight: Tensor, bias: Tensor | None, queries: Tensor, generator: torch.Generator) -> None:
        """Return the smallest effort, in factors of 2, that reaches the target recall."""
        queries = queries.detach()[:TUNED_ON]
        if len(queries) < TUNED_ON:
            some = torch.randint(len(weight), (TUNED_ON - len(queries),), generator=generator)
            like = weight.detach()[some.to(weight.device)].float()
            noise = torch.randn(like.shape, generator=generator).to(like.device)
            like = like + noise * like.square().mean(-1, keepdim=True).sqrt()
            queries = torch.cat((queries.to(weight.device, torch.float32), like))
        k, most = min(TUNED_FOR, len(weight)), self.index.nlist
        true = top_logits(weight, bias, queries, k)[1].unsqueeze(-1)
        self.effort = min(LEAST_EFFORT, most)
        while True:
            # Some more, because half-precision vectors may swap places with the next ones.
            retrieved = self.search(weight, bias, queries, min(2 * k, len(weight)), thorough=True)[1].unsqueeze(-2)
            hit = (true == retrieved).any(-1).double()  # [n, k]
            if self.effort >= most or min(float(hit.mean()), float(hit[:, 0].mean())) >= self.recall_target:
                return
            self.effort = min(2 * self.effort, most)

    def _fold(self, weight: Tensor, bias: Tensor | None) -> None:
        """Insert the fresh rows into the index."""
        import_faiss()
        for ids in torch.from_numpy(self.fresh.nonzero()[0]).split(BLOCK):
            self.index.update_vectors(ids.numpy(), self._rows(weight, bias, ids).cpu().numpy())
        self.fresh[:], self.long = False, _longest(weight, bias)

    def _inverted_file(self, faiss: Any, weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> Any:
        from faiss.contrib.ivf_tools import add_preassigned

        total = len(weight)
        count = max(1, min(round(4 * math.sqrt(total)), total // 8))
        centres, cells = find_cells(lambda ids: self._rows(weight, bias, ids), total, count, generator)
        coarse = faiss.IndexFlatIP(centres.shape[1])
        coarse.add(centres.cpu().numpy())
        half, product = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFScalarQuantizer(coarse, centres.shape[1], len(centres), half, product, False)
        index.train(centres.cpu().numpy())
        for ids in torch.arange(total).split(BLOCK):
            add_preassigned(index, self._rows(weight, bias, ids).cpu().numpy(), cells[ids].numpy())
        index.make_direct_map()
        return index

    def _rows(self, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
        """[w_k, b_k, 0 …] at ids [n], scaled."""
        ids = ids.to(weight.device)
        return _extended(weight.detach()[ids], None if bias is None else bias.detach()[ids]) * self.scale


def top_logits(
    weight: Tensor, bias: Tensor | None, queries: Tensor, k: int, classes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of queries [n, D] among classes [C] or all, and their classes, [n, k] each; exact."""
    if len(queries) > QUERIES:
        parts = [top_logits(weight, bias, part, k, classes) for part in queries.split(QUERIES)]
        scores, ids = map(torch.cat, zip(*parts, strict=True))
        return scores, ids
    count = len(weight) if classes is None else len(classes)
    wide = torch.promote_types(weight.dtype, torch.float32)
    queries = queries.detach().to(weight.device, wide)
    best: tuple[Tensor, Tensor] | None = None
    step = max(k, BLOCK, SCORES // max(1, len(queries)))
    for start in range(0, count, step):
        block = slice(start, min(start + step, count))
        index = block if classes is None else classes[block]
        logits = queries @ weight.detach()[index].to(wide).T
        if bias is not None:
            logits += bias.detach()[index]
        scores, places = logits.topk(min(k, logits.shape[1]))
        ids = places + start if classes is None else classes[block][places]
        if best is not None:
            scores, places = torch.cat((best[0], scores), -1).topk(k)
            ids = torch.cat((best[1], ids), -1).gather(-1, places)
        best = scores, ids
    assert best is not None
    return best


def _extended(rows: Tensor, column: Tensor | float | None) -> Tensor:
    """Append a column, or none, to rows [n, D] and pad with zeros to an aligned width, in float32."""
    more = 0 if column is None else 1
    width = -(-(rows.shape[1] + more) // ALIGNED) * ALIGNED
    wide = torch.zeros(len(rows), width, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    if column is not None:
        wide[:, rows.shape[1]] = column
    return wide


def _longest(weight: Tensor, bias: Tensor | None) -> np.ndarray:
    """Return the indices of the longest rows [K]."""
    lengths = torch.cat([rows.detach().float().square().sum(-1) for rows in weight.split(BLOCK)])
    if bias is not None:
        lengths += bias.detach().float().square()
    longest = np.zeros(len(weight), dtype=bool)
    longest[lengths.topk(-(-len(weight) // LONG_SHARE)).indices.cpu().numpy()] = True
    return longest


def find_cells(
    take: Callable[[Tensor], Tensor], total: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return unit centres [n, d] of at most `count` cells, and the cells [total] of the rows returned by `take`.

    Spherical k-means on a sample of the rows, then every row is assigned to its nearest cell by direction, because a
    search looks for large inner products; by distance, centres near the origin would attract far more rows than others.
    Projections to fewer dimensions or nested cells would be cheaper, but split clusters, so that a search must visit
    many more cells for the same recall.
    """
    everything = torch.arange(total)
    centres = k_means(take(_some(everything, POINTS * count, generator)), count, generator)
    sums, cells = torch.zeros_like(centres), []
    for part in everything.split(BLOCK):
        rows = take(part)
        cell = nearest(rows, centres)
        sums.index_add_(0, cell, F.normalize(rows, dim=-1))
        cells.append(cell.cpu())
    # Centres of all rows of a cell, not only of the sample, since a search uses the centres. Empty cells do not change.
    means = F.normalize(sums, dim=-1)
    return torch.where(sums.any(-1, keepdim=True), means, centres), torch.cat(cells)


def k_means(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return at most `count` unit centres [n, d] of rows [m, d].

    Centres that start from random rows miss some clusters, whose rows are then scattered over other cells. Therefore a
    second set of centres starts from the rows that fit the first set worst.
    """
    rows = F.normalize(rows, dim=-1)
    if count >= len(rows):
        return rows
    late = int(LATE * count)
    centres = _lloyd(rows, _some(rows, count - late, generator), 2, generator)
    if late:
        fit = torch.cat([(part @ centres.T).amax(-1) for part in rows.split(BLOCK)])
        misfits = rows[fit.argsort()[: int(LATE * len(rows))]]
        second = _lloyd(misfits, _some(misfits, late, generator), 3, generator)
        centres = _lloyd(rows, torch.cat((centres, second)), 2, generator)
    return centres


def _lloyd(rows: Tensor, centres: Tensor, iterations: int, generator: torch.Generator) -> Tensor:
    """Move centres [n, d] to the mean of their nearest rows [m, d]; centres without rows restart from a row."""
    for _ in range(iterations):
        cell = torch.cat([nearest(part, centres) for part in rows.split(BLOCK)])
        sums = torch.zeros_like(centres).index_add_(0, cell, rows)
        centres = F.normalize(sums, dim=-1)
        empty = (torch.bincount(cell, minlength=len(centres)) == 0).nonzero().squeeze(-1)
        if len(empty):
            centres[empty] = _some(rows, len(empty), generator)
    return centres


def nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """Return the index [m] of the unit centre [n, d] that is nearest in direction to each row [m, d]."""
    return (rows @ centres.T).argmax(-1)


def _some(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` random values of [n, ...] without repetition, or all if there are fewer."""
    return values if count >= len(values) else values[torch.randperm(len(values), generator=generator)[:count]]
