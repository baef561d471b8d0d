"""Which characters `glyphs` has, and which split the pictures of a family and a character are in."""

import hashlib
from collections.abc import Sequence

import numpy as np

from hetxl.data.dataset import SPLITS

SETS = ("jis1", "jis", "common")

LEVEL_1, LEVEL_2 = range(16, 48), range(48, 85)
"""Rows of JIS X 0208 with the 2,965 characters in daily use, and with 3,390 rarer ones."""

IDEOGRAPHS = (range(0x4E00, 0xA000), range(0x3400, 0x4DC0))
"""CJK Unified Ideographs and their extension A. Compatibility ideographs are the same characters once more, and
the later extensions are in hardly any font."""

UNSEEN_HOME = len(SPLITS)
"""The number of a split for the families that are never trained on."""

TRAIN, VALIDATION = 0.8, 0.9
"""Bounds of the hash of a pair: below the first it is trained on, below the second it validates."""


def candidates(characters: str) -> list[str]:
    """The characters of a set in the order of their code points; of "common" all that fonts are asked for.

    Args:
        characters: "jis1", "jis" or "common".
    """
    if characters == "common":
        return sorted(chr(point) for block in IDEOGRAPHS for point in block)
    rows = (*LEVEL_1, *LEVEL_2) if characters == "jis" else LEVEL_1
    return sorted(filter(None, (_jis(row, cell) for row in rows for cell in range(1, 95))))


def homes(families: Sequence[str], characters: Sequence[str], drawn: np.ndarray, unseen: Sequence[str]) -> np.ndarray:
    """The split of every family and character, by a hash of the two: 80 % train, 10 % validation and 10 % test.

    All faces of a family go together, so that no picture is tested whose near-duplicate was trained on. A character
    that would be in no training picture keeps its pair with the lowest hash there.

    Args:
        families: F names.
        characters: K
        drawn: [F, K] bool, which families draw which characters.
        unseen: names of families that are in no split but their own.

    Returns:
        [F, K] uint8, a place in `SPLITS` or `UNSEEN_HOME`; of what is not drawn it says nothing.
    """
    shares = np.array([[_share(family, character) for character in characters] for family in families])
    shares = shares.reshape(len(families), len(characters))
    found = np.where(shares < TRAIN, 0, np.where(shares < VALIDATION, 1, 2)).astype(np.uint8)
    seen = np.array([family not in unseen for family in families], dtype=bool)[:, None] & drawn
    lost = np.flatnonzero(seen.any(0) & ~(seen & (found == 0)).any(0))
    lowest = np.where(seen, shares, 2.0)[:, lost].argmin(0) if len(lost) else lost
    found[lowest, lost] = 0
    found[[family in unseen for family in families]] = UNSEEN_HOME
    return found


def _share(family: str, character: str) -> float:
    """A number in [0, 1) that depends on nothing but the two."""
    digest = hashlib.blake2b(f"{family}\0{character}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _jis(row: int, cell: int) -> str | None:
    """A character of JIS X 0208; None for a cell that is empty."""
    try:
        return bytes((0xA0 + row, 0xA0 + cell)).decode("euc_jp")
    except UnicodeDecodeError:
        return None
