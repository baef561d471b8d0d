"""In which order examples are seen: a permutation that is computed where it is asked for.

Nothing is stored, so an epoch over 100 million rows costs no memory and a run resumes in the middle of it at once.
"""

import numpy as np

from hetxl.functional._checks import integer_at_least

ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray) -> np.ndarray:
    """A fixed 64-bit hash of each value (splitmix64's finaliser), [...] uint64."""
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64) + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def derive(*parts: int) -> int:
    """A 63-bit seed from several numbers: different parts give unrelated seeds."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = mix(state ^ np.array([part % 2**64], dtype=np.uint64))
    return int(state[0] >> np.uint64(1))


class Order:
    """A random order of n rows for every epoch: a Feistel network over the numbers below the next power of four, walked
    until it lands below n.

        naive: np.random.default_rng((seed, epoch)).permutation(n)[start:stop]

    Args:
        rows: n
        seed: of the run.
    """

    def __init__(self, rows: int, seed: int):
        self.rows, self.seed = integer_at_least("rows", rows, 1), seed
        bits = max(2, int(rows - 1).bit_length())
        self.half = np.uint64((bits + 1) // 2)
        self.mask = np.uint64((1 << int(self.half)) - 1)

    def of(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows at places start..stop of the endless sequence of epochs, and a seed for each.

        Returns:
            rows: [stop − start] int64
            seeds: [stop − start] int64, for augmentation: another one for the same row in every epoch.
        """
        places = np.arange(start, stop, dtype=np.int64)
        epochs = places // self.rows
        rows = np.empty(len(places), dtype=np.int64)
        seeds = np.empty(len(places), dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            rows[inside] = self._permuted(places[inside] % self.rows, int(epoch))
            key = np.uint64(derive(self.seed, int(epoch), 1))
            seeds[inside] = (mix(rows[inside].astype(np.uint64) ^ key) >> np.uint64(1)).astype(np.int64)
        return rows, seeds

    def _permuted(self, places: np.ndarray, epoch: int) -> np.ndarray:
        if self.rows == 1:
            return np.zeros_like(places)
        keys = [np.uint64(derive(self.seed, epoch, 2, number)) for number in range(ROUNDS)]
        found = self._network(places.astype(np.uint64), keys)
        outside = found >= np.uint64(self.rows)
        while outside.any():  # at most four times as many numbers as rows: a few walks
            found[outside] = self._network(found[outside], keys)
            outside = found >= np.uint64(self.rows)
        return found.astype(np.int64)

    def _network(self, values: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        left, right = values >> self.half, values & self.mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & self.mask)
        return (left << self.half) | right
