"""Texts as bags of hashed character n-grams: nothing to learn beforehand, and no word is unknown."""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

SIZES = (2, 3, 4)
"""Lengths of the n-grams; a whole word counts too."""

LONGEST = 2048
"""Characters of a text that are looked at."""


class Bags(NamedTuple):
    """Bags of hashed n-grams as nn.EmbeddingBag takes them.

    Attributes:
        ids: [m] int64, the n-grams of all texts in turn.
        offsets: [B] int64, where each text's begin.
    """

    ids: Tensor
    offsets: Tensor

    def to(self, device: torch.device) -> "Bags":
        """The same on a device."""
        return Bags(self.ids.to(device), self.offsets.to(device))


def ngrams(text: str, buckets: int, sizes: Sequence[int] = SIZES) -> list[int]:
    """The buckets of a text's n-grams, taken within words whose ends are marked, and of its words.

        "ab c" with sizes (2,): <a ab b> <ab> <c c> <c>, and their hashes

    Args:
        text: any; case and extra spaces do not matter.
        buckets: how many there are.
        sizes: of the n-grams.

    Returns:
        Ids from 0 to buckets − 1, at least one: an empty text has the bucket of the empty word.
    """
    found = []
    for word in text[:LONGEST].lower().split() or [""]:
        marked = f"<{word}>"
        found.append(marked)
        # A piece as long as the word is the word.
        found += [marked[at : at + n] for n in sizes if n < len(marked) for at in range(len(marked) - n + 1)]
    return [crc32(piece.encode("utf-8", "surrogatepass")) % buckets for piece in found]


class NgramTable:
    """The n-grams of many texts, counted once.

    Args:
        texts: m
        buckets: as in `ngrams`.
    """

    def __init__(self, texts: Sequence[str], buckets: int):
        found = [np.array(ngrams(text, buckets), dtype=np.int32) for text in texts]
        self.starts = np.concatenate(([0], np.cumsum([len(part) for part in found]))).astype(np.int64)
        self.ids = np.concatenate(found) if found else np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def take(self, places: np.ndarray) -> Bags:
        """The bags of some texts.

        Args:
            places: [b]
        """
        places = np.asarray(places, dtype=np.int64)
        counts = self.starts[places + 1] - self.starts[places]
        offsets = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(offsets, counts)
        ids = self.ids[np.repeat(self.starts[places], counts) + within].astype(np.int64)
        return Bags(torch.from_numpy(ids), torch.from_numpy(offsets))
