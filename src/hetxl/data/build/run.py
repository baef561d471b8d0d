"""Build a dataset by its name, as `hetxl data build` does."""

import contextlib
import difflib
from pathlib import Path
from typing import NamedTuple

from hetxl.data.build.registry import BUILDERS, defaults
from hetxl.data.build.store import Damaged, watched
from hetxl.data.dataset import Dataset
from hetxl.data.open import check_options, open_dataset
from hetxl.data.spec import split_spec


class Outcome(NamedTuple):
    """What there is after a build.

    Attributes:
        folder: of the files.
        made: whether they were made by this call, and not there already.
        size: of all files, in bytes.
        dataset: as it is opened by that name.
    """

    folder: Path
    made: bool
    size: int
    dataset: Dataset

    def lines(self) -> list[str]:
        """For a reader: where it is, rows and classes, and the notes, with sources and licences."""
        name = self.dataset.name
        where = f"{self.folder} ({self.size / 1e6:,.1f} MB)"
        rows = ", ".join(f"{len(split):,} {part}" for part, split in self.dataset.splits.items())
        return [
            f"{name}: built in {where}" if self.made else f"{name} is there already: {where}",
            f"rows: {rows}; {self.dataset.num_classes:,} classes",
            *self.dataset.notes,
        ]


def build_dataset(data: str, *, force: bool = False, cache: Path | None = None) -> Outcome:
    """Build a dataset, unless it is there, and open it.

    Args:
        data: its name, with options as in "words:classes=20000".
        force: build it again if it is there.
        cache: folder for it; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """
    name, options = split_spec(data)
    if name not in BUILDERS:
        near = difflib.get_close_matches(name.partition(":")[0], BUILDERS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{data!r} is no dataset that can be built{hint}\n" + "\n".join(names()))
    build, load = BUILDERS[name].builder(), BUILDERS[name].loader()
    check_options(options, [option for option in defaults(load) if option != "cache"], name)
    if options:  # those that are wrong are to be told before a long build, and not after it
        with contextlib.suppress(FileNotFoundError, Damaged):
            open_dataset(name, cache=cache, **options)  # pyright: ignore[reportArgumentType]
    with watched(force) as made:
        folder = build(**{option: value for option, value in options.items() if option in defaults(build)}, cache=cache)
    dataset = open_dataset(name, cache=cache, **options)  # pyright: ignore[reportArgumentType]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Outcome(folder, folder in made, size, dataset)


def names() -> list[str]:
    """A line for each dataset that can be built: its name and what it is."""
    return [f"{name}: {builder.description}" for name, builder in BUILDERS.items()]
