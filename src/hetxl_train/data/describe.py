"""Describe a dataset in numbers: class frequencies and duplicates."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hetxl._seeds import some_rows
from hetxl_train.console import progress_bar
from hetxl_train.data.dataset import Dataset, Split
from hetxl_train.data.labels import Labels, printable

MAX_ROWS, MAX_FILES = 200_000, 2_000  # rows of numbers, or image files, that are searched for duplicates
BLOCK = 4096  # rows that are read at a time
RARE = 10  # labels of both splits together, below which classes are pooled
UNLIKELY, DIFFERENT = 6.0, 0.05
"""Standard deviations, and share of the labels, by which two splits must differ for a note."""


@dataclass(frozen=True)
class Duplicates:
    """Equal inputs among the searched rows; there may be more if not all rows were searched."""

    looked_at: dict[str, int]  # the number of rows searched, by split
    within: dict[str, int]  # by split, rows equal to an earlier row of that split
    across: dict[str, int]  # under "test in train", rows of test that are also in train, and so on


@dataclass(frozen=True)
class Description:
    """Counts of a dataset. Those by class are of the training rows, or of all rows without a training split."""

    name: str
    rows: dict[str, int]
    classes: int
    input: dict[str, Any]  # kind, shape and, for tokens, vocabulary
    examples_per_class: dict[str, float]  # min, median and max
    rare: dict[str, int]  # classes that are "empty", "single" (one example), "under_5", "under_10" (at least one)
    top_class: dict[str, Any]  # its name, and the share of rows that have it
    frequencies: list[list[int]]  # [upper bound, number of classes above the last bound and up to this one]
    missing: dict[str, int]  # by split, the number of classes without a row
    labels_per_row: dict[str, float] | None  # min, mean, max and rows "without" any; None for one label each
    duplicates: Duplicates
    best_nll: float | None  # the lowest test loss that any model can reach, if known
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and texts, for JSON."""
        return {**asdict(self), "notes": list(self.notes)}

    def __rich__(self) -> Group:
        """Return what `console.print(description)` shows: the table and the plot."""
        return Group(self.table(), Text(self.plot()), Text())

    def table(self) -> Table:
        """Return a table for the terminal."""
        table = Table(box=box.SIMPLE, show_header=False, title=Text(printable(self.name)), title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._lines():
            table.add_row(name, Text(printable(value)))  # as text: names may hold what rich takes for markup
        return table

    def plot(self, width: int = 40) -> str:
        """Draw how many classes have how many examples, as bars of ASCII characters; the longest has `width`."""
        lows = [self.frequencies[0][0], *(high + 1 for high, _ in self.frequencies)]
        labels = [f"{b:,}" if a >= b else f"{a:,}-{b:,}" for a, (b, _) in zip(lows, self.frequencies, strict=False)]
        most = max(count for _, count in self.frequencies)
        pad = max(map(len, ["examples", *labels]))
        lines = [f"{'examples':>{pad}}  classes"]
        for label, (_, count) in zip(labels, self.frequencies, strict=True):
            bar = "#" * (max(1, round(width * count / most)) if count else 0)
            lines.append(f"{label:>{pad}}  {bar}{' ' if bar else ''}{count:,}")
        return "\n".join(lines)

    def _lines(self) -> list[tuple[str, str]]:
        shape = " × ".join(map(str, self.input["shape"]))
        vocabulary = f", vocabulary {self.input['vocabulary']:,}" if self.input["vocabulary"] else ""
        per_class, rare, per_row = self.examples_per_class, self.rare, self.labels_per_row
        spread = f"{per_class['min']:,} to {per_class['max']:,}, median {per_class['median']:,g}"
        few = f"{rare['single']:,} with one example, {rare['under_5']:,} below 5, {rare['under_10']:,} below 10"
        empty = f", {rare['empty']:,} with none" if rare["empty"] else ""
        lines = [
            ("rows", ", ".join(f"{split} {count:,}" for split, count in self.rows.items())),
            ("classes", f"{self.classes:,}"),
            ("input", f"{self.input['kind']} {shape}{vocabulary}"),
            ("examples per class", spread),
            ("rare classes", few + empty),
            ("largest class", f"{self.top_class['name']}, {100 * self.top_class['share']:.3g}% of the rows"),
        ]
        missing = [f"{count:,} not in {split}" for split, count in self.missing.items() if count]
        if missing:
            lines.append(("classes missing", ", ".join(missing)))
        if per_row is not None:
            counts = f"{per_row['min']:,} to {per_row['max']:,}, mean {per_row['mean']:.2f}"
            lines.append(("labels per row", f"{counts}, {per_row['without']:,} rows without"))
        lines.append(("duplicates", self._duplicates()))
        if self.best_nll is not None:
            lines.append(("lowest test loss", f"{self.best_nll:.4f}"))
        return lines + [("note", note) for note in self.notes]

    def _duplicates(self) -> str:
        counts = [f"{count:,} in {split}" for split, count in self.duplicates.within.items() if count]
        for pair, count in self.duplicates.across.items():
            if count:
                later, earlier = pair.split(" in ")
                counts.append(f"{count:,} {later} rows that are also in {earlier}")
        looked_at = sum(self.duplicates.looked_at.values())
        of = "all" if looked_at == sum(self.rows.values()) else f"{looked_at:,}"
        return f"{', '.join(counts) or 'none'} ({of} rows looked at)"


def describe(dataset: Dataset) -> Description:
    """Describe a dataset; takes a scan of the labels and a few seconds for any size."""
    if not dataset.splits:
        raise ValueError(f"dataset {dataset.name!r} has no splits to describe")
    counts = {name: split.labels.counts(dataset.num_classes) for name, split in dataset.splits.items()}
    rows = {name: len(split) for name, split in dataset.splits.items()}
    by_class = counts["train"] if "train" in counts else np.sum(list(counts.values()), axis=0)
    seen = rows.get("train", sum(rows.values()))
    top = int(by_class.argmax())
    present = by_class[by_class > 0]
    return Description(
        name=dataset.name,
        rows=rows,
        classes=dataset.num_classes,
        input={**asdict(dataset.input), "shape": list(dataset.input.shape)},
        examples_per_class={
            "min": int(by_class.min()),
            "median": float(np.median(by_class)),
            "max": int(by_class.max()),
        },
        rare={
            "empty": int((by_class == 0).sum()),
            "single": int((present == 1).sum()),
            "under_5": int((present < 5).sum()),
            "under_10": int((present < 10).sum()),
        },
        top_class={"name": dataset.class_names[top], "share": float(by_class[top] / max(1, seen))},
        frequencies=_frequencies(by_class),
        missing={name: int((by_split == 0).sum()) for name, by_split in counts.items()},
        labels_per_row=_labels_per_row([split.labels for split in dataset.splits.values()]),
        duplicates=find_duplicates(dataset.splits, images=dataset.input.kind == "image"),
        best_nll=dataset.best_nll,
        notes=(*dataset.notes, *_label_differences(counts)),
    )


def _label_differences(counts: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield a note for each pair of splits with different labels: by more than `UNLIKELY`, and by `DIFFERENT`.

    The test is Pearson's χ², which has mean and variance f and 2 f for f degrees of freedom; rare classes count as one.
    """
    for first, second in combinations(counts, 2):
        pair = np.stack([counts[first], counts[second]]).astype(float)  # [2, K]
        if not pair.sum(1).all():
            continue
        rare = pair.sum(0) < RARE
        pair = np.concatenate([pair[:, ~rare], pair[:, rare].sum(1, keepdims=True)], 1)
        pair = pair[:, pair.sum(0) > 0]
        expected = pair.sum(1, keepdims=True) * pair.sum(0) / pair.sum()
        freedom = max(1, pair.shape[1] - 1)
        excess = (((pair - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)
        share = np.abs(np.subtract(*(pair / pair.sum(1, keepdims=True)))).sum() / 2
        if excess > UNLIKELY and share > DIFFERENT:
            yield (
                f"the label distributions of {second} and {first} differ: {share:.0%} of the labels would have to "
                "change; metrics on the two splits are not comparable"
            )


def _frequencies(by_class: np.ndarray) -> list[list[int]]:
    """Count the classes in bins with the bounds 0, 1, 2, 5, 10, 20, 50, … up to the largest class."""
    bounds = [0, 1]
    while bounds[-1] < by_class.max():
        bounds.append([1, 2, 5][(len(bounds) - 1) % 3] * 10 ** ((len(bounds) - 1) // 3))
    numbers = np.bincount(np.searchsorted(bounds, by_class), minlength=len(bounds))
    bins = [[bound, int(number)] for bound, number in zip(bounds, numbers, strict=True)]
    return bins if bins[0][1] else bins[1:]


def _labels_per_row(labels: Sequence[Labels]) -> dict[str, float] | None:
    if not any(part.multi for part in labels):
        return None
    counts = np.concatenate([np.diff(part.offsets) for part in labels if part.offsets is not None])
    return {
        "min": int(counts.min()),
        "mean": float(counts.mean()),
        "max": int(counts.max()),
        "without": int((counts == 0).sum()),
    }


def find_duplicates(splits: Mapping[str, Split], *, images: bool, limit: int | None = None) -> Duplicates:
    """Find equal inputs by their hashes.

    Of images the files, if any, are compared, not the decoded pixels. At most `limit` rows of all splits together are
    searched, by default `MAX_ROWS`, or `MAX_FILES` for images.
    """
    # Images without files are compared as they are read.
    images = images and all(split.show(0).image is not None for split in splits.values() if len(split))
    samples = _sample(splits, (MAX_FILES if images else MAX_ROWS) if limit is None else limit)
    with progress_bar("Searching for duplicates", sum(map(len, samples.values()))) as advance:
        if images:
            keys = _file_keys({name: [splits[name].show(row).image for row in rows] for name, rows in samples.items()})
        else:
            keys = {name: _input_keys(splits[name], rows, advance) for name, rows in samples.items()}
    across = {
        f"{later} in {earlier}": int(np.isin(keys[later], keys[earlier]).sum())
        for earlier, later in combinations(keys, 2)
    }
    within = {name: len(hashes) - len(np.unique(hashes)) for name, hashes in keys.items()}
    return Duplicates({name: len(rows) for name, rows in samples.items()}, within, across)


def _sample(splits: Mapping[str, Split], limit: int) -> dict[str, np.ndarray]:
    """Choose the rows to search: all, or if they are too many, all of the small splits and some of the others."""
    chosen, left = {}, limit
    for number, (name, split) in enumerate(sorted(splits.items(), key=lambda item: len(item[1]))):
        size = min(len(split), left // (len(splits) - number))
        left -= size
        chosen[name] = some_rows(np.arange(len(split)), size)
    return {name: chosen[name] for name in splits}


def _input_keys(split: Split, rows: np.ndarray, advance: Callable[[int], None]) -> np.ndarray:
    """Hash inputs: [b] uint64, equal for equal inputs."""
    digests = []
    for start in range(0, len(rows), BLOCK):
        inputs = np.ascontiguousarray(split.fetch(rows[start : start + BLOCK]).inputs.numpy())
        texts = inputs.dtype.kind == "i"  # the −1 behind the end of a text depend on the others of its block
        digests.extend(blake2b(row[row >= 0] if texts else row, digest_size=8).digest() for row in inputs)
        advance(len(inputs))
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _file_keys(paths: Mapping[str, Sequence[str | None]]) -> dict[str, np.ndarray]:
    """Hash files, [b] uint64 by split. Only files that share their size with another are read."""
    known = {path for files in paths.values() for path in files if path is not None}
    sizes = {path: os.path.getsize(path) if os.path.exists(path) else None for path in known}
    common = Counter(sizes.values())

    def key(path: str | None) -> bytes:
        if path is None or sizes[path] is None:
            text = os.fsencode(f"unreadable {path}")
        elif common[sizes[path]] == 1:
            text = f"size {sizes[path]}".encode()
        else:
            try:
                return blake2b(Path(path).read_bytes(), digest_size=8).digest()
            except OSError:
                text = os.fsencode(path)
        return blake2b(text, digest_size=8, person=b"name").digest()

    return {name: np.frombuffer(b"".join(map(key, files)), dtype=np.uint64) for name, files in paths.items()}
