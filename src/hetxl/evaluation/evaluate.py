"""Evaluation of a model on a split, in one pass: a backbone, a head, and what they say of every example."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetxl.data.dataset import Broken, Fetched, Split
from hetxl.data.progress import progress_bar
from hetxl.evaluation.builder import RecordsBuilder
from hetxl.evaluation.confusions import ConfusionCounter
from hetxl.evaluation.records import Records
from hetxl.functional import IGNORE_INDEX
from hetxl.functional._checks import integer_at_least, one_of
from hetxl.functional.engine.predict import METHODS
from hetxl.nn import Head

MAX_BYTES = 64 * 2**20
"""Memory of the probabilities that exist at a time, [b, K] in float32."""

Fetch = Callable[[Iterable[np.ndarray]], Iterable[Fetched]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        records: of every example that could be read and has a label.
        pairs: the 20 pairs of classes that matter most, as `ConfusionCounter.pairs` gives them.
        broken: examples that could not be read.
        seconds: time of prediction alone: backbone and head, without reading and counting.
        confusions: all pairs; None when they were not asked for.
    """

    records: Records
    pairs: list[dict[str, Any]]
    broken: list[Broken]
    seconds: float
    confusions: ConfusionCounter | None = None


@torch.no_grad()
def evaluate(
    features_of: Callable[[Tensor], Tensor],
    head: Head,
    split: Split,
    *,
    batch_size: int = 256,
    method: str = "mc",
    num_samples: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    device: torch.device | str = "cpu",
    confusions: bool = True,
    class_names: Sequence[str] | None = None,
    progress: Progress | None = None,
    fetch: Fetch | None = None,
) -> Evaluation:
    """Predict every example of a split and keep a record of each.

    Modules are in evaluation mode meanwhile, and as they were afterwards. All draws come from `seed`: the same call
    gives the same numbers to the bit, and torch's own generators are left as they were.

    Args:
        features_of: the backbone, inputs [b, ...] → features [b, D]; a module or a function, on `device`.
        head: on `device`.
        split: with labels; rows with the label −100 are left out.
        batch_size: examples that go through the backbone at a time; the head takes fewer at a time when [b, K]
            probabilities would need more than 64 MiB.
        method: of `head.predict`.
        num_samples: S, the head's `eval_samples` without.
        seed: of the draws.
        limit: at most this many rows, the same random ones whatever the model and the seed.
        device: where inputs are moved to.
        confusions: whether to count pairs of classes.
        class_names: K names for `Evaluation.pairs`; ids without.
        progress: called after each batch with the number of examples done and of all; None for a bar on the terminal.
        fetch: reads batches of rows in their order, such as in worker processes: takes an iterable of rows [b] and
            gives a `Fetched` for each; None for `map(split.fetch, …)`.
    """
    integer_at_least("batch_size", batch_size, 1)
    integer_at_least("seed", seed, 0)
    one_of("method", method, METHODS)
    if class_names is not None and len(class_names) != head.num_classes:
        raise ValueError(f"class_names must be {head.num_classes} names, one for each class, found {len(class_names)}")
    if split.labels.multi and head.link != "sigmoid":
        raise ValueError('split has any number of labels for each row, and head link="softmax"; use link="sigmoid"')
    rows = _rows_of(split, limit)
    device = torch.device(device)
    batches = (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
    builder = RecordsBuilder(head.link)
    counter = ConfusionCounter() if confusions else None
    broken: list[Broken] = []
    generator = torch.Generator(device).manual_seed(seed)
    seconds, done, size = 0.0, 0, None
    with ExitStack() as stack:
        stack.enter_context(evaluating(features_of, head))
        stack.enter_context(_seeded(seed, device))
        advance = stack.enter_context(progress_bar("evaluating", len(rows))) if progress is None else None
        for fetched in map(split.fetch, batches) if fetch is None else fetch(batches):
            broken.extend(fetched.broken)
            count = len(fetched.rows) + len(fetched.broken)
            done += count
            if len(fetched.rows):
                inputs = fetched.inputs.to(device, non_blocking=True)
                start = _now(device)
                features = features_of(inputs)
                seconds += _now(device) - start
                size = size or _block_size(head, features, num_samples)
                for part, some in zip(features.split(size), _cut(fetched.rows, size), strict=True):
                    start = _now(device)
                    prediction = head.predict(part, method=method, num_samples=num_samples, generator=generator)
                    seconds += _now(device) - start
                    targets = split.labels.take(some)
                    builder.add(prediction, targets, some)
                    if counter is not None:
                        counter.add(prediction, targets)
            if advance is not None:
                advance(count)
            elif progress is not None:
                progress(done, len(rows))
    if not len(builder):
        reason = f": {broken[0].path}: {broken[0].reason}" if broken else ""
        raise ValueError(f"split: none of its {len(rows)} rows could be read{reason}")
    pairs = [] if counter is None else counter.pairs(names=class_names)
    return Evaluation(builder.build(), pairs, broken, seconds, counter)


def _rows_of(split: Split, limit: int | None) -> np.ndarray:
    """The rows to evaluate, in rising order; raises when there are none."""
    rows = np.arange(len(split))
    if not split.labels.multi:
        rows = np.flatnonzero(np.asarray(split.labels.ids) != IGNORE_INDEX)
    if not len(rows):
        raise ValueError(f"split has no row with a label among its {len(split)}; to predict, use head.predict")
    if limit is not None and integer_at_least("limit", limit, 1) < len(rows):
        # Its own fixed seed: models and seeds are compared on the same rows.
        rows = np.sort(np.random.default_rng(0).choice(rows, limit, replace=False))
    return rows


def _block_size(head: Head, features: Tensor, num_samples: int | None) -> int:
    """How many examples the head may predict at a time."""
    each = 4 * head.num_classes
    distribution = head.logit_distribution(features[:1])
    if distribution.opaque:
        # Every sample goes through such a classifier by itself, and so does every factor.
        each *= max(num_samples or head.eval_samples, distribution.size)
    return max(1, MAX_BYTES // each)


def _cut(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def evaluating(*parts: object) -> Iterator[None]:
    """Modules in evaluation mode, and each of their modules as it was afterwards."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    before = [(module, module.training) for module in itertools.chain(*(part.modules() for part in modules))]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A backbone that draws from torch's own generators gets the same draws each time, and leaves no trace."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
