"""Next-token prediction on Python source: a benchmark of thousands of classes that is on every machine.

A class is a token, an input the tokens before it. The labels are noisy by nature: after `self.` many names are right.
"""

import platform
import sysconfig
from pathlib import Path

import numpy as np

from hetxl.data.code_text import code_text
from hetxl.data.corpus import Corpus, split_of
from hetxl.data.corpus_cache import cache_folder, cached_corpus
from hetxl.data.dataset import SPLITS, Dataset
from hetxl.data.tokens import token_splits
from hetxl.functional._checks import integer_at_least


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
    found = token_splits(corpus, homes, classes=classes, context=context, limit=limit, seed=seed, text=code_text)
    for name, split in found.splits.items():
        if not len(split):
            raise ValueError(
                f"source must have code for every split, found none for {name!r} in the {len(homes)} Python files of "
                f"{folder}, which are split by their names; use a folder with more files"
            )
    notes = _notes(corpus, homes, found.known, len(found.classes), classes, source)
    return Dataset("pycode", found.input, found.classes, found.splits, notes=notes)


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
