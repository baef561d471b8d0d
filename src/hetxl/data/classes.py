"""From labels as files have them, ids or names, to class ids 0 … K − 1."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetxl.data.labels import Labels

CHUNK = 2**22
"""Labels are gone through in pieces of this many: they may be on disk."""

TABLE = 2**27
"""Ids below this are counted in a table of one byte for each; larger ones are sorted."""


@dataclass(frozen=True)
class RawLabels:
    """The labels of n rows as a file has them.

    Attributes:
        values: [n] integers for one label each, [m] for all labels of all rows in turn: ids as given, or places in
            `names`. May be memory-mapped.
        source: the file, for errors.
        names: what the values stand for; None where they are ids as given.
        offsets: [n + 1], row i has values[offsets[i] : offsets[i + 1]]; None for one label each.
    """

    values: np.ndarray
    source: str
    names: Sequence[str] | None = None
    offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def subset(self, rows: np.ndarray) -> "RawLabels":
        """The labels of some rows as labels of their own."""
        found = Labels(self.values, self.offsets).subset(rows)
        return replace(self, values=found.ids, offsets=found.offsets)


def printable(text: str) -> str:
    """A name or path that is safe in a message: on one line, without control characters or broken encodings."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode("ascii")
        for letter in text
    )


def some(names: Iterable[str], most: int = 5) -> str:
    """The first few names for a message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(repr(printable(name)) for name in names[:most]) + more


def sort_names(names: Iterable[str]) -> list[str]:
    """Class names in order: by number if all are whole numbers, else by their letters."""
    names = list(names)
    if all(_is_id(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def match_classes(
    raw: Mapping[str, RawLabels], class_names: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> tuple[list[str], dict[str, Labels]]:
    """Class names, and the labels of every split as ids of them.

    Names are put in order by `sort_names`. Ids 0 … K − 1 stay as they are; other ids become names ("17") first. Numbers
    in text files beside class names are names where those of all splits are among these, and ids otherwise.

    Args:
        raw: the labels of each split.
        class_names: names that come with the data, in the order of its ids.
        classes: class names of a trained run, which the data is mapped to.

    Returns:
        The K class names, and labels by split.
    """
    for argument, given in (("class_names", class_names), ("classes", classes)):
        if given is not None:
            _check_names(argument, given)
    multi = any(labels.offsets is not None for labels in raw.values())
    if class_names is None and classes is None and all(labels.names is None for labels in raw.values()):
        return _match_ids(raw, multi)
    # Ids of data without names are places in the run's classes, unless these are ids themselves.
    known = class_names
    if known is None and classes is not None and not any(_is_id(name) for name in classes):
        known = classes
    distinct = {split: _distinct(labels) for split, labels in raw.items()}
    as_ids = () if known is None else _read_as_ids(raw, distinct, known)
    named = {
        split: (distinct[split], _name_values(labels, distinct[split], known, split in as_ids))
        for split, labels in raw.items()
    }
    target = classes if classes is not None else class_names
    if target is None:
        target = sort_names({name for _, names in named.values() for name in names})
    index = {name: number for number, name in enumerate(target)}
    out = {}
    for split, (values, names) in named.items():
        unknown = [name for name in names if name not in index]
        if unknown:
            raise ValueError(
                f"{raw[split].source} has labels that are none of the {len(index):,} classes: {some(unknown)}; "
                "correct them or leave their rows out"
            )
        ids = np.fromiter((index[name] for name in names), dtype=np.int64, count=len(names))
        out[split] = _apply(raw[split], values, ids, multi, len(index))
    return list(target), out


def _match_ids(raw: Mapping[str, RawLabels], multi: bool) -> tuple[list[str], dict[str, Labels]]:
    """Ids alone: in numpy, since there may be millions of different ones."""
    values = {split: _distinct(labels) for split, labels in raw.items()}
    every = _sorted_once(np.concatenate(list(values.values())))
    labels = {
        split: _apply(raw[split], found, np.searchsorted(every, found), multi, len(every))
        for split, found in values.items()
    }
    return list(map(str, every.tolist())), labels


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _check_names(argument: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = [name for name in names if name in seen or seen.add(name)]
        raise ValueError(f"{argument} must differ from each other, found more than once: {some(twice)}")
    if not names:
        raise ValueError(f"{argument} must name at least one class, found none")


def _read_as_ids(raw: Mapping[str, RawLabels], distinct: Mapping[str, np.ndarray], known: Sequence[str]) -> set[str]:
    """The splits whose names are ids after all: a text file has no numbers but in letters.

    One split may lack the very label that tells ids from names that are numbers, so all of them decide.
    """
    texts = {
        split: {labels.names[int(value)] for value in distinct[split]}
        for split, labels in raw.items()
        if labels.names is not None
    }
    numeric = {split for split, names in texts.items() if all(map(_is_id, names))}
    numbers = set().union(*(texts[split] for split in numeric))
    if not numbers <= set(known):
        return numeric
    # With plain names in another split, or beyond the last id, they are names.
    either = len(numeric) == len(texts) and all(int(name) < len(known) for name in numbers)
    differ = sorted(name for name in numbers if known[int(name)] != name) if either else []
    if differ:
        name, sources = differ[0], dict.fromkeys(raw[split].source for split in texts)
        raise ValueError(
            f"{' and '.join(sources)}: the label {name!r} may be the class of that name, or the class id {name}, which "
            f"is {known[int(name)]!r}; save ids as whole numbers in a .npy file, or, if they are names, give no "
            "class_names or such as are no numbers"
        )
    return set()


def _name_values(labels: RawLabels, values: np.ndarray, known: Sequence[str] | None, as_ids: bool) -> list[str]:
    """What each of the different values of a split is called."""
    numbers: list[int] = values.tolist()
    if labels.names is not None:
        names = [labels.names[value] for value in numbers]
        if not as_ids:
            return names
        numbers = [int(name) for name in names]
    if known is None:
        return [str(number) for number in numbers]
    if numbers and max(numbers) >= len(known):
        raise ValueError(
            f"{labels.source} has the class id {max(numbers)}, and there are names for {len(known)} classes, ids 0 to "
            f"{len(known) - 1}"
        )
    return [known[number] for number in numbers]


def _distinct(labels: RawLabels) -> np.ndarray:
    """The different values in ascending order."""
    largest = -1
    for start in range(0, len(labels.values), CHUNK):
        piece = _piece(labels, start)
        if piece.min() < 0:
            place = int((piece < 0).argmax())
            raise ValueError(
                f"{labels.source} has the label {piece[place]} in place {start + place:,} (counted from 0); class ids "
                "must not be negative: leave rows without a label out"
            )
        largest = max(largest, int(piece.max()))
    if largest < TABLE:
        seen = np.zeros(largest + 1, dtype=bool)
        for start in range(0, len(labels.values), CHUNK):
            seen[_piece(labels, start)] = True
        return np.flatnonzero(seen)
    found = np.empty(0, dtype=np.int64)
    for start in range(0, len(labels.values), CHUNK):
        found = _sorted_once(np.concatenate((found, _sorted_once(_piece(labels, start)))))
    return found


def _piece(labels: RawLabels, start: int) -> np.ndarray:
    return np.asarray(labels.values[start : start + CHUNK]).astype(np.int64)


def _sorted_once(values: np.ndarray) -> np.ndarray:
    """np.unique by sorting: several times faster than its hash for many values."""
    values = np.sort(values)
    return values[np.concatenate(([True], values[1:] != values[:-1]))] if len(values) else values


def _apply(labels: RawLabels, values: np.ndarray, ids: np.ndarray, multi: bool, num_classes: int) -> Labels:
    if np.array_equal(values, ids) and labels.values.dtype == np.int64:
        mapped = labels.values  # may stay on disk
    else:
        mapped = np.empty(len(labels.values), dtype=np.int64)
        for start in range(0, len(mapped), CHUNK):
            mapped[start : start + CHUNK] = ids[np.searchsorted(values, _piece(labels, start))]
    if not multi:
        return Labels(mapped)
    if labels.offsets is None:
        return Labels(mapped, np.arange(len(mapped) + 1))
    return _each_once(Labels(mapped, np.asarray(labels.offsets, dtype=np.int64)), num_classes)


def _each_once(labels: Labels, num_classes: int) -> Labels:
    """Without the classes that a row lists again, in ascending order within each row where one did."""
    assert labels.offsets is not None
    counts = np.diff(labels.offsets)
    keys = np.repeat(np.arange(len(labels)), counts) * num_classes + labels.ids
    unique = _sorted_once(keys)
    if len(unique) == len(keys):
        return labels
    rows, ids = np.divmod(unique, num_classes)
    return Labels(ids, np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(labels))))))


class LabelBuilder:
    """Takes labels one row at a time, and keeps a number for each.

    Args:
        source: the file, for errors.
        separator: parts a text into several labels, without the spaces around them; None for texts that are one label
            whatever they hold.
    """

    def __init__(self, source: str, separator: str | None = None) -> None:
        self.source, self.separator = source, separator
        self._index: dict[str, int] = {}
        self._values, self._counts = array("q"), array("q")  # eight bytes each, where lists would hold objects
        self._lists = False

    def add(self, label: object) -> None:
        """The next row's label: a name, an id or a list of them."""
        if isinstance(label, str) and self.separator is not None:
            parts = label.split(self.separator)
            self._lists |= len(parts) > 1
            # Stripped even where it is one: "cat", and what follows the comma of "1.png, cat", are the same class.
            label = [part for part in map(str.strip, parts) if part]
        elif label is None or label == "":
            label = ()
        elif isinstance(label, list | tuple):
            self._lists = True
        else:
            label = (label,)
        self._counts.append(len(label))
        self._values.extend(self._number(name) for name in label)

    def _number(self, name: object) -> int:
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise TypeError(
                f"{self.source} has the label {name!r} ({type(name).__name__}) in row {len(self._counts)} (counted "
                "from 1); labels are names or whole numbers"
            )
        return self._index.setdefault(str(name), len(self._index))

    def build(self) -> RawLabels:
        """The labels of all rows so far; lists if any row had one."""
        raw = RawLabels(np.array(self._values, dtype=np.int64), self.source, list(self._index))
        counts = np.array(self._counts, dtype=np.int64)
        if self._lists:
            return replace(raw, offsets=np.concatenate(([0], np.cumsum(counts))))
        if (counts == 0).any():
            row = int((counts == 0).argmax())
            raise ValueError(f"{self.source} has no label in row {row + 1} (counted from 1); give one or leave it out")
        return raw
