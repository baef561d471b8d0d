"""Pictures in folders and manifests.

| data | what it holds |
| --- | --- |
| a folder | `ROOT/CLASS/….jpg`, at any depth below the class |
| a folder with splits | `ROOT/train/CLASS/…`, `ROOT/validation/…` (or `val`, `valid`, `dev`), `ROOT/test/…` |
| a manifest, `.csv`, `.jsonl` or `.parquet` | columns `path` (or `image`, `file`, `filename`), `label` (or `labels`, |
| | `class`, `target`) and, where rows have one, `split`; paths are relative to the manifest |

In CSV the labels of a row are parted by `|`. Hidden files, files that are no pictures, and links that lead back to a
folder above are left out; how many is in the dataset's notes.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from hetxl.data.assembly import SPLIT_NAMES, UNSPLIT, Plan, assemble, split_name
from hetxl.data.classes import LabelBuilder, RawLabels, printable, some
from hetxl.data.dataset import Dataset, InputSpec
from hetxl.data.images import IMAGE_SUFFIXES, MEAN, STD, ImageSplit, Paths, require_pillow
from hetxl.data.progress import counted, progress_bar
from hetxl.data.tables import LABEL_COLUMNS, SEPARATOR, SPLIT_COLUMNS, find_column, table_columns, table_rows

PATH_COLUMNS = ("path", "image", "file", "filename", "file_name")
LOOKED_AT = 100
"""How many files of a manifest are looked for when it is opened."""

PartsOfImages = dict[str, tuple[Paths, RawLabels]]


def load_images(
    path: Path,
    plan: Plan | None = None,
    *,
    validation: Path | None = None,
    test: Path | None = None,
    image_size: int = 224,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    grey: bool = False,
) -> Dataset:
    """A dataset of pictures from a folder or a manifest; their forms are those of this module.

    Args:
        path: of the folder or manifest.
        plan: how to put it together.
        validation: another folder or manifest with the validation rows.
        test: another folder or manifest with the test rows.
        image_size: height and width that a backbone gets.
        mean: of red, green and blue, taken off.
        std: of red, green and blue, divided by.
        grey: whether colours are left out, as a model of grey pictures needs it.
    """
    require_pillow()
    parts, notes = _read(path)
    for split, other in (("validation", validation), ("test", test)):
        if other is None:
            continue
        if split in parts:
            raise ValueError(f"{split}={other} was given, and {path} has {split} rows of its own; give one of them")
        added, more = _read(other)
        chosen = added.get(split, added.get(UNSPLIT))
        if chosen is None:
            raise ValueError(f"{other} holds {some(added)} rows, and none for {split}")
        parts[split] = chosen
        notes += more
    make = partial(ImageSplit, size=image_size, mean=mean, std=std, grey=grey)
    input = InputSpec("image", (1 if grey else 3, image_size, image_size))
    return assemble(printable(path.stem), input, parts, make, plan or Plan(), notes=notes)


def find_images(path: Path) -> Paths:
    """All pictures of a folder at any depth, of a manifest in its order, or the one that a file is."""
    if path.is_dir():
        found = Paths(_walk(path, Counter()))
        if not len(found):
            raise ValueError(f"{path} has no pictures; looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
        return found
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return Paths([os.fspath(path)])
    columns = table_columns(path)
    column = _path_column(path, columns)
    paths = Paths(_absolute(path, row[0], number) for number, row in enumerate(table_rows(path, [column]), 1))
    _check_some(path, paths)
    return paths


def _read(path: Path) -> tuple[PartsOfImages, list[str]]:
    return read_folder(path) if path.is_dir() else (read_manifest(path), [])


def read_folder(root: Path) -> tuple[PartsOfImages, list[str]]:
    """The pictures and labels of a folder by split, and notes on what was left out."""
    left_out: Counter[str] = Counter()
    folders = [entry for entry in _entries(root, Counter()) if os.path.isdir(entry)]
    by_split = _split_folders(folders)
    names = set(by_split.values())
    if by_split:
        left_out["folders that are no split"] += sum(entry.name not in names for entry in folders)
    parts, empty = {}, []
    with progress_bar(f"Reading {root}", None) as advance:
        for split, folder in (by_split or {UNSPLIT: ""}).items():
            paths, labels = [], LabelBuilder(os.fspath(root / folder))
            for entry in _entries(root / folder, left_out):
                if not os.path.isdir(entry):
                    left_out["files outside class folders"] += 1
                    continue
                found = list(_walk(Path(entry.path), left_out))
                if not found:
                    empty.append(os.path.relpath(entry.path, root))
                for path in found:
                    paths.append(path)
                    labels.add(_class_name(entry.name))
                advance(len(found))
            if paths:
                parts[split] = (Paths(paths), labels.build())
    if not parts:
        raise ValueError(
            f"{root} has no pictures: looked for {root}/CLASS/… and {root}/train/CLASS/… with files that end in "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    notes = [f"left out {what}: {count:,}" for what, count in sorted(left_out.items()) if count]
    if empty:
        notes.append(f"class folders without pictures: {len(empty):,} ({some(empty)})")
    return parts, notes


def _split_folders(folders: Sequence["os.DirEntry[str]"]) -> dict[str, str]:
    """The folder of each split; none where the folders are classes.

    A class may be called "train" or "test": folders are splits only if they hold folders, and "train" is one of them or
    all are.
    """
    named = {entry.name: SPLIT_NAMES[entry.name.lower()] for entry in folders if entry.name.lower() in SPLIT_NAMES}
    holding = {entry.name for entry in folders if entry.name in named and _holds_folders(entry.path)}
    named = {name: split for name, split in named.items() if name in holding}
    if "train" not in named.values() and len(named) < len(folders):
        return {}
    by_split: dict[str, str] = {}
    for name, split in named.items():
        if split in by_split:
            raise ValueError(f"folders {by_split[split]!r} and {name!r} both are the {split} split; rename one")
        by_split[split] = name
    return by_split


def _holds_folders(path: str) -> bool:
    with os.scandir(path) as entries:
        return any(os.path.isdir(entry) and not entry.name.startswith(".") for entry in entries)


def _entries(folder: Path, left_out: Counter[str]) -> list["os.DirEntry[str]"]:
    """What a folder holds, sorted by name, without hidden files."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    shown = [entry for entry in found if not entry.name.startswith(".")]
    left_out["hidden files"] += len(found) - len(shown)
    return shown


def _walk(folder: Path, left_out: Counter[str], above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """The pictures of a folder at any depth. `above`: the folders that lead here, to see when a link leads back."""
    state = os.stat(folder)
    here = (state.st_dev, state.st_ino)
    if here in above:
        left_out["links that lead back to a folder above"] += 1
        return
    for entry in _entries(folder, left_out):
        if os.path.isdir(entry):  # unlike the entry's own method, without an error for a link to itself
            yield from _walk(Path(entry.path), left_out, (*above, here))
        elif not os.path.isfile(entry):
            left_out["links to nothing and special files"] += 1
        elif os.path.splitext(entry.name)[1].lower() not in IMAGE_SUFFIXES:
            left_out["files that are no pictures"] += 1
        else:
            yield entry.path


def _class_name(folder: str) -> str:
    """A folder's name; bytes that are no text are written out, since a report could not hold them."""
    return folder.encode("utf-8", "backslashreplace").decode()


def read_manifest(path: Path) -> PartsOfImages:
    """The pictures and labels of a table by split."""
    columns = table_columns(path)
    column = _path_column(path, columns)
    label, split = find_column(columns, LABEL_COLUMNS), find_column(columns, SPLIT_COLUMNS)
    if label is None:
        raise ValueError(f"{path} must have a column {' or '.join(LABEL_COLUMNS)}, found {some(columns, 20)}")
    separator = SEPARATOR if path.suffix.lower() == ".csv" else None
    wanted = [column, label, *([split] if split is not None else [])]
    paths: dict[str, list[str]] = {}
    labels: dict[str, LabelBuilder] = {}
    with closing(counted(table_rows(path, wanted), f"Reading {path}")) as rows:
        for number, (file, value, *rest) in enumerate(rows, 1):
            key = split_name(path, rest[0], number) if rest else UNSPLIT
            if key not in paths:
                paths[key], labels[key] = [], LabelBuilder(str(path), separator)
            paths[key].append(_absolute(path, file, number))
            labels[key].add(value)
    if not paths:
        raise ValueError(f"{path} has no rows")
    parts = {key: (Paths(found), labels[key].build()) for key, found in paths.items()}
    for found, _ in parts.values():
        _check_some(path, found)
    return parts


def _path_column(path: Path, columns: Sequence[str]) -> str:
    column = find_column(columns, PATH_COLUMNS)
    if column is None:
        raise ValueError(f"{path} must have a column {' or '.join(PATH_COLUMNS)}, found {some(columns, 20) or 'none'}")
    return column


def _absolute(manifest: Path, file: Any, number: int) -> str:
    if not isinstance(file, str) or not file or "\0" in file:
        raise ValueError(f"{manifest}, row {number} (counted from 1) must have a path, found {file!r}")
    return os.path.join(manifest.parent, file)


def _check_some(manifest: Path, paths: Paths) -> None:
    """Refuse a manifest whose first files are all missing: single ones are reported when they are read."""
    first = [paths[place] for place in range(min(len(paths), LOOKED_AT))]
    if first and not any(os.path.isfile(path) for path in first):
        raise FileNotFoundError(
            f"{manifest} names files that do not exist, first {printable(first[0])}; paths are relative to the manifest"
        )
