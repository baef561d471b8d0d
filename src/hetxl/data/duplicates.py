"""Inputs that occur more than once, in a split and between splits."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations

import numpy as np

from hetxl.data.dataset import Split
from hetxl.data.progress import progress_bar

ROWS, FILES = 200_000, 2_000
"""How many rows of numbers, or files of pictures, are looked at."""

BLOCK = 4096


@dataclass(frozen=True)
class Duplicates:
    """Equal inputs among the rows that were looked at; where these are not all, there may be more.

    Attributes:
        looked_at: rows by split.
        within: by split, rows equal to an earlier row of that split.
        across: under "test in train", rows of test that are also in train, and so on.
    """

    looked_at: dict[str, int]
    within: dict[str, int]
    across: dict[str, int]


def find_duplicates(splits: Mapping[str, Split], *, images: bool, limit: int | None = None) -> Duplicates:
    """Compare inputs byte by byte, through a hash.

    Args:
        splits: by name.
        images: whether inputs are pictures: their files, where they have some, are compared, not what is decoded.
        limit: rows to look at in all splits together; by default `ROWS`, or `FILES` for pictures.
    """
    # Pictures without files are compared as they are read.
    images = images and all(split.show(0).image is not None for split in splits.values() if len(split))
    samples = _sample(splits, (FILES if images else ROWS) if limit is None else limit)
    with progress_bar("Looking for duplicates", sum(map(len, samples.values()))) as advance:
        if images:
            keys = _file_keys({name: [splits[name].show(row).image for row in rows] for name, rows in samples.items()})
        else:
            keys = {}
            for name, rows in samples.items():
                keys[name] = _input_keys(splits[name], rows, advance)
    across = {
        f"{later} in {earlier}": int(np.isin(keys[later], keys[earlier]).sum())
        for earlier, later in combinations(keys, 2)
    }
    within = {name: len(found) - len(np.unique(found)) for name, found in keys.items()}
    return Duplicates({name: len(rows) for name, rows in samples.items()}, within, across)


def _sample(splits: Mapping[str, Split], limit: int) -> dict[str, np.ndarray]:
    """Rows to look at: all, or if they are too many, all of the small splits and some of the others."""
    chosen, left = {}, limit
    for place, (name, split) in enumerate(sorted(splits.items(), key=lambda item: len(item[1]))):
        size = min(len(split), left // (len(splits) - place))
        left -= size
        if size == len(split):
            chosen[name] = np.arange(size)
        else:
            chosen[name] = np.sort(np.random.default_rng(0).choice(len(split), size, replace=False))
    return {name: chosen[name] for name in splits}


def _input_keys(split: Split, rows: np.ndarray, advance) -> np.ndarray:
    """[b] uint64, equal where inputs are."""
    digests = []
    for start in range(0, len(rows), BLOCK):
        inputs = np.ascontiguousarray(split.fetch(rows[start : start + BLOCK]).inputs.numpy())
        digests.extend(blake2b(row, digest_size=8).digest() for row in inputs)
        advance(len(inputs))
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _file_keys(paths: Mapping[str, Sequence[str | None]]) -> dict[str, np.ndarray]:
    """[b] uint64 by split. Only files that share their size with another are read."""
    sizes = {path: _size(path) for found in paths.values() for path in found if path is not None}
    common = Counter(sizes.values())

    def key(path: str | None) -> bytes:
        if path is None or sizes[path] is None:
            text = os.fsencode(f"unreadable {path}")
        elif common[sizes[path]] == 1:
            text = f"size {sizes[path]}".encode()
        else:
            return _file_digest(path)
        return blake2b(text, digest_size=8, person=b"name").digest()

    return {name: np.frombuffer(b"".join(map(key, found)), dtype=np.uint64) for name, found in paths.items()}


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _file_digest(path: str) -> bytes:
    digest = blake2b(digest_size=8)
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError:
        return blake2b(os.fsencode(path), digest_size=8, person=b"name").digest()
    return digest.digest()
