"""A fingerprint of data, stored with a run to detect later changes of its data."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hetxl_train.data.dataset import Dataset, Split
from hetxl_train.data.labels import Labels
from hetxl_train.data.pairs import Pairs, PairSplit

SPREAD = 4096  # rows whose labels enter `labels`, evenly spread
BLOCK = 2**20  # labels that are read at a time
SAMPLED, GROUP = 64, 16
"""Numbers that stand for the inputs of rows drawn by the number of rows: sums over as many rows where these are read
quickly, and over one row where each is decoded."""
TOLERANCE = 1e-3
"""Difference of inputs, relative to their spread, that another version of a reader may make."""


def fingerprint(dataset: Dataset | Pairs) -> dict[str, dict[str, Any]]:
    """Return the rows, checksums of the labels and a sketch of the inputs of every split.

    Rows added, removed, redrawn or relabelled change it, and so do other inputs.
    """
    return {name: split_fingerprint(split) for name, split in sorted(dataset.splits.items())}


def changes(
    then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], splits: Sequence[str]
) -> str | None:
    """Describe how two fingerprints differ in some splits, if both have them; None if they are equal."""
    differences = []
    for name in splits:
        before, after = then.get(name), now.get(name)
        if before is None or after is None:
            continue
        if before["rows"] != after["rows"]:
            differences.append(f"{name} had {before['rows']:,} rows and has {after['rows']:,}")
        elif any(before[key] != after[key] for key in ("labels", "all_labels") if key in before and key in after):
            differences.append(f"the labels of {name} have changed")
        elif "input_sums" in before and not _close(before["input_sums"], after["input_sums"]):
            differences.append(f"the inputs of {name} have changed")
    return ", ".join(differences) or None


def split_fingerprint(split: Split | PairSplit) -> dict[str, Any]:
    """Return the fingerprint of one split."""
    if isinstance(split, PairSplit):
        return {"rows": len(split), "all_labels": _texts(split), "input_sums": sketch(split.images)}
    spread = np.unique(np.linspace(0, len(split) - 1, min(len(split), SPREAD)).astype(np.int64))
    blocks = (np.arange(start, min(start + BLOCK, len(split))) for start in range(0, len(split), BLOCK))
    return {
        "rows": len(split),
        "labels": _checksum(split.labels, [spread]),
        "all_labels": _checksum(split.labels, blocks),
        "input_sums": sketch(split),
    }


def sketch(split: Any) -> list[float | None]:
    """Return numbers of some rows of a split, sums of inputs times a fixed vector; None where one is unreadable."""
    count = min(SAMPLED * (1 if split.workers else GROUP), len(split))
    rows = np.sort(np.random.default_rng(len(split)).choice(len(split), count, replace=False))
    fetched, sums = split.fetch(rows), np.full(count, np.nan)
    if len(fetched.rows):
        inputs = fetched.inputs.reshape(len(fetched.rows), -1).double().numpy()
        vector = np.random.default_rng(0).standard_normal(inputs.shape[1])
        with np.errstate(all="ignore"):
            values = np.where(np.isfinite(inputs), inputs, 0) @ vector / len(vector) ** 0.5
        sums[np.searchsorted(rows, fetched.rows)] = values
    parts = np.array_split(sums, min(SAMPLED, count)) if count else ()
    return [float(f"{part.sum():.6g}") if np.isfinite(part.sum()) else None for part in parts]


def _close(before: Sequence[float | None], after: Sequence[float | None]) -> bool:
    """Whether two sketches are of the same inputs, up to rounding; rows that could not be read match anything."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if not pairs:
        return True
    then, now = np.array(pairs, dtype=np.float64).T
    return bool(np.all(np.abs(then - now) <= TOLERANCE * max(float(np.abs(then).mean()), 1e-30)))


def _checksum(labels: Labels, parts: Any) -> int:
    checksum = 0
    for rows in parts:
        targets = labels.take(rows)
        for part in (targets,) if isinstance(targets, Tensor) else (targets.examples, targets.classes):
            checksum = zlib.crc32(np.ascontiguousarray(part.numpy()).tobytes(), checksum)
    return checksum


def _texts(pairs: PairSplit) -> int:
    """Return a checksum of which pairs have equal texts, and of the texts if they are known."""
    checksum = zlib.crc32(np.ascontiguousarray(pairs.groups).tobytes())
    for caption in pairs.texts.captions or ():
        checksum = zlib.crc32(caption.encode("utf-8", "surrogatepass"), checksum)
    return checksum
