"""Labels of splits: class ids of rows, and the encoding of labels in files (ids or names) as class ids 0 … K − 1."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl_train.formatting import printable

SEPARATOR = "|"  # between the labels of one row, in text files
CHUNK = 2**22  # labels are processed in chunks of this many: they may be on disk
MAX_TABLE_ID = 2**27  # ids below this are marked in a table of one byte each; larger ones are sorted


@dataclass(frozen=True)
class Labels:
    """Class ids of n rows."""

    ids: np.ndarray  # [n] int64 for one label each; [m] for all labels of all rows in turn. May be memory-mapped
    offsets: np.ndarray | None = None  # [n + 1], row i has ids[offsets[i] : offsets[i + 1]]; None for one label each

    @property
    def multi(self) -> bool:
        """Whether rows have any number of labels."""
        return self.offsets is not None

    def __len__(self) -> int:
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    def take(self, rows: np.ndarray) -> Tensor | LabelLists:
        """Return the targets of some rows as heads take them: ids [b], or lists of ids."""
        if self.offsets is None:
            return torch.from_numpy(np.asarray(self.ids[rows], dtype=np.int64))
        starts, stops = self.offsets[rows], self.offsets[np.asarray(rows) + 1]
        counts = stops - starts
        examples = np.repeat(np.arange(len(rows)), counts)
        # Indices of the entries: each row's start, counted up.
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        classes = np.asarray(self.ids[np.repeat(starts, counts) + within], dtype=np.int64)
        return LabelLists(torch.from_numpy(examples), torch.from_numpy(classes), None, len(rows))

    def labelled(self) -> np.ndarray:
        """Return the rows [m] that have a label, or any number of them."""
        return np.arange(len(self)) if self.multi else np.flatnonzero(np.asarray(self.ids) != IGNORE_INDEX)

    def entries(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels of some rows: indices into `rows` [m] and classes [m]; unlabelled rows have none."""
        targets = self.take(rows)
        if isinstance(targets, LabelLists):
            return targets.examples.numpy(), targets.classes.numpy()
        labelled = np.flatnonzero(targets.numpy() >= 0)
        return labelled, targets.numpy()[labelled]

    def counts(self, num_classes: int) -> np.ndarray:
        """Count the rows of each class, [K]; rows without a label (−100) count for none."""
        total = np.zeros(num_classes, dtype=np.int64)
        for start in range(0, len(self.ids), CHUNK):
            chunk = np.asarray(self.ids[start : start + CHUNK])
            total += np.bincount(chunk[chunk >= 0], minlength=num_classes)
        return total

    def subset(self, rows: np.ndarray) -> "Labels":
        """Return the labels of some rows, as labels of their own."""
        if self.offsets is None:
            return Labels(np.asarray(self.ids[rows], dtype=np.int64))
        lists = self.take(rows)
        assert isinstance(lists, LabelLists)
        counts = self.offsets[np.asarray(rows) + 1] - self.offsets[rows]
        return Labels(lists.classes.numpy(), np.concatenate(([0], np.cumsum(counts))))


@dataclass(frozen=True)
class RawLabels:
    """The labels of n rows as stored in a file: ids, or indices into `names`."""

    values: np.ndarray  # integers [n] for one label each, [m] for all labels of all rows in turn. May be memory-mapped
    source: str  # the file, for errors
    names: Sequence[str] | None = None  # the names that the values index; None if the values are ids as stored
    offsets: np.ndarray | None = None  # [n + 1], row i has values[offsets[i] : offsets[i + 1]]; None for one label each

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def subset(self, rows: np.ndarray) -> "RawLabels":
        """Return the labels of some rows, as labels of their own."""
        labels = Labels(self.values, self.offsets).subset(rows)
        return replace(self, values=labels.ids, offsets=labels.offsets)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the values front to back as int64: where each chunk starts, and the chunk."""
        for start in range(0, len(self.values), CHUNK):
            yield start, np.asarray(self.values[start : start + CHUNK]).astype(np.int64)


def some(names: Iterable[str], most: int = 5) -> str:
    """Return the first few names for a message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(repr(printable(name)) for name in names[:most]) + more


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort class names: by number if all are whole numbers, else alphabetically."""
    names = list(names)
    if all(_is_id(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def match_classes(
    raw: Mapping[str, RawLabels], class_names: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> tuple[list[str], dict[str, Labels]]:
    """Return the K class names, and the labels of every split as class ids.

    Names are sorted by `sort_names`. Ids 0 … K − 1 do not change; other ids are first converted to names ("17"). If
    class names are given, numeric labels in text files are read as names if all of them, in all splits, are class
    names, and as ids otherwise. The class names are those of the data, in the order of its ids; `classes` are those of
    a trained run, to which the data is mapped.
    """
    for argument, names in (("class_names", class_names), ("classes", classes)):
        if names is not None:
            _check_names(argument, names)
    multi = any(labels.offsets is not None for labels in raw.values())
    distinct = {split: _distinct(labels) for split, labels in raw.items()}
    if class_names is None and classes is None and all(labels.names is None for labels in raw.values()):
        # Ids alone: in numpy, since there may be millions of distinct ones.
        every = _sorted_unique(np.concatenate(list(distinct.values())))
        encoded = {
            split: _encode(raw[split], values, np.searchsorted(every, values), multi, len(every))
            for split, values in distinct.items()
        }
        return list(map(str, every.tolist())), encoded
    # Ids of data without names index the run's classes, unless these are ids themselves.
    known = class_names
    if known is None and classes is not None and not any(_is_id(name) for name in classes):
        known = classes
    as_ids = () if known is None else _splits_of_ids(raw, distinct, known)
    named = {split: _names_of_values(labels, distinct[split], known, split in as_ids) for split, labels in raw.items()}
    target = classes if classes is not None else class_names
    if target is None:
        target = sort_names({name for names in named.values() for name in names})
    index = {name: number for number, name in enumerate(target)}
    encoded = {}
    for split, names in named.items():
        unknown = [name for name in names if name not in index]
        if unknown:
            raise ValueError(
                f"{raw[split].source} has labels that are not among the {len(index):,} classes: {some(unknown)}; "
                "correct them or leave their rows out"
            )
        ids = np.fromiter((index[name] for name in names), dtype=np.int64, count=len(names))
        encoded[split] = _encode(raw[split], distinct[split], ids, multi, len(index))
    return list(target), encoded


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _check_names(argument: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        repeated = [name for name in names if name in seen or seen.add(name)]
        raise ValueError(f"{argument} must be distinct, found more than once: {some(repeated)}")
    if not names:
        raise ValueError(f"{argument} must name at least one class, found none")


def _splits_of_ids(raw: Mapping[str, RawLabels], distinct: Mapping[str, np.ndarray], known: Sequence[str]) -> set[str]:
    """Return the splits whose names are ids, since text files store numbers as text.

    All splits are considered, because one may lack the label that distinguishes ids from numeric names.
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
    # If another split has plain names, or a number exceeds the last id, the numbers are names.
    ambiguous = len(numeric) == len(texts) and all(int(name) < len(known) for name in numbers)
    differ = sorted(name for name in numbers if known[int(name)] != name) if ambiguous else []
    if differ:
        name, sources = differ[0], dict.fromkeys(raw[split].source for split in texts)
        raise ValueError(
            f"{' and '.join(sources)}: the label {name!r} may be the class of that name, or the class id {name}, which "
            f"is {known[int(name)]!r}; save ids as whole numbers in a .npy file, or, if they are names, give no "
            "class_names or only names that are not numbers"
        )
    return set()


def _names_of_values(labels: RawLabels, values: np.ndarray, known: Sequence[str] | None, as_ids: bool) -> list[str]:
    """Return the name of each distinct value of a split."""
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
            f"{labels.source} has the class id {max(numbers)}, but names are given for {len(known)} classes, ids 0 to "
            f"{len(known) - 1}"
        )
    return [known[number] for number in numbers]


def _distinct(labels: RawLabels) -> np.ndarray:
    """Return the distinct values in ascending order."""
    largest = -1
    for start, chunk in labels.chunks():
        if chunk.min() < 0:
            first = int((chunk < 0).argmax())
            raise ValueError(
                f"{labels.source} has the label {chunk[first]} at index {start + first:,} (counted from 0); class ids "
                "must not be negative: leave rows without a label out"
            )
        largest = max(largest, int(chunk.max()))
    if largest < MAX_TABLE_ID:
        seen = np.zeros(largest + 1, dtype=bool)
        for _, chunk in labels.chunks():
            seen[chunk] = True
        return np.flatnonzero(seen)
    values = np.empty(0, dtype=np.int64)
    for _, chunk in labels.chunks():
        values = _sorted_unique(np.concatenate((values, _sorted_unique(chunk))))
    return values


def _sorted_unique(values: np.ndarray) -> np.ndarray:
    """Compute np.unique by sorting: several times faster than its hash for many values."""
    values = np.sort(values)
    return values[np.concatenate(([True], values[1:] != values[:-1]))] if len(values) else values


def _encode(labels: RawLabels, values: np.ndarray, ids: np.ndarray, multi: bool, num_classes: int) -> Labels:
    """Replace each of the distinct values by its class id."""
    if np.array_equal(values, ids) and labels.values.dtype == np.int64:
        encoded = labels.values  # may stay on disk
    else:
        encoded = np.empty(len(labels.values), dtype=np.int64)
        for start, chunk in labels.chunks():
            encoded[start : start + CHUNK] = ids[np.searchsorted(values, chunk)]
    if not multi:
        return Labels(encoded)
    if labels.offsets is None:
        return Labels(encoded, np.arange(len(encoded) + 1))
    offsets = np.asarray(labels.offsets, dtype=np.int64)
    # Drop classes that a row repeats; all rows are then sorted.
    keys = np.repeat(np.arange(len(labels)), np.diff(offsets)) * num_classes + encoded
    unique = _sorted_unique(keys)
    if len(unique) == len(keys):
        return Labels(encoded, offsets)
    rows, classes = np.divmod(unique, num_classes)
    return Labels(classes, np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(labels))))))


class LabelBuilder:
    """Collect labels row by row, as a number for each; a separator, if any, splits texts into stripped labels."""

    def __init__(self, source: str, separator: str | None = None) -> None:
        self.source, self.separator = source, separator
        self._index: dict[str, int] = {}
        self._values, self._counts = array("q"), array("q")  # eight bytes each, where lists would hold objects
        self._lists = False

    def add(self, label: object) -> None:
        """Add the next row's label: a name, an id or a list of them."""
        if isinstance(label, str) and self.separator is not None:
            parts = label.split(self.separator)
            self._lists |= len(parts) > 1
            # Strip even a single label: "cat", and what follows the comma of "1.png, cat", are the same class.
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
        """Return the labels of all rows so far; lists if any row had one."""
        raw = RawLabels(np.array(self._values, dtype=np.int64), self.source, list(self._index))
        counts = np.array(self._counts, dtype=np.int64)
        if self._lists:
            return replace(raw, offsets=np.concatenate(([0], np.cumsum(counts))))
        if (counts == 0).any():
            row = int((counts == 0).argmax())
            raise ValueError(f"{self.source} has no label in row {row + 1} (counted from 1); give one or leave it out")
        return raw
