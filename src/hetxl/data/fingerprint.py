"""Whether data is still what it was."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hetxl.data.dataset import Dataset
from hetxl.data.labels import Labels

LOOKED_AT = 4096
"""Rows of a split whose labels are looked at, evenly spread."""


def fingerprint(dataset: Dataset) -> dict[str, dict[str, int]]:
    """Rows and a checksum of labels of every split: rows that were added, taken away or drawn anew change it."""
    return {
        name: {"rows": len(split), "labels": _checksum(split.labels)} for name, split in sorted(dataset.splits.items())
    }


def changes(
    then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], splits: Sequence[str]
) -> str | None:
    """What is different in some splits of two fingerprints, in words; None if nothing is.

    Args:
        then: as it was kept.
        now: as it is.
        splits: which; those that either does not have are left out.
    """
    found = []
    for name in splits:
        one, other = then.get(name), now.get(name)
        if one is None or other is None or one == other:
            continue
        if one["rows"] != other["rows"]:
            found.append(f"{name} had {one['rows']:,} rows and has {other['rows']:,}")
        else:
            found.append(f"{name} has other labels than it had")
    return ", ".join(found) or None


def _checksum(labels: Labels) -> int:
    rows = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), LOOKED_AT)).astype(np.int64))
    targets = labels.take(rows)
    parts = (targets,) if isinstance(targets, Tensor) else (targets.examples, targets.classes)
    found = 0
    for part in parts:
        found = zlib.crc32(np.ascontiguousarray(part.numpy()).tobytes(), found)
    return found
