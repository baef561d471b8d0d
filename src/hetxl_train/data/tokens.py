"""Next-token prediction on a corpus: which tokens are classes, and windows of the tokens before them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hetxl_train.data.dataset import SPLITS, Fetched, InputSpec, Shown, Split, Unreadable
from hetxl_train.data.labels import Labels

OTHER = "<other>"
SPECIALS = (OTHER, "<padding>", "<start>")
"""Ids after the K classes, as inputs only: a token that is not a class, what fills a window before a file's start, and
the start itself."""


@dataclass(frozen=True)
class Corpus:
    """The tokens of many files, one file after the other."""

    ids: np.ndarray  # [n] int32, which of `texts` each token is
    texts: Sequence[str]  # the distinct tokens, in the order in which they first appear
    files: Sequence[str]  # paths of the files with "/", relative to their directory
    offsets: np.ndarray  # [files + 1] int64, file i has ids[offsets[i] : offsets[i + 1]]
    unreadable: Sequence[Unreadable] = ()  # files that could not be read, which are not among `files`


def split_of(file: str) -> str:
    """Return the split of a file by a hash of its relative path: 90 % "train", 5 % "validation", 5 % "test"."""
    digest = hashlib.blake2b(file.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    return "train" if share < 0.9 else "validation" if share < 0.95 else "test"


class TokenSplit(Split):
    """Windows into one array of tokens, made on demand.

    Args:
        tokens: [n] int32, every file preceded by C ids of padding and start.
        positions: [rows] int64, the tokens to predict.
        names: of all ids, those of `SPECIALS` last.
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
        self._tokens, self._positions, self._names, self._text = tokens, positions, names, text
        self._window = np.arange(-context, 0)

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows: inputs [b, C] int64, the ids of the C tokens before."""
        rows = np.asarray(rows, dtype=np.int64)
        windows = self._tokens[self._positions[rows][:, None] + self._window]
        return Fetched(torch.from_numpy(windows.astype(np.int64)), rows)

    def show(self, row: int) -> Shown:
        """Return the text before the token to predict, and "→ ?" for that token; "…" if the text is cut off."""
        window = self._tokens[self._positions[row] + self._window]
        seen = window[window <= len(self._names) - len(SPECIALS)]  # without padding and start
        text = ("… " if len(seen) == len(window) else "") + self._text([self._names[int(token)] for token in seen])
        return Shown(text=text + ("→ ?" if not text or text[-1].isspace() else " → ?"))


@dataclass(frozen=True)
class Windows:
    """Make inputs of texts, as a `TokenSplit` has them: the ids of the last C tokens of each."""

    names: Sequence[str]  # of the classes
    context: int  # C
    cut: Callable[[str], list[str]]  # into tokens

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Return ids [n, C] int64; what comes before the start of a text is padding."""
        ids, other = {name: number for number, name in enumerate(self.names)}, len(self.names)
        before = [other + 1] * (self.context - 1) + [other + 2]
        rows = [[*before, *(ids.get(token, other) for token in self.cut(text))][-self.context :] for text in texts]
        return torch.tensor(rows)


class TokenSplits(NamedTuple):
    """The splits of a corpus."""

    classes: list[str]  # names, the most frequent first
    splits: dict[str, Split]  # by the names in `SPLITS`; a split may have no rows
    input: InputSpec
    known: float  # the share of all tokens that are classes


def token_splits(
    corpus: Corpus,
    file_splits: np.ndarray,
    *,
    classes: int,
    context: int,
    limit: int | None,
    seed: int,
    text: Callable[[Sequence[str]], str],
) -> TokenSplits:
    """Return examples of all tokens that are classes, with the tokens before each.

    `file_splits` [files] has the index in `SPLITS` of each file's split. The classes are at most K, the most frequent
    tokens of the training files; the training rows at most `limit`, drawn at random, None for all.
    """
    names, mapping = vocabulary(corpus, file_splits == 0, classes)
    tokens = mapping[corpus.ids]
    all_names = [*names, *SPECIALS]
    splits: dict[str, Split] = {}
    for number, name in enumerate(SPLITS):
        padded = join(corpus, tokens, np.flatnonzero(file_splits == number), context, len(names))
        positions = np.flatnonzero(padded < len(names))
        if name == "train" and limit is not None and limit < len(positions):
            drawn = np.random.default_rng(seed).permutation(len(positions))[:limit]
            positions = positions[np.sort(drawn)]
        splits[name] = TokenSplit(padded, positions, context, all_names, text)
    known = float((tokens < len(names)).mean()) if len(tokens) else 0.0
    return TokenSplits(names, splits, InputSpec("tokens", (context,), len(all_names)), known)


def vocabulary(corpus: Corpus, training: np.ndarray, classes: int) -> tuple[list[str], np.ndarray]:
    """Return the names of the classes, and for every distinct token its class or the id of `<other>`, [texts] int32.

    The classes are the most frequent tokens of the training files, [files] bool.
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
    """Join the tokens of some files, each preceded by C ids, so that no window reaches into another file.

    The tokens are ids of the corpus's [n] int32, the files numbers [m]; `other` is K, the id of `<other>`, which those
    of padding and start follow.
    """
    before = np.full(context, other + 1, dtype=np.int32)
    before[-1] = other + 2
    pieces = [np.empty(0, dtype=np.int32)]
    for file in files:
        pieces += [before, tokens[corpus.offsets[file] : corpus.offsets[file + 1]]]
    return np.concatenate(pieces)
