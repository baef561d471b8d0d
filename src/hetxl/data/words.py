"""Next-word prediction on the text of a dictionary: Webster's of 1913 with later additions (Debian's dict-gcide).

A class is a word or a punctuation mark, an input the words before it. The labels are noisy by nature: after "the act
of" thousands of words are right.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hetxl.data.build.packages import debian_package
from hetxl.data.build.store import Made, array, build, find, packages_folder, read_json, write_array, write_json
from hetxl.data.corpus import Corpus, split_of
from hetxl.data.dataset import SPLITS, Dataset
from hetxl.data.progress import progress_bar
from hetxl.data.tokens import token_splits
from hetxl.data.words_text import Entry, paragraphs, plain_text, read_entries, words
from hetxl.functional._checks import integer_at_least

PACKAGE = "dict-gcide"
MAX_CLASSES = 50_000
"""Rarer words than these are in the text twice or once."""

REPEATED = 8
"""A paragraph of at least so many tokens is kept once: the same quotation may stand in several entries."""

VERSION = 1
"""Of the files; to be raised when they are made in another way."""


def build_words(*, entries: int | None = None, cache: Path | None = None) -> Path:
    """Download the dictionary and cut its text in words, about half a minute; at once if that was done before.

    Args:
        entries: only the first so many entries, for a quick try; None for all.
        cache: folder for it; None for $HETXL_CACHE, or ~/.cache/hetxl.

    Returns:
        The folder of the files.
    """
    options = _options(entries)

    def make(folder: Path) -> Made:
        package = debian_package(PACKAGE, packages_folder(cache))
        where = package.root / "usr/share/dictd"
        corpus, repeated = read_words(read_entries(where / "gcide.index", where / "gcide.dict.dz", entries))
        write_array(folder / "ids.npy", corpus.ids)
        write_array(folder / "offsets.npy", corpus.offsets)
        write_json(folder / "texts.json", corpus.texts)
        write_json(folder / "headwords.json", corpus.files)
        return Made([package], [f"{repeated:,} paragraphs that stand in several entries are kept once"])

    return build("words", options, cache, make, VERSION)


def load_words(
    *,
    classes: int = 8192,
    context: int = 16,
    limit: int | None = None,
    entries: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Next-word prediction on the text of a dictionary, split by headword; `hetxl data build words` makes its files.

    The classes are the most frequent words of the training entries, the most frequent first. Any other word is
    `<other>` where it is in the context, and never a target: positions before it are no examples. All entries of one
    headword are in the same split, 90 % of the headwords in training, 5 % in validation and 5 % in test.

    Args:
        classes: K, at most; up to 50,000.
        context: C, how many words before the target are the input.
        limit: keep at most this many training rows, drawn at random; None for all.
        entries: as in `build_words`.
        seed: of that draw.
        cache: as in `build_words`.
    """
    integer_at_least("classes", classes, 2)
    if classes > MAX_CLASSES:
        raise ValueError(f"classes must be at most {MAX_CLASSES:,}, found {classes:,}: the text has no more words")
    integer_at_least("context", context, 1)
    integer_at_least("seed", seed, 0)
    if limit is not None:
        integer_at_least("limit", limit, 1)
    built = find("words", _options(entries), cache, VERSION)
    headwords = read_json(built, "headwords")
    corpus = Corpus(array(built, "ids"), read_json(built, "texts"), headwords, array(built, "offsets"))
    homes = np.array([SPLITS.index(split_of(word.casefold())) for word in headwords], dtype=np.int64)
    found = token_splits(corpus, homes, classes=classes, context=context, limit=limit, seed=seed, text=plain_text)
    empty = [name for name in SPLITS if not len(found.splits[name])]
    if empty:
        raise ValueError(f"entries must be more than {entries}: the split {empty[0]!r} has no rows of so few")
    counts = np.bincount(homes, minlength=len(SPLITS))
    shares = ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True))
    notes = [
        *built.sources(),
        f"split by headword, in entries: {shares}",
        f"{found.known:.1%} of the words are among the {len(found.classes):,} classes; the others are no targets",
        *built.manifest["notes"],
    ]
    if len(found.classes) < classes:
        notes.append(f"{classes:,} classes were asked for; the training entries have {len(found.classes):,} words")
    return Dataset("words", found.input, found.classes, found.splits, notes=tuple(notes))


def read_words(entries: Sequence[Entry]) -> tuple[Corpus, int]:
    """The words of all entries: each one's headword, a colon, and its paragraphs.

    Args:
        entries: of the dictionary.

    Returns:
        The corpus, whose files are the entries under their headwords; and how many paragraphs were left out because
        they stand in an entry before.
    """
    known: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    streams, headwords, repeated = [], [], 0
    with progress_bar("Reading the dictionary", len(entries)) as advance:
        for entry in entries:
            advance(1)
            tokens: list[str] = []
            for paragraph in map(words, paragraphs(entry)):
                key = tuple(paragraph) if len(paragraph) >= REPEATED else None
                if key is not None and key in seen:
                    repeated += 1
                    continue
                if key is not None:
                    seen.add(key)
                tokens += paragraph
            if tokens:  # what is left of some entries is only their headword
                tokens = [*words(entry.headword), ":", *tokens]
                streams.append(np.fromiter((known.setdefault(token, len(known)) for token in tokens), np.int32))
                headwords.append(entry.headword)
    offsets = np.cumsum([0, *map(len, streams)], dtype=np.int64)
    ids = np.concatenate(streams) if streams else np.empty(0, dtype=np.int32)
    return Corpus(ids, list(known), headwords, offsets), repeated


def _options(entries: int | None) -> dict[str, int]:
    if entries is None:
        return {}
    integer_at_least("entries", entries, 1)
    return {"entries": entries}
