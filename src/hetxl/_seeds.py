"""Integer hashing by splitmix64, which gives the same values on every platform and version of numpy and torch, and
random subsets of rows."""

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio: the increment of splitmix64's state."""


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each value, [...] → [...] uint64: the output of splitmix64 from that state."""
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64) + np.uint64(GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed from several integers; different integers give unrelated seeds."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = splitmix64(state ^ np.array([part % 2**64], dtype=np.uint64))
    return int(state[0] >> np.uint64(1))


def some_rows(rows: np.ndarray, limit: int, seed: int = 0) -> np.ndarray:
    """Return at most `limit` of the rows [n], drawn at random from a seed, in their original order."""
    return rows if len(rows) <= limit else np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))
