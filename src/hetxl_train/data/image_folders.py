"""Directories of images: one directory for each class, hidden files and links that lead back left out."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetxl_train.console import progress_bar
from hetxl_train.data.build_dataset import SPLIT_NAMES, UNSPLIT
from hetxl_train.data.image_files import IMAGE_SUFFIXES, Paths
from hetxl_train.data.labels import LabelBuilder, RawLabels, some

ImageParts = dict[str, tuple[Paths, RawLabels]]  # images and their labels by split


def list_images(directory: Path) -> Paths:
    """Return all images of a directory at any depth."""
    images = Paths(_walk(directory, Counter()))
    if not len(images):
        raise ValueError(f"{directory} has no images; looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
    return images


def read_directory(root: Path) -> tuple[ImageParts, list[str]]:
    """Read the images and labels of a directory by split, and notes on what was left out."""
    left_out: Counter[str] = Counter()
    directories = [entry for entry in _entries(root, Counter()) if os.path.isdir(entry)]
    by_split = _split_directories(directories)
    names = set(by_split.values())
    if by_split:
        left_out["directories that are not a split"] += sum(entry.name not in names for entry in directories)
    parts, empty = {}, []
    with progress_bar(f"Reading {root}", None) as advance:
        for split, directory in (by_split or {UNSPLIT: ""}).items():
            paths, labels = [], LabelBuilder(os.fspath(root / directory))
            above = tuple(_identity(path) for path in (root, root / directory))  # links there would mix the classes
            for entry in _entries(root / directory, left_out):
                if not os.path.isdir(entry):
                    left_out["files outside class directories"] += 1
                    continue
                images = list(_walk(Path(entry.path), left_out, above))
                if not images:
                    empty.append(os.path.relpath(entry.path, root))
                paths += images
                for _ in images:  # bytes that are not text are escaped, since a report could not hold them
                    labels.add(entry.name.encode("utf-8", "backslashreplace").decode())
                advance(len(images))
            if paths:
                parts[split] = (Paths(paths), labels.build())
    if not parts:
        raise ValueError(
            f"{root} has no images: looked for {root}/CLASS/… and {root}/train/CLASS/… with files that end in "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    notes = [f"left out {what}: {count:,}" for what, count in sorted(left_out.items()) if count]
    if empty:
        notes.append(f"class directories without images: {len(empty):,} ({some(empty)})")
    return parts, notes


def _split_directories(directories: Sequence["os.DirEntry[str]"]) -> dict[str, str]:
    """Return the directory of each split; none if the directories are classes.

    A class may be called "train" or "test": directories are splits only if they hold directories, and "train" is one of
    them or all are.
    """
    named = {
        entry.name: SPLIT_NAMES[entry.name.lower()]
        for entry in directories
        if entry.name.lower() in SPLIT_NAMES and any(map(os.path.isdir, _entries(Path(entry.path), Counter())))
    }
    if "train" not in named.values() and len(named) < len(directories):
        return {}
    by_split: dict[str, str] = {}
    for name, split in named.items():
        if split in by_split:
            raise ValueError(f"directories {by_split[split]!r} and {name!r} are both the {split} split; rename one")
        by_split[split] = name
    return by_split


def _entries(directory: Path, left_out: Counter[str]) -> list["os.DirEntry[str]"]:
    """Return the entries of a directory, sorted by name, without hidden files."""
    with os.scandir(directory) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    left_out["hidden files"] += len(entries) - len(visible)
    return visible


def _identity(directory: Path) -> tuple[int, int]:
    """Return what a directory and all links to it have in common."""
    state = os.stat(directory)
    return state.st_dev, state.st_ino


def _walk(directory: Path, left_out: Counter[str], parents: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Yield the images of a directory at any depth. `parents`: its parents, to detect a link that leads back."""
    here = _identity(directory)
    if here in parents:
        left_out["links that lead back to a parent directory"] += 1
        return
    for entry in _entries(directory, left_out):
        if os.path.isdir(entry):  # unlike the entry's own method, without an error for a link to itself
            yield from _walk(Path(entry.path), left_out, (*parents, here))
        elif not os.path.isfile(entry):
            left_out["broken links and special files"] += 1
        elif os.path.splitext(entry.name)[1].lower() not in IMAGE_SUFFIXES:
            left_out["files that are not images"] += 1
        else:
            yield entry.path
