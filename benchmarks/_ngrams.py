"""Millions of classes out of real text: the distinct runs of words in Python's own sources, and what precedes them."""

import re
import sysconfig
from array import array
from pathlib import Path

import numpy as np

CONTEXT = 4
BUCKETS = 2**16
"""Words of the context are told apart by this many hashes."""

WORD = re.compile(r"\w+|[^\w\s]")


def words(places: tuple[str, ...], most: int) -> np.ndarray:
    """Ids of the words of Python sources, [n] int32, in the order of their files; a new file begins with −1.

    Args:
        places: of sysconfig: "stdlib", "purelib".
        most: words, about.
    """
    known: dict[str, int] = {}
    found = array("i")
    for place in places:
        root = Path(sysconfig.get_paths()[place])
        for file in sorted(root.rglob("*.py")):
            if place == "stdlib" and "site-packages" in file.parts:
                continue
            found.append(-1)
            found.extend(
                known.setdefault(word, len(known)) for word in WORD.findall(file.read_text("utf-8", "replace"))
            )
            if len(found) >= most:
                return np.array(found, dtype=np.int32)
    return np.array(found, dtype=np.int32)


def ngrams(ids: np.ndarray, length: int, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts and classes: what precedes a run of words, and which of the most frequent runs it is.

    Args:
        ids: [n] of words.
        length: of a run.
        num_classes: K; the most frequent runs, most frequent first.

    Returns:
        contexts: [m, CONTEXT] int64, hashed to `BUCKETS`
        classes: [m] int64
    """
    count = len(ids) - length - CONTEXT + 1
    keys = np.zeros(count, dtype=np.uint64)
    for place in range(length):  # a run is known by a hash of its words: two of ten million hardly ever share one
        part = ids[CONTEXT + place : CONTEXT + place + count].astype(np.uint64)
        keys = (keys ^ part) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    _, classes, times = np.unique(keys, return_inverse=True, return_counts=True)
    if len(times) < num_classes:
        raise SystemExit(f"The sources hold {len(times):,} distinct runs of {length} words, fewer than {num_classes:,}")
    order = np.argsort(-times, kind="stable")
    rank = np.empty(len(times), dtype=np.int64)
    rank[order] = np.arange(len(times))
    classes = rank[classes.reshape(-1)]
    rows = np.flatnonzero(classes < num_classes)
    contexts = np.stack([ids[rows + place] for place in range(CONTEXT)], axis=1).astype(np.int64)
    return (contexts * 2654435761 + np.arange(CONTEXT)) % BUCKETS, classes[rows]
