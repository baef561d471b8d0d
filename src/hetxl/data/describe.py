"""What is in a dataset, in numbers: to read before training on it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hetxl.data.classes import printable
from hetxl.data.dataset import Dataset
from hetxl.data.duplicates import Duplicates, find_duplicates
from hetxl.data.labels import Labels


@dataclass(frozen=True)
class Description:
    """Counts of a dataset. Those by class are of the training rows, or of all rows where there are none.

    Attributes:
        name: of the dataset.
        rows: by split.
        classes: K
        input: kind, shape and, for tokens, vocabulary.
        examples_per_class: min, median and max.
        rare: how many classes are "empty", "single" (one example), "under_5" and "under_10" (at least one).
        top_class: its name, and the share of rows that have it.
        frequencies: [upper bound, number of classes with more examples than the last bound and up to this one].
        missing: by split, how many classes have no row there.
        labels_per_row: min, mean and max, and the rows "without" any, for several labels in a row; else None.
        duplicates: equal inputs.
        best_nll: the lowest test loss that any model can reach, where that is known.
        notes: of the dataset.
    """

    name: str
    rows: dict[str, int]
    classes: int
    input: dict[str, Any]
    examples_per_class: dict[str, float]
    rare: dict[str, int]
    top_class: dict[str, Any]
    frequencies: list[list[int]]
    missing: dict[str, int]
    labels_per_row: dict[str, float] | None
    duplicates: Duplicates
    best_nll: float | None
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and texts, for JSON."""
        return {**asdict(self), "notes": list(self.notes)}

    def __rich__(self) -> Group:
        """What `console.print(description)` shows: the table and the plot."""
        return Group(self.table(), Text(self.plot()), Text())

    def table(self) -> Table:
        """For the terminal."""
        table = Table(box=box.SIMPLE, show_header=False, title=Text(printable(self.name)), title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._lines():
            table.add_row(name, Text(printable(value)))  # as text: names may hold what rich takes for markup
        return table

    def plot(self, width: int = 40) -> str:
        """How many classes have how many examples, as bars of ASCII characters.

        Args:
            width: of the longest bar.
        """
        labels = ["examples", *_bin_names(self.frequencies)]
        most = max(count for _, count in self.frequencies)
        pad = max(map(len, labels))
        lines = [f"{'examples':>{pad}}  classes"]
        for label, (_, count) in zip(labels[1:], self.frequencies, strict=True):
            bar = "#" * (max(1, round(width * count / most)) if count else 0)
            lines.append(f"{label:>{pad}}  {bar}{' ' if bar else ''}{count:,}")
        return "\n".join(lines)

    def _lines(self) -> list[tuple[str, str]]:
        shape = " × ".join(map(str, self.input["shape"]))
        vocabulary = f", vocabulary {self.input['vocabulary']:,}" if self.input["vocabulary"] else ""
        per_class, rare = self.examples_per_class, self.rare
        lines = [
            ("rows", ", ".join(f"{split} {count:,}" for split, count in self.rows.items())),
            ("classes", f"{self.classes:,}"),
            ("input", f"{self.input['kind']} {shape}{vocabulary}"),
            (
                "examples per class",
                f"{per_class['min']:,} to {per_class['max']:,}, median {per_class['median']:,g}",
            ),
            (
                "rare classes",
                f"{rare['single']:,} with one example, {rare['under_5']:,} below 5, {rare['under_10']:,} below 10"
                + (f", {rare['empty']:,} with none" if rare["empty"] else ""),
            ),
            ("largest class", f"{self.top_class['name']}, {100 * self.top_class['share']:.3g}% of the rows"),
        ]
        missing = [f"{count:,} not in {split}" for split, count in self.missing.items() if count]
        if missing:
            lines.append(("classes missing", ", ".join(missing)))
        if self.labels_per_row is not None:
            per_row = self.labels_per_row
            lines.append(
                (
                    "labels per row",
                    f"{per_row['min']:,} to {per_row['max']:,}, mean {per_row['mean']:.2f}, {per_row['without']:,} "
                    "rows without",
                )
            )
        lines.append(("duplicates", self._duplicates()))
        if self.best_nll is not None:
            lines.append(("lowest test loss", f"{self.best_nll:.4f}"))
        return lines + [("note", note) for note in self.notes]

    def _duplicates(self) -> str:
        found = [f"{count:,} in {split}" for split, count in self.duplicates.within.items() if count]
        for pair, count in self.duplicates.across.items():
            if count:
                later, earlier = pair.split(" in ")
                found.append(f"{count:,} {later} rows that are also in {earlier}")
        looked_at = sum(self.duplicates.looked_at.values())
        of = "all" if looked_at == sum(self.rows.values()) else f"{looked_at:,}"
        return f"{', '.join(found) or 'none'} ({of} rows looked at)"


def describe(dataset: Dataset) -> Description:
    """Count what is in a dataset; a few seconds, whatever its size, beyond one pass over the labels.

    Args:
        dataset: any.
    """
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
        missing={name: int((found == 0).sum()) for name, found in counts.items()},
        labels_per_row=_labels_per_row([split.labels for split in dataset.splits.values()]),
        duplicates=find_duplicates(dataset.splits, images=dataset.input.kind == "image"),
        best_nll=dataset.best_nll,
        notes=tuple(dataset.notes),
    )


def _frequencies(by_class: np.ndarray) -> list[list[int]]:
    """Bounds 0, 1, 2, 5, 10, 20, 50, … up to the largest class, and the classes of each bin."""
    bounds = [0, 1]
    while bounds[-1] < by_class.max():
        bounds.append([1, 2, 5][(len(bounds) - 1) % 3] * 10 ** ((len(bounds) - 1) // 3))
    numbers = np.bincount(np.searchsorted(bounds, by_class), minlength=len(bounds))
    bins = [[bound, int(number)] for bound, number in zip(bounds, numbers, strict=True)]
    return bins if bins[0][1] else bins[1:]


def _bin_names(frequencies: list[list[int]]) -> list[str]:
    names, low = [], frequencies[0][0]
    for high, _ in frequencies:
        names.append(f"{high:,}" if low >= high else f"{low:,}-{high:,}")
        low = high + 1
    return names


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
