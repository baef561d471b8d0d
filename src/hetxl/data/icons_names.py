"""The names of icons: as words, without their style, and in categories.

| name in the font | words | stem | category |
| --- | --- | --- | --- |
| arrow-left-bold | arrow left bold | arrow left | arrow |
| account_circle-outline | account circle outline | account circle | account |

The stem tells which drawings are the same thing in another style. The category is the first word of the stem that at
least `LEAST` names share, its first word before all others; names that share no word are the category `OTHER`.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

STYLES = frozenset(("outline", "fill", "line", "bold", "light", "thin", "sharp", "rounded", "filled", "solid"))
"""Words at the end of a name that tell how something is drawn, and not what. They stay in the name."""

LEAST = 8
"""Names that a category has, at least."""

OTHER = "other"
"""The category of names that share no word with enough others."""

_SEPARATORS = re.compile(r"[\s_\-./]+")


def words_of(name: str) -> str:
    """A name of a font's table as words with spaces between.

    >>> words_of("arrow-left-bold")
    'arrow left bold'
    """
    return _SEPARATORS.sub(" ", name).strip().lower()


def stem_of(words: str) -> str:
    """A name without the words of its style; one that is nothing else stays as it is.

    Args:
        words: from `words_of`.
    """
    found = words.split()
    while len(found) > 1 and found[-1] in STYLES:
        found.pop()
    return " ".join(found)


def categories_of(names: Sequence[str], least: int = LEAST) -> tuple[np.ndarray, list[str]]:
    """The category of each name.

    Args:
        names: n, from `words_of`; names may repeat, and count once.
        least: names that share the word of a category, at least.

    Returns:
        [n] int64, and the names of the categories.
    """
    stems = [stem_of(name).split() for name in names]
    distinct = {tuple(stem) for stem in stems}
    first = Counter(stem[0] for stem in distinct if stem)
    anywhere = Counter(word for stem in distinct for word in set(stem))

    def category(stem: Sequence[str]) -> str:
        if stem and first[stem[0]] >= least:
            return stem[0]
        # What many begin with before what many merely hold: "box" before "left".
        shared = [word for word in stem if anywhere[word] >= least]
        return max(shared, key=lambda word: (first[word], word), default=OTHER)

    found = [category(stem) for stem in stems]
    known = sorted(set(found))
    places = {name: place for place, name in enumerate(known)}
    return np.array([places[name] for name in found], dtype=np.int64), known
