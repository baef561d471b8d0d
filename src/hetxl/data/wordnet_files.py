"""The files of WordNet as Debian's wordnet-base has them, `data.noun`, `index.noun` and so on: the format of wndb(5).

A synset is a set of words with one meaning. It has a gloss and points at other synsets, such as its hypernyms: a dog is
a canine.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
"""Parts of speech, and the letters that stand for them."""

FILES = (
    "adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact", "noun.attribute",
    "noun.body", "noun.cognition", "noun.communication", "noun.event", "noun.feeling", "noun.food", "noun.group",
    "noun.location", "noun.motive", "noun.object", "noun.person", "noun.phenomenon", "noun.plant", "noun.possession",
    "noun.process", "noun.quantity", "noun.relation", "noun.shape", "noun.state", "noun.substance", "noun.time",
    "verb.body", "verb.change", "verb.cognition", "verb.communication", "verb.competition", "verb.consumption",
    "verb.contact", "verb.creation", "verb.emotion", "verb.motion", "verb.perception", "verb.possession",
    "verb.social", "verb.stative", "verb.weather", "adj.ppl",
)  # fmt: skip
"""The lexicographers' files by their numbers, as lexnames(5) lists them."""

HYPERNYMS = ("@", "@i")
"""Pointers to what a synset is a kind of, and to what it is an instance of."""

_MARKER = re.compile(r"\((a|p|ip)\)$")  # where in a sentence an adjective may stand
_EXAMPLES = re.compile(r'\s*[;:,]\s*"')


class Synset(NamedTuple):
    """A meaning.

    Attributes:
        key: part of speech and place in its file, "n02084071".
        file: number of the lexicographers' file, see `FILES`.
        words: that have this meaning, the most usual first, with spaces.
        hypernyms: keys of what it is a kind or an instance of, in the order of the file.
        gloss: definition and example sentences.
    """

    key: str
    file: int
    words: tuple[str, ...]
    hypernyms: tuple[str, ...]
    gloss: str


def read_synsets(folder: Path, part: str, limit: int | None = None) -> list[Synset]:
    """The synsets of a part of speech, in the order of the file.

    Args:
        folder: of the files.
        part: one of `PARTS`.
        limit: only the first so many; None for all.
    """
    found: list[Synset] = []
    path = folder / f"data.{part}"
    for number, line in _lines(path):
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append(_synset(line, PARTS[part]))
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} has no synset in line {number}, as wndb(5) describes them: {error}") from None
    return found


def read_senses(folder: Path, part: str) -> dict[tuple[str, str], int]:
    """The number of each sense of each word, from 1 on: of the word in lower case and the key of the synset.

    Args:
        folder: of the files.
        part: one of `PARTS`.
    """
    senses = {}
    path = folder / f"index.{part}"
    for number, line in _lines(path):
        fields = line.split()
        try:
            count = int(fields[2])
            keys = [PARTS[part] + field for field in fields[len(fields) - count :]]
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} has no word in line {number}, as wndb(5) describes them: {error}") from None
        senses.update({(fields[0].replace("_", " "), key): sense for sense, key in enumerate(keys, 1)})
    return senses


def definition(gloss: str) -> str:
    """A gloss without its example sentences: what stands before the first quotation after a semicolon, colon or comma.

    Quotations within the definition, remarks in brackets and further definitions after a semicolon are kept.

    >>> definition('a complete extent; the range: "a gamut of emotions"; "the whole gamut"')
    'a complete extent; the range'
    """
    kept = _EXAMPLES.split(gloss.strip(), maxsplit=1)[0].strip(" ;")
    return kept or gloss.strip()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without the licence at the start, whose lines begin with two spaces."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.startswith("  "):
                yield number, line


def _synset(line: str, letter: str) -> Synset:
    head, bar, gloss = line.partition(" | ")
    if not bar:
        raise ValueError("it has no gloss")
    fields = head.split()
    offset, file, count = fields[0], int(fields[1]), int(fields[3], 16)  # words are counted in hexadecimal digits
    if not (offset.isdigit() and 0 <= file < len(FILES) and count >= 1):
        raise ValueError(f"it begins with {' '.join(fields[:4])!r}")
    words = tuple(_MARKER.sub("", word).replace("_", " ") for word in fields[4 : 4 + 2 * count : 2])
    start = 5 + 2 * count
    pointers = range(start, start + 4 * int(fields[start - 1]), 4)
    hypernyms = [fields[at + 2] + fields[at + 1] for at in pointers if fields[at] in HYPERNYMS]
    return Synset(letter + offset, file, words, tuple(dict.fromkeys(hypernyms)), gloss.strip())
