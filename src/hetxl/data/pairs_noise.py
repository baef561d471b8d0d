"""Pair noise on demand: some pictures get the text of another, and a list of which, so that audits can be scored."""

import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hetxl.data.build.files import write_arrays
from hetxl.data.pairs import PairSplit
from hetxl.functional._checks import integer_at_least


@dataclass(frozen=True)
class Swaps:
    """Which pictures have the text of another.

    Attributes:
        rows: [m] int64, ascending.
        sources: [m] int64, the row whose text each has now.
        rate: that was asked for.
        within: whether texts were swapped within a category.
        seed: of the draws.
    """

    rows: np.ndarray
    sources: np.ndarray
    rate: float
    within: bool
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def mask(self, count: int) -> np.ndarray:
        """[n] bool, which of n pairs were swapped.

        Args:
            count: n
        """
        found = np.zeros(count, dtype=bool)
        found[self.rows] = True
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .npz file, whole or not at all.

        Args:
            path: of the file.
        """
        write_arrays(Path(path), {name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Swaps":
        """Read what `save` wrote.

        Args:
            path: of the file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                rows, sources, rate, within, seed = (file[name] for name in _FIELDS)
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{os.fspath(path)} holds no swaps ({error}); write it with Swaps.save") from None
        return cls(rows, sources, float(rate), bool(within), int(seed))


_FIELDS = ("rows", "sources", "rate", "within", "seed")


def swapped(pairs: PairSplit, rate: float, within: bool = False, seed: int = 0) -> PairSplit:
    """Give a share of the pictures the texts of others among them; every text is still there as often as before.

    The pictures are drawn at random and their texts moved on by one in a random order, so that none keeps its own. One
    whose new text reads the same as its own, as two families may call an icon alike, does not count as swapped.

    Args:
        pairs: that have no swaps yet.
        rate: share of the pairs, from 0 to 1; 0 changes nothing.
        within: whether only pairs of the same category change texts.
        seed: the same seed gives the same swaps.

    Returns:
        The pairs with `swaps`.
    """
    integer_at_least("seed", seed, 0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"rate must be from 0 to 1, the share of pairs to swap, found {rate!r}")
    if pairs.swaps is not None:
        raise ValueError("pairs have swaps already; start from the clean ones")
    if within and pairs.categories is None:
        raise ValueError("within=True needs categories of the pairs, and these have none; use within=False")
    rng = np.random.default_rng([seed, int(within)])
    categories = pairs.categories if within and pairs.categories is not None else np.zeros(len(pairs), dtype=np.int64)
    sources = np.arange(len(pairs))
    for members in _chosen(categories, round(rate * len(pairs)), rng):
        sources[members] = np.roll(members, 1)
    groups = pairs.groups
    rows = np.flatnonzero(groups[sources] != groups)
    swaps = Swaps(rows, sources[rows], float(rate), bool(within), seed)
    return replace(pairs, sources=pairs.sources[sources], swaps=swaps)


def _chosen(categories: np.ndarray, wanted: int, rng: np.random.Generator) -> list[np.ndarray]:
    """So many rows, drawn at random, by category and in a random order; none is alone in its category."""
    sizes = np.bincount(categories, minlength=1)
    order = rng.permutation(len(categories))
    order = order[sizes[categories[order]] > 1]
    wanted = min(wanted, len(order))
    taken, rest = order[:wanted], order[wanted:]
    counts = np.bincount(categories[taken], minlength=len(sizes))
    alone = counts[categories[taken]] == 1
    if alone.any():
        # Each gives its place to the next row of a category that has company.
        company = rest[counts[categories[rest]] > 1][: int(alone.sum())]
        taken = np.concatenate((taken[~alone], company))
    by_category = taken[np.argsort(categories[taken], kind="stable")]
    bounds = np.flatnonzero(np.diff(categories[by_category])) + 1
    return [members for members in np.split(by_category, bounds) if len(members) > 1]
