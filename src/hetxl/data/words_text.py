"""The text of a dictionary in dictd's format: entries without their markup, cut in words, and put together again."""

import gzip
import re
import string
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

NUMBER = "<number>"
"""The token of every number."""

_DIGITS = {digit: value for value, digit in enumerate(string.ascii_uppercase + string.ascii_lowercase + "0123456789+/")}

# The dictionary is ASCII. Letters that ASCII lacks are in brackets: [=e], [a^], [aum], [imac], [ae], [thorn].
_LETTER = re.compile(
    r"\[(?:[=~^'\"`.,*-](ae|oe|oo|[A-Za-z])|(ae|oe|oo|[A-Za-z])(?:\^|um|mac|sl|dd)|(ae|oe|AE|th|ng)|(eth|thorn))\]"
)
_PRONUNCIATION = re.compile(r"\\[^\\]{0,200}\\")
_SOURCE = re.compile(r"\[[^\[\]]*(?:Webster|WordNet|PJC|Century|RDH|RHUD)[^\[\]]*\]")
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_UNKNOWN = re.compile(r"\(\?[^()]*\)")  # what stands for a pronunciation that was not entered
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


class Entry(NamedTuple):
    """An entry of the dictionary.

    Attributes:
        headword: as it is written; entries of the same spelling are several (a noun, a verb).
        text: all of it, with its markup.
    """

    headword: str
    text: str


def read_entries(index: Path, content: Path, limit: int | None = None) -> list[Entry]:
    """The entries of a dictionary, in the order of the text.

    Args:
        index: lines of headword, place and length, the numbers in dictd's own base 64.
        content: the text, compressed by dictzip, which is gzip.
        limit: only the first so many; None for all.
    """
    try:
        with gzip.open(content) as file:
            text = file.read()
        lines = index.read_text(encoding="utf-8").splitlines()
        places = {(_number(start), _number(length)) for name, start, length in _fields(lines) if name[:3] != "00-"}
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ValueError(f"{content} or {index.name} beside it is not a dictionary of dictd: {error}") from None
    entries: list[Entry] = []
    for start, length in sorted(places)[:limit]:
        entry = _decode(text[start : start + length])
        headword, found, _ = entry.partition("\\")
        if found and len(headword) <= 80:
            entries.append(Entry(" ".join(_plain(headword).split()), entry))
        elif entries:  # the rest of an entry that a blank line has cut: it belongs to the same word
            entries.append(Entry(entries[-1].headword, "\n" + entry))
    return entries


def paragraphs(entry: Entry) -> Iterator[str]:
    """The definitions, quotations and remarks of an entry as plain text.

    Left out are pronunciations, parts of speech and what else stands before the first definition, all that is in
    brackets (etymologies, sources, marks such as [Obs.]), numbers of definitions, fields such as (Bot.), and what ends
    a paragraph after a dash: authors of quotations, derived words. Of cross references the words stay.

    Args:
        entry: from `read_entries`.
    """
    text = _SOURCE.sub("\n\n", _PRONUNCIATION.sub(" ", _plain(entry.text)))
    while (shorter := _BRACKETS.sub(" ", text)) != text:  # they may be nested
        text = shorter
    text = _REFERENCE.sub(lambda match: _STRESS.sub("", match[1]), _UNKNOWN.sub(" ", text))
    pieces = [_clean(piece) for piece in _BLANK_LINES.split(_without_head(text))]
    found = [piece for piece in pieces if piece]
    # At the end of some entries the next headword stands, by a mistake of the files.
    if len(found) > 1 and not re.search(r"\W$", found[-1]):
        found.pop()
    yield from found


def words(text: str) -> list[str]:
    """Text cut in lower-case words, numbers (all `<number>`) and punctuation; anything else is dropped.

    >>> words('"It\\'s well-made," he said (in 1,913).')
    ['"', "it's", 'well-made', ',', '"', 'he', 'said', '(', 'in', '<number>', ')', '.']

    Args:
        text: plain.
    """
    return [_name(token) for token in _TOKEN.findall(_ORDINAL.sub(r"\1", text.lower()))]


def plain_text(tokens: Sequence[str]) -> str:
    """Words and punctuation with the spaces that a reader expects.

    Args:
        tokens: as `words` gives them.
    """
    text, tight, quoted = "", True, False
    for token in tokens:
        closing = token in tuple(".,;:?!)") or token == "..." or (token == '"' and quoted)
        text += token if tight or closing else f" {token}"
        quoted ^= token == '"'
        tight = token == "(" or (token == '"' and quoted)
    return text


def _name(token: str) -> str:
    if token[0].isdigit():
        return NUMBER
    if token[:2] == "--":
        return "--"
    return "..." if token[0] == "." and len(token) > 1 else token


def _fields(lines: Sequence[str]) -> Iterator[list[str]]:
    return (line.split("\t")[:3] for line in lines)


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS[digit]
    return value


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:  # a few apostrophes of another encoding
        return content.decode("cp1252", errors="replace").replace("\u2019", "'")


def _plain(text: str) -> str:
    return _LETTER.sub(lambda match: "th" if match[4] else match[1] or match[2] or match[3], text)


def _without_head(text: str) -> str:
    """The text without headword, part of speech and inflections: the first line, and more if that is not finished."""
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
