"""Next-token prediction out of a corpus: which tokens are classes, and windows of the tokens before them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hetxl.data.corpus import Corpus
from hetxl.data.dataset import SPLITS, Fetched, InputSpec, Shown, Split
from hetxl.data.labels import Labels

OTHER = "<other>"
SPECIALS = (OTHER, "<padding>", "<start>")
"""Ids after the K classes, as inputs only: a token that is no class, what fills a window before a file's start, and the
start itself."""


class TokenSplit(Split):
    """Windows into one array of tokens; only the windows that are asked for are made.

    Args:
        tokens: [n] int32, every file preceded by C ids of padding and start.
        positions: [rows] int64, where the token to predict is.
        context: C
        names: of all ids, those of `SPECIALS` last.
        text: makes tokens readable.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        context: int,
        names: Sequence[str],
        text: Callable[[Sequence[str]], str] = " ".join,
    ):
        self.labels = Labels(tokens[positions].astype(np.int64))
        self._tokens = tokens
        self._positions = positions
        self._names = names
        self._window = np.arange(-context, 0)
        self._text = text

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows: inputs [b, C] int64, the ids of the C tokens before."""
        rows = np.asarray(rows, dtype=np.int64)
        windows = self._tokens[self._positions[rows][:, None] + self._window]
        return Fetched(torch.from_numpy(windows.astype(np.int64)), rows)

    def show(self, row: int) -> Shown:
        """The text before the token to predict, and "→ ?" in its place; "…" where the window cuts the text off."""
        window = self._tokens[self._positions[row] + self._window]
        seen = window[window <= len(self._names) - len(SPECIALS)]  # without padding and start
        text = ("… " if len(seen) == len(window) else "") + self._text([self._names[int(token)] for token in seen])
        return Shown(text=text + ("→ ?" if not text or text[-1].isspace() else " → ?"))


class TokenSplits(NamedTuple):
    """The splits of a corpus.

    Attributes:
        classes: names, the most frequent first.
        splits: by the names in `SPLITS`; a split may have no rows.
        input: what a backbone gets.
        known: which share of all tokens is one of the classes.
    """

    classes: list[str]
    splits: dict[str, Split]
    input: InputSpec
    known: float


def token_splits(
    corpus: Corpus,
    homes: np.ndarray,
    *,
    classes: int,
    context: int,
    limit: int | None,
    seed: int,
    text: Callable[[Sequence[str]], str],
) -> TokenSplits:
    """Examples of all tokens that are classes, with the tokens before each.

    Args:
        corpus: of all splits.
        homes: [files] the number in `SPLITS` of each file's split.
        classes: K, at most: the most frequent tokens of the training files.
        context: C
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: of that draw.
        text: makes tokens readable.
    """
    names, mapping = vocabulary(corpus, homes == 0, classes)
    tokens = mapping[corpus.ids]
    all_names = [*names, *SPECIALS]
    splits: dict[str, Split] = {}
    for number, name in enumerate(SPLITS):
        padded = join(corpus, tokens, np.flatnonzero(homes == number), context, len(names))
        positions = np.flatnonzero(padded < len(names))
        if name == "train" and limit is not None and limit < len(positions):
            drawn = np.random.default_rng(seed).permutation(len(positions))[:limit]
            positions = positions[np.sort(drawn)]
        splits[name] = TokenSplit(padded, positions, context, all_names, text)
    known = float((tokens < len(names)).mean()) if len(tokens) else 0.0
    return TokenSplits(names, splits, InputSpec("tokens", (context,), len(all_names)), known)


def vocabulary(corpus: Corpus, training: np.ndarray, classes: int) -> tuple[list[str], np.ndarray]:
    """The names of the classes, and for every distinct token its class or the id of `<other>`, [texts] int32.

    Args:
        corpus: of all splits.
        training: [files] bool, which of them are counted.
        classes: K, at most.
    """
    in_training = np.repeat(training, np.diff(corpus.offsets))  # [n]
    counts = np.bincount(corpus.ids[in_training], minlength=len(corpus.texts)).tolist()
    seen = [number for number, count in enumerate(counts) if count]
    # By text among equals, so that the order depends on nothing else.
    chosen = sorted(seen, key=lambda number: (-counts[number], corpus.texts[number]))[:classes]
    mapping = np.full(len(corpus.texts), len(chosen), dtype=np.int32)
    mapping[chosen] = np.arange(len(chosen))
    return [corpus.texts[number] for number in chosen], mapping


def join(corpus: Corpus, tokens: np.ndarray, files: np.ndarray, context: int, other: int) -> np.ndarray:
    """The tokens of some files in one array, each preceded by C ids, so that no window reaches into another file.

    Args:
        corpus: whose offsets say where files are.
        tokens: [n] int32, the ids of the corpus's tokens.
        files: [m] numbers of files.
        context: C
        other: K, the id of `<other>`; those of padding and start come after it.

    Returns:
        [m · C + tokens of the files] int32
    """
    before = np.full(context, other + 1, dtype=np.int32)
    before[-1] = other + 2
    pieces = [np.empty(0, dtype=np.int32)]
    for file in files:
        pieces += [before, tokens[corpus.offsets[file] : corpus.offsets[file + 1]]]
    return np.concatenate(pieces)
