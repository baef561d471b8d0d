"""Next-token prediction on Python source: a benchmark of thousands of classes that is on every machine.

A class is a token, an input the tokens before it. The labels are noisy by nature: after `self.` many names are right.
"""

import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hetxl.data.code_text import code_text
from hetxl.data.corpus import Corpus, split_of
from hetxl.data.corpus_cache import cache_folder, cached_corpus
from hetxl.data.dataset import SPLITS, Dataset, Fetched, InputSpec, Shown, Split
from hetxl.data.labels import Labels
from hetxl.functional._checks import integer_at_least

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
    """

    def __init__(self, tokens: np.ndarray, positions: np.ndarray, context: int, names: Sequence[str]):
        self.labels = Labels(tokens[positions].astype(np.int64))
        self._tokens = tokens
        self._positions = positions
        self._names = names
        self._window = np.arange(-context, 0)

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows: inputs [b, C] int64, the ids of the C tokens before."""
        rows = np.asarray(rows, dtype=np.int64)
        windows = self._tokens[self._positions[rows][:, None] + self._window]
        return Fetched(torch.from_numpy(windows.astype(np.int64)), rows)

    def show(self, row: int) -> Shown:
        """The code before the token to predict, and "→ ?" in its place; "…" where the window cuts the code off."""
        window = self._tokens[self._positions[row] + self._window]
        code = window[window <= len(self._names) - len(SPECIALS)]  # without padding and start
        text = ("… " if len(code) == len(window) else "") + code_text([self._names[int(token)] for token in code])
        return Shown(text=text + ("→ ?" if not text or text[-1].isspace() else " → ?"))


def load_pycode(
    *,
    classes: int = 8192,
    context: int = 16,
    limit: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
    source: Path | None = None,
) -> Dataset:
    """Next-token prediction on the source of Python's standard library, split by file.

    The classes are the most frequent tokens of the training files, the most frequent first. Any other token is
    `<other>` where it is in the context, and never a target: positions before it are no examples. The same Python gives
    the same data on every machine.

    Args:
        classes: K, at most.
        context: C, how many tokens before the target are the input.
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: of that draw.
        cache: folder for the tokens, so that later calls are quick; $HETXL_CACHE or ~/.cache/hetxl without.
        source: another folder of Python files; the running Python's standard library without.
    """
    integer_at_least("classes", classes, 2)
    integer_at_least("context", context, 1)
    integer_at_least("seed", seed, 0)
    if limit is not None:
        integer_at_least("limit", limit, 1)
    folder = Path(sysconfig.get_path("stdlib") if source is None else source)
    corpus = cached_corpus(folder, cache_folder(cache))
    homes = np.array([SPLITS.index(split_of(file)) for file in corpus.files], dtype=np.int64)  # [files]
    names, mapping = _vocabulary(corpus, homes == 0, classes)
    tokens = mapping[corpus.ids]
    all_names = [*names, *SPECIALS]
    splits: dict[str, Split] = {}
    for number, name in enumerate(SPLITS):
        padded = _join(corpus, tokens, np.flatnonzero(homes == number), context, len(names))
        positions = np.flatnonzero(padded < len(names))
        if not len(positions):
            raise ValueError(
                f"source must have code for every split, found none for {name!r} in the {len(homes)} Python files of "
                f"{folder}, which are split by their names; use a folder with more files"
            )
        if name == "train" and limit is not None and limit < len(positions):
            drawn = np.random.default_rng(seed).permutation(len(positions))[:limit]
            positions = positions[np.sort(drawn)]
        splits[name] = TokenSplit(padded, positions, context, all_names)
    return Dataset(
        name="pycode",
        input=InputSpec("tokens", (context,), len(all_names)),
        class_names=names,
        splits=splits,
        notes=_notes(corpus, homes, float((tokens < len(names)).mean()), len(names), classes, source),
    )


def _vocabulary(corpus: Corpus, training: np.ndarray, classes: int) -> tuple[list[str], np.ndarray]:
    """The names of the classes, and for every distinct token its class or the id of `<other>`, [texts] int32."""
    in_training = np.repeat(training, np.diff(corpus.offsets))  # [n]
    counts = np.bincount(corpus.ids[in_training], minlength=len(corpus.texts)).tolist()
    seen = [number for number, count in enumerate(counts) if count]
    # By text among equals, so that the order depends on nothing else.
    chosen = sorted(seen, key=lambda number: (-counts[number], corpus.texts[number]))[:classes]
    mapping = np.full(len(corpus.texts), len(chosen), dtype=np.int32)
    mapping[chosen] = np.arange(len(chosen))
    return [corpus.texts[number] for number in chosen], mapping


def _join(corpus: Corpus, tokens: np.ndarray, files: np.ndarray, context: int, other: int) -> np.ndarray:
    """The tokens of some files in one array, each preceded by C ids, so that no window reaches into another file."""
    before = np.full(context, other + 1, dtype=np.int32)
    before[-1] = other + 2
    pieces = [np.empty(0, dtype=np.int32)]
    for file in files:
        pieces += [before, tokens[corpus.offsets[file] : corpus.offsets[file + 1]]]
    return np.concatenate(pieces)


def _notes(
    corpus: Corpus, homes: np.ndarray, known: float, found: int, classes: int, source: Path | None
) -> tuple[str, ...]:
    """What a reader should know."""
    counts = np.bincount(homes, minlength=len(SPLITS))
    shares = ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True))
    what = f"the standard library of Python {platform.python_version()}" if source is None else f"{source}"
    notes = [
        f"source: {what}; split by file: {shares}",
        f"{known:.1%} of the tokens are among the {found:,} classes; the others are no targets",
    ]
    if found < classes:
        notes.append(f"{classes:,} classes were asked for; the training files have {found:,} distinct tokens")
    if corpus.broken:
        first = corpus.broken[0]
        files = "1 file is" if len(corpus.broken) == 1 else f"{len(corpus.broken):,} files are"
        notes.append(f"{files} not Python and left out, such as {first.path}: {first.reason}")
    return tuple(notes)
