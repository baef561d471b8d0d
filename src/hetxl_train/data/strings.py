"""A sequence of texts in one block of memory."""

import os
from collections.abc import Iterable, Sequence

import numpy as np


class Strings(Sequence[str]):
    """Texts in one block of bytes, which worker processes share, without an object per text."""

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [os.fsencode(text) for text in texts]
        lengths = np.fromiter((len(text) for text in encoded), dtype=np.int64, count=len(encoded))
        self.block = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self.ends = np.cumsum(lengths)

    @classmethod
    def of(cls, block: np.ndarray, ends: np.ndarray) -> "Strings":
        """Return the texts of a block of bytes [m] uint8, the i-th of which ends before `ends[i]`."""
        strings = cls(())
        strings.block, strings.ends = block, ends
        return strings

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.block[start : int(self.ends[index])].tobytes())

    def take(self, indices: Sequence[int]) -> list[str]:
        """Return some of the texts."""
        return [self[index] for index in indices]
