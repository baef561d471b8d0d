"""Next-word prediction on the text of a dictionary of 1913 (Debian's dict-gcide).

Webster's dictionary with later additions. A class is a word or a punctuation mark, an input the words before it. Labels
are noisy by nature: after "the act of" thousands of words are right. The files are in dictd's format.
"""

import gzip
import re
import string
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hetxl._checks import integer_at_least
from hetxl._files import write_array
from hetxl_lab.build import store
from hetxl_lab.build.packages import debian_package
from hetxl_train.console import progress_bar
from hetxl_train.data.dataset import SPLITS, Dataset
from hetxl_train.data.tokens import Corpus, split_of, token_splits

PACKAGE = "dict-gcide"
VERSION = 1  # version of the files; increase it when their content changes
MAX_CLASSES = 50_000  # rarer words are in the text once or twice
MIN_REPEATED = 8  # paragraphs of at least this many tokens are kept once, since several entries may quote the same
NUMBER = "<number>"  # the token of every number

_DIGITS = {digit: value for value, digit in enumerate(string.ascii_uppercase + string.ascii_lowercase + "0123456789+/")}

# The dictionary is ASCII. Letters that ASCII lacks are in brackets: [=e], [a^], [aum], [imac], [ae], [thorn].
_LETTER = re.compile(
    r"\[(?:[=~^'\"`.,*-](ae|oe|oo|[A-Za-z])|(ae|oe|oo|[A-Za-z])(?:\^|um|mac|sl|dd)|(ae|oe|AE|th|ng)|(eth|thorn))\]"
)
_PRONUNCIATION = re.compile(r"\\[^\\]{0,200}\\")
_SOURCE = re.compile(r"\[[^\[\]]*(?:Webster|WordNet|PJC|Century|RDH|RHUD)[^\[\]]*\]")
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_UNKNOWN = re.compile(r"\(\?[^()]*\)")  # a placeholder for a missing pronunciation
_REFERENCE = re.compile(r"\{([^{}]*)\}")
_STRESS = re.compile(r"[*`\"|]")
_BLANK_LINES = re.compile(r"\n\s*\n")
_HYPHENATED = re.compile(r"(?<=\w-)\n\s+(?=\w)")
_NUMBERING = re.compile(r"(?:\d+\.|\([a-z]\))\s+")
_FIELD = re.compile(r"\([A-Z][^()]{0,60}\)\s+")  # (Bot.), (Eng. Law)
_AUTHOR = re.compile(r"\s*--\s?[A-Z1-9][^;]{0,60}$")
_UNFINISHED = re.compile(r"[,;&(]$|\b(?:pl|imp|pr|or|and)\.?$")
_TOKEN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|\d+(?:[.,]\d+)*|\.(?: ?\.){2,}|--+|[.,;:?!()\"'&/-]")
_ORDINAL = re.compile(r"(\d)(?:st|nd|d|rd|th)\b")


def build_words(*, entries: int | None = None, cache: Path | None = None) -> Path:
    """Download the dictionary and cut its text into words, which takes about half a minute; reuse existing files.

    Args:
        entries: number of entries to read from the start; None for all.
        cache: directory of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """

    def write(directory: Path) -> store.Sources:
        package = debian_package(PACKAGE, store.packages_directory(cache))
        files = package.root / "usr/share/dictd"
        corpus, repeated = read_words(read_entries(files / "gcide.index", files / "gcide.dict.dz", entries))
        write_array(directory / "ids.npy", corpus.ids)
        write_array(directory / "offsets.npy", corpus.offsets)
        store.write_json(directory / "texts.json", corpus.texts)
        store.write_json(directory / "headwords.json", corpus.files)
        return store.Sources([package], [f"{repeated:,} paragraphs that stand in several entries are kept once"])

    return store.build("words", _options(entries), cache, write, VERSION)


def load_words(
    *,
    classes: int = 8192,
    context: int = 16,
    limit: int | None = None,
    entries: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Dataset:
    """Load next-word prediction on the text of a dictionary, split by headword; `hetxl data build words` builds it.

    The classes are the most frequent words of the training entries, the most frequent first. Any other word is
    `<other>` in the context, and never a target: positions before it are not examples. All entries of one headword are
    in the same split, 90 % of the headwords in training, 5 % in validation and 5 % in test. `entries` and `cache` are
    as in `build_words`.

    Args:
        classes: largest K; up to 50,000.
        context: C, the number of words before the target in the input.
        limit: keep at most this many training rows, drawn at random; None for all.
        seed: seed of that draw.
    """
    integer_at_least("classes", classes, 2)
    if classes > MAX_CLASSES:
        raise ValueError(f"classes must be at most {MAX_CLASSES:,}, found {classes:,}: the text has no more words")
    integer_at_least("context", context, 1)
    store.check_limit(limit, seed)
    built = store.open_built("words", _options(entries), cache, VERSION)
    headwords = built.json("headwords")
    corpus = Corpus(built.array("ids"), built.json("texts"), headwords, built.array("offsets"))
    homes = np.array([SPLITS.index(split_of(word.casefold())) for word in headwords], dtype=np.int64)
    tokens = token_splits(corpus, homes, classes=classes, context=context, limit=limit, seed=seed, text=plain_text)
    empty = [name for name in SPLITS if not len(tokens.splits[name])]
    if empty:
        raise ValueError(f"entries must be more than {entries}: the split {empty[0]!r} would have no rows")
    counts = np.bincount(homes, minlength=len(SPLITS))
    shares = ", ".join(f"{count:,} {name}" for name, count in zip(SPLITS, counts, strict=True))
    notes = [
        *built.source_notes(),
        f"split by headword, in entries: {shares}",
        f"{tokens.known:.1%} of the words are among the {len(tokens.classes):,} classes; the others are not targets",
        *built.manifest["notes"],
    ]
    if len(tokens.classes) < classes:
        notes.append(f"{classes:,} classes were asked for; the training entries have {len(tokens.classes):,} words")
    return Dataset("words", tokens.input, tokens.classes, tokens.splits, notes=tuple(notes))


def _options(entries: int | None) -> dict[str, int]:
    """Check the options that the files depend on."""
    return {} if entries is None else {"entries": integer_at_least("entries", entries, 1)}


class Entry(NamedTuple):
    """An entry of the dictionary."""

    headword: str  # as written; several entries (a noun, a verb) may share it
    text: str  # the whole text, with its markup


def read_words(entries: Sequence[Entry]) -> tuple[Corpus, int]:
    """Return the words of entries, for each its headword, a colon, and its paragraphs.

    Returns:
        The corpus, whose files are the entries under their headwords; and the number of paragraphs left out because
        an earlier entry has them.
    """
    known: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    streams, headwords, repeated = [], [], 0
    with progress_bar("Reading the dictionary", len(entries)) as advance:
        for entry in entries:
            advance(1)
            tokens: list[str] = []
            for paragraph in map(words, paragraphs(entry)):
                if len(paragraph) >= MIN_REPEATED:
                    if (key := tuple(paragraph)) in seen:
                        repeated += 1
                        continue
                    seen.add(key)
                tokens += paragraph
            if tokens:  # of some entries only the headword is left
                tokens = [*words(entry.headword), ":", *tokens]
                streams.append(np.fromiter((known.setdefault(token, len(known)) for token in tokens), np.int32))
                headwords.append(entry.headword)
    offsets = np.cumsum([0, *map(len, streams)], dtype=np.int64)
    ids = np.concatenate(streams) if streams else np.empty(0, dtype=np.int32)
    return Corpus(ids, list(known), headwords, offsets), repeated


def read_entries(index: Path, content: Path, limit: int | None = None) -> list[Entry]:
    """Read the entries of a dictionary, in the order of the text.

    Args:
        index: lines of headword, offset and length, the numbers in dictd's own base 64.
        content: the text, compressed by dictzip, which is gzip.
        limit: number of entries to read from the start; None for all.
    """
    try:
        with gzip.open(content) as file:
            text = file.read()
        fields = (line.split("\t")[:3] for line in index.read_text(encoding="utf-8").splitlines())
        spans = {(_number(start), _number(length)) for name, start, length in fields if name[:3] != "00-"}
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ValueError(f"{content} or {index.name} beside it is not a dictionary of dictd: {error}") from None
    entries: list[Entry] = []
    for start, length in sorted(spans)[:limit]:
        entry = _decode(text[start : start + length])
        headword, backslash, _ = entry.partition("\\")
        if backslash and len(headword) <= 80:
            entries.append(Entry(" ".join(_plain(headword).split()), entry))
        elif entries:  # the rest of an entry that contains a blank line
            entries.append(Entry(entries[-1].headword, "\n" + entry))
    return entries


def paragraphs(entry: Entry) -> Iterator[str]:
    """Return the definitions, quotations and remarks of an entry as plain text.

    Leaves out pronunciations, parts of speech and all else before the first definition, all brackets
    (etymologies, sources, marks such as [Obs.]), numbers of definitions, fields such as (Bot.), and what ends a
    paragraph after a dash: authors of quotations, derived words. The words of cross references stay.
    """
    text = _SOURCE.sub("\n\n", _PRONUNCIATION.sub(" ", _plain(entry.text)))
    while (shorter := _BRACKETS.sub(" ", text)) != text:  # they may be nested
        text = shorter
    text = _REFERENCE.sub(lambda match: _STRESS.sub("", match[1]), _UNKNOWN.sub(" ", text))
    pieces = list(filter(None, map(_clean, _BLANK_LINES.split(_without_head(text)))))
    # Some entries end with the next headword, an error in the files.
    if len(pieces) > 1 and not re.search(r"\W$", pieces[-1]):
        pieces.pop()
    yield from pieces


def words(text: str) -> list[str]:
    """Cut plain text into lower-case words, numbers (all `<number>`) and punctuation; anything else is dropped.

    >>> words('"It\\'s well-made," he said (in 1,913).')
    ['"', "it's", 'well-made', ',', '"', 'he', 'said', '(', 'in', '<number>', ')', '.']
    """
    return [_token(token) for token in _TOKEN.findall(_ORDINAL.sub(r"\1", text.lower()))]


def plain_text(tokens: Sequence[str]) -> str:
    """Join tokens from `words` with the spaces that a reader expects."""
    text, tight, quoted = "", True, False
    for token in tokens:
        closing = token in tuple(".,;:?!)") or token == "..." or (token == '"' and quoted)
        text += token if tight or closing else f" {token}"
        quoted ^= token == '"'
        tight = token == "(" or (token == '"' and quoted)
    return text


def _token(match: str) -> str:
    if match[0].isdigit():
        return NUMBER
    if match[:2] == "--":
        return "--"
    return "..." if match[0] == "." and len(match) > 1 else match


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS[digit]
    return value


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:  # a few apostrophes have another encoding
        return content.decode("cp1252", errors="replace").replace("\u2019", "'")


def _plain(text: str) -> str:
    return _LETTER.sub(lambda match: "th" if match[4] else match[1] or match[2] or match[3], text)


def _without_head(text: str) -> str:
    """Remove headword, part of speech and inflections: the first line, and further lines if it continues."""
    lines = text.split("\n")
    depth = 0
    for number, line in enumerate(lines):
        depth += line.count("(") - line.count(")")
        if (depth <= 0 and not _UNFINISHED.search(line.rstrip())) or number == 8:
            return "\n".join(lines[number + 1 :])
    return ""


def _clean(paragraph: str) -> str:
    text = " ".join(_HYPHENATED.sub("", paragraph).split())
    for pattern in (_NUMBERING, _NUMBERING, _FIELD):
        match = pattern.match(text)
        text = text[match.end() :] if match else text
    return _AUTHOR.sub("", text)
