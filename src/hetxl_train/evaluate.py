"""Evaluate a model on a split in one pass, with a record of every example.

Several processes divide the rows. Their records are sorted by row before anything is computed from them, so results
equal those of one process exactly."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl._checks import integer_at_least, one_of
from hetxl._seeds import derive_seed, some_rows
from hetxl.functional.engine.predict import METHODS
from hetxl.metrics.confusions import ConfusionCounter, Confusions
from hetxl.metrics.records import MAX_BYTES, Records, RecordsBuilder, evaluating
from hetxl.nn import Head
from hetxl_train.console import progress_bar
from hetxl_train.data.dataset import Split, Unreadable
from hetxl_train.distributed import World
from hetxl_train.estimate import now
from hetxl_train.loaders import Reader, blocks, reader
from hetxl_train.model import Model
from hetxl_train.parallel import autocast


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    records: Records  # of every readable example with a label
    pairs: list[dict[str, Any]]  # the top 20 pairs of classes of `ConfusionCounter.pairs`
    unreadable: list[Unreadable]
    seconds: float  # time of predictions, without reading and counting
    confusions: ConfusionCounter | None = None  # all pairs; None if they were not counted


@dataclass(frozen=True)
class Share:
    """The consecutive rows of the split that one process has evaluated."""

    records: Records
    confusions: list[Confusions]  # one per batch; empty for a single process, which counts them at once
    unreadable: list[Unreadable]
    seconds: float


@torch.no_grad()
def evaluate(
    features_of: Callable[[Tensor], Tensor], head: Head, split: Split, *, batch_size: int = 256, method: str = "mc",
    num_samples: int | None = None, seed: int = 0, limit: int | None = None, device: torch.device | str = "cpu",
    confusions: bool = True, class_names: Sequence[str] | None = None, quiet: bool = False,
    fetch: Reader | None = None, target: str = "observed", precision: str = "float32", world: World | None = None,
) -> Evaluation:  # fmt: skip
    """Predict and record every example of a split.

    Modules are in evaluation mode meanwhile, and restored afterwards. The noise depends on `seed` and the number of the
    batch, so the same call gives bit-identical results for any number of processes. torch's random state does not
    change.

    Args:
        features_of: backbone, a module or function on `device`: inputs [b, ...] → features [b, D].
        split: labelled split; rows with the label −100 are ignored.
        batch_size: batch size of the backbone; the head uses smaller batches if [b, K] probabilities would need more
            than 64 MiB.
        method: method of `head.predict`.
        target: target of `head.predict`.
        num_samples: S [default: the head's `eval_samples`].
        limit: maximum number of rows, a random sample that does not depend on the model or the seed.
        device: device of the head.
        confusions: count pairs of classes.
        class_names: K names for `Evaluation.pairs` [default: ids].
        quiet: hide the progress bar.
        fetch: function from an iterable of rows [b] to a `Fetched` for each, for instance in worker processes; None for
            `map(split.fetch, …)`.
        precision: precision of the backbone's matrix products under torch.autocast; the head uses that of its weights.
        world: processes that divide the rows and all call this; only the main process gets the result, the others an
            empty one. None for one process.
    """
    integer_at_least("batch_size", batch_size, 1)
    integer_at_least("seed", seed, 0)
    one_of("method", method, METHODS)
    if class_names is not None and len(class_names) != head.num_classes:
        raise ValueError(f"class_names must be {head.num_classes} names, one for each class, found {len(class_names)}")
    if split.labels.multi and head.link != "sigmoid":
        raise ValueError('split has several labels per row, but head has link="softmax"; use link="sigmoid"')
    rows = _rows_of(split, limit)
    device, processes = torch.device(device), world or World(torch.device(device))
    batches = processes.replicas.share(list(enumerate(blocks(rows, batch_size))))
    counter = ConfusionCounter() if confusions else None
    generator = torch.Generator(device)

    def work() -> Share:
        builder, measured, unreadable = RecordsBuilder(head.link), [], []
        seconds, size = 0.0, None
        with ExitStack() as stack:
            stack.enter_context(evaluating(features_of, head))
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            total = sum(len(batch) for _, batch in batches)
            advance = None if quiet or not processes.is_main else stack.enter_context(progress_bar("evaluating", total))
            read = (fetch or partial(map, split.fetch))([batch for _, batch in batches])
            for (number, _), fetched in zip(batches, read, strict=True):
                unreadable.extend(fetched.unreadable)
                # Random numbers of the backbone are the same each time and do not change torch's random state.
                torch.manual_seed(derive_seed(seed, number))
                generator.manual_seed(derive_seed(seed, number, 1))
                if len(fetched.rows):
                    inputs = fetched.inputs.to(device, non_blocking=True)
                    start = now(device)
                    with autocast(device, precision):
                        features = features_of(inputs)
                    features = features if precision == "float32" else features.float()
                    seconds += now(device) - start
                    size = size or _block_size(head, features, num_samples)
                    for part, some in zip(features.split(size), blocks(fetched.rows, size), strict=True):
                        start = now(device)
                        prediction = head.predict(
                            part, method=method, num_samples=num_samples, generator=generator, target=target
                        )
                        seconds += now(device) - start
                        targets = split.labels.take(some)
                        builder.add(prediction, targets, some)
                        if counter is not None:
                            entries = counter.measure(prediction, targets)
                            counter.put(entries) if processes.processes == 1 else measured.append(entries)
                if advance is not None:
                    advance(len(fetched.rows) + len(fetched.unreadable))
        records = builder.build() if len(builder) else Records.empty(head.num_classes)
        return Share(records, measured, unreadable, seconds)

    shares = processes.gather(work)[:: processes.class_shards]  # processes that share the classes have equal results
    processes.on_main(lambda: _check_read(shares, len(rows)))
    for entries in (entries for share in shares for entries in share.confusions):
        assert counter is not None
        counter.put(entries)
    return Evaluation(
        Records.concatenate([Records.empty(head.num_classes), *(share.records for share in shares)]),
        [] if counter is None else counter.pairs(names=class_names),
        [example for share in shares for example in share.unreadable],
        sum(share.seconds for share in shares),
        counter,
    )


def _check_read(shares: list[Share], rows: int) -> None:
    """Raise if no row could be read."""
    if not any(len(share.records) for share in shares):
        unreadable = [example for share in shares for example in share.unreadable]
        reason = f": {unreadable[0].path}: {unreadable[0].reason}" if unreadable else ""
        raise ValueError(f"none of the {rows} rows of the split could be read{reason}")


def evaluate_split(
    model: Model, split: Split, *, limit: int = 0, workers: int = 0, confusions: bool = False, **options: Any,
) -> Evaluation:  # fmt: skip
    """Evaluate a model on its device, reading images in worker processes; other options are those of `evaluate`.

    A limit of 0 means all rows.
    """
    return evaluate(
        model.backbone,
        model.head,
        split,
        limit=limit or None,
        device=model.device,
        confusions=confusions,
        fetch=reader(split, workers),
        **options,
    )


def _rows_of(split: Split, limit: int | None) -> np.ndarray:
    """Return the rows to evaluate, ascending; raise if there are none."""
    if not len(rows := split.labels.labelled()):
        raise ValueError(
            f"none of the {len(split)} rows of the split has a label; to predict without labels, use head.predict"
        )
    # A fixed seed, so that all models and seeds are compared on the same rows.
    return rows if limit is None else some_rows(rows, integer_at_least("limit", limit, 1))


def _block_size(head: Head, features: Tensor, num_samples: int | None) -> int:
    """Return the batch size of the head's predictions."""
    each = 4 * head.num_classes
    distribution = head.logit_distribution(features[:1])
    if distribution.opaque:
        # Every sample and every factor goes through an opaque classifier.
        each *= max(num_samples or head.eval_samples, distribution.size)
    return max(1, MAX_BYTES // each)
