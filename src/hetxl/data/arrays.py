"""Embeddings [n, D] with labels, from array files. They are mapped into memory and never copied whole.

| data | what it holds |
| --- | --- |
| `DATA.npz`, `DATA.safetensors` | `features` (or `embeddings`, `x`) [n, D] and `labels` (or `targets`, `y`) [n] |
| – with several labels in a row | `labels` [m] and `label_offsets` [n + 1], where each row's begin and the last end |
| – with splits | the same keys after `train_`, `validation_` (or `val_`) and `test_`; or, in a .npz, `split` [n] |
| – with class names | `class_names` [K] strings; in safetensors a JSON list under that key of the metadata |
| `DATA.npy` with `labels=` | [n, D], and a label file; without `labels=`, `DATA_labels.npy` (or .txt, …) beside it |
| `DATA.parquet` | a column `features` (or …) of equally long lists, and `labels` (or …) of labels or lists; |
| | and, where rows have one, `split` |
| a folder | `features.npy` and `labels.npy`; or by split `train.npy` and `train_labels.npy`, or `train.npz`, …; |
| | `class_names.txt` or `.npy` where ids have names |

`split` says train, validation (or `val`, `valid`, `dev`) or test. Label files (.npy, .txt, .csv, .jsonl, .parquet) are
those of `hetxl.data.tables.read_labels`. Labels are ids (any whole numbers from 0 on) or names. Features are float16,
float32, float64 or (safetensors) bfloat16, and arrive as float32.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hetxl.data.assembly import UNSPLIT, Plan, assemble, split_name
from hetxl.data.classes import RawLabels, some
from hetxl.data.dataset import SPLITS, Dataset, Fetched, InputSpec, Split
from hetxl.data.labels import Labels
from hetxl.data.parquet import parquet_columns, parquet_features
from hetxl.data.progress import counted, progress_bar
from hetxl.data.splitting import row_type
from hetxl.data.stored import Stored, open_arrays, safetensors_metadata
from hetxl.data.tables import (
    LABEL_COLUMNS,
    LABEL_SUFFIXES,
    SPLIT_COLUMNS,
    find_column,
    labels_from_array,
    labels_from_table,
    names_from_array,
    read_labels,
    read_names,
    table_rows,
)

FEATURES = ("features", "embeddings", "x")
LABELS = ("labels", "targets", "y")
ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors", ".parquet")
PREFIXES = {UNSPLIT: ("",), "train": ("train_",), "validation": ("validation_", "val_"), "test": ("test_",)}


class Part(NamedTuple):
    """Features and their labels.

    Attributes:
        features: [n, D]
        labels: of the rows of this part; None for features that come without.
        rows: which rows of the features they are; None for all.
    """

    features: Stored
    labels: RawLabels | None
    rows: np.ndarray | None = None


class Parts(NamedTuple):
    """What a file or folder holds: parts by split, and names for their ids."""

    by_split: dict[str, Part]
    class_names: Sequence[str] | None = None


class ArraySplit(Split):
    """Rows of an array: features [D], or tokens [C].

    Args:
        stored: [n, D]
        labels: of the rows of this split.
        rows: which rows of the array they are; None for all.
    """

    def __init__(self, stored: Stored, labels: Labels, rows: np.ndarray | None = None) -> None:
        self.stored, self.labels, self.rows = stored, labels, rows

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b]; seeds change nothing."""
        rows = np.asarray(rows, dtype=np.int64)
        found = self.stored.gather(rows if self.rows is None else self.rows[rows])
        return Fetched(torch.from_numpy(found if self.stored.is_float else found.astype(np.int64)), rows)


def load_arrays(
    path: Path,
    plan: Plan | None = None,
    *,
    labels: Path | None = None,
    validation: Path | None = None,
    test: Path | None = None,
    cache: Path | None = None,
    check: bool = True,
) -> Dataset:
    """A dataset of embeddings; the forms of files are those of this module.

    Args:
        path: of a file or a folder.
        plan: how to put it together.
        labels: the labels of a .npy file of features.
        validation: another file with the validation rows.
        test: another file with the test rows.
        cache: folder for arrays made of parquet files.
        check: whether to look through all values for NaN and infinite ones.
    """
    parts, names = read_parts(path, labels=labels, cache=cache)
    for split, other in (("validation", validation), ("test", test)):
        if other is None:
            continue
        if split in parts:
            raise ValueError(f"{split}={other} was given, and {path} has {split} rows of its own; give one of them")
        added = read_parts(other, cache=cache)
        parts[split] = choose_part(added, other, split)
        if added.class_names is not None:
            if names is not None and list(names) != list(added.class_names):
                raise ValueError(f"class_names of {other} differ from those of {path}; write the same in both")
            names = added.class_names
    width = next(iter(parts.values())).features.shape[1]
    for split, part in parts.items():
        if part.features.shape[1] != width:
            raise ValueError(
                f"{part.features.path} has {part.features.shape[1]} features for {split!r}, others {width}"
            )
    if check:
        for stored in dict.fromkeys(part.features for part in parts.values()):  # several parts may share one
            check_finite(stored)
    return assemble(
        path.stem,
        InputSpec("features", (width,)),
        {split: (part, _require_labels(part)) for split, part in parts.items()},
        _make_split,
        plan or Plan(),
        names,
    )


def _make_split(part: Part, labels: Labels, rows: np.ndarray | None) -> Split:
    if part.rows is not None:
        rows = part.rows if rows is None else part.rows[rows]
    return ArraySplit(part.features, labels, rows)


def read_parts(
    path: Path, *, labels: Path | None = None, cache: Path | None = None, split_column: bool = True
) -> Parts:
    """The features of a file or folder and, where it has them, their labels.

    Args:
        path: of a file or a folder, in one of the forms of this module.
        labels: the labels of a .npy file of features.
        cache: folder for arrays made of parquet files.
        split_column: whether `split` of a file parts its rows; otherwise it is not looked at.
    """
    suffix = path.suffix.lower()
    if labels is not None and (path.is_dir() or suffix != ".npy"):
        raise ValueError(f"labels={labels} goes with a .npy file of features; {path} must hold its labels itself")
    if path.is_dir():
        return _read_folder(path, cache, split_column)
    if suffix == ".npy":
        return Parts({UNSPLIT: _read_npy(path, labels)})
    if suffix == ".parquet":
        return Parts(_read_parquet(path, cache, split_column))
    return _read_container(path, split_column)


def choose_part(parts: Parts, path: Path, split: str) -> Part:
    """The rows of a file that was given for a split: those of that split, else those of none."""
    for key in (split, UNSPLIT):
        if key in parts.by_split:
            return parts.by_split[key]
    raise ValueError(f"{path} holds {some(parts.by_split)} rows, and none for {split}")


def is_array_folder(folder: Path) -> bool:
    """Whether a folder holds array files under the names that are looked for."""
    return next(_feature_files(folder), None) is not None


def check_finite(stored: Stored) -> None:
    """Refuse NaN and infinite features, block by block."""
    bad, first = 0, None
    with progress_bar(f"Checking {stored.path.name}", len(stored)) as advance:
        for start, block in stored.blocks():
            if not np.isfinite(block).all():
                rows = np.flatnonzero(~np.isfinite(block).all(axis=1))
                bad += len(rows)
                first = start + int(rows[0]) if first is None else first
            advance(len(block))
    if bad:
        raise ValueError(
            f"{_what(stored)} has NaN or infinite values (as float32) in {bad:,} of {len(stored):,} rows, first in row "
            f"{first:,} (counted from 0); repair them or leave these rows out"
        )


def _what(stored: Stored) -> str:
    return f"array {stored.name!r} of {stored.path}" if stored.name else str(stored.path)


def _part(features: Stored, labels: RawLabels | None) -> Part:
    what = _what(features)
    if len(features.shape) != 2 or features.shape[1] == 0:
        raise ValueError(
            f"{what} must hold features [n, D], found shape {list(features.shape)}; one row for each example"
        )
    if len(features) == 0:
        raise ValueError(f"{what} has no rows")
    if labels is not None and len(labels) != len(features):
        raise ValueError(
            f"{what} has {len(features):,} rows and {labels.source} has labels for {len(labels):,}; they must match"
        )
    return Part(features, labels)


def _require_labels(part: Part) -> RawLabels:
    if not part.features.is_float:
        raise TypeError(
            f"{_what(part.features)} must be floating-point, found {part.features.dtype}; save it as float32"
        )
    if part.labels is None:
        raise ValueError(
            f"{_what(part.features)} has no labels: looked for {', '.join(LABELS)} in the same file, or beside a .npy "
            "file as NAME_labels.npy; or give labels=FILE"
        )
    return part.labels


def _read_npy(path: Path, labels: Path | None) -> Part:
    features = open_arrays(path)[""]
    stem = path.stem
    for word in FEATURES:
        stem = stem.removesuffix(word) if stem == word or stem.endswith(f"_{word}") else stem
    base = stem if not stem or stem.endswith("_") else f"{stem}_"
    found = labels or _find(path.parent, [base + word for word in LABELS], LABEL_SUFFIXES)
    if found is None:
        return _part(features, None)
    offsets = _find(path.parent, [f"{base}label_offsets"], [".npy"])
    if offsets is not None and labels is None and found.suffix.lower() == ".npy":
        return _part(features, labels_from_array(open_arrays(found)[""], open_arrays(offsets)[""]))
    return _part(features, read_labels(found))


def _read_parquet(path: Path, cache: Path | None, split_column: bool) -> dict[str, Part]:
    columns = parquet_columns(path)
    features, labels = find_column(columns, FEATURES), find_column(columns, LABEL_COLUMNS)
    if features is None:
        raise ValueError(f"{path} must have a column {' or '.join(FEATURES)}, found {some(columns, 20)}")
    raw = None if labels is None else labels_from_table(path, labels)
    whole = _part(parquet_features(path, features, cache), raw)
    split = find_column(columns, SPLIT_COLUMNS) if split_column else None
    if split is None:
        return {UNSPLIT: whole}
    with closing(counted(table_rows(path, [split]), f"Reading {path}")) as rows:
        return _split_up(whole, path, (value for (value,) in rows))


def _split_up(whole: Part, path: Path, names: Iterable[Any]) -> dict[str, Part]:
    """The rows of each split, in ascending order, from the name of each row's."""
    places = (SPLITS.index(split_name(path, name, number)) for number, name in enumerate(names, 1))
    codes = np.fromiter(places, dtype=np.int8)
    parts = {}
    for place, split in enumerate(SPLITS):
        rows = np.flatnonzero(codes == place).astype(row_type(len(codes)))
        if len(rows):
            parts[split] = Part(whole.features, None if whole.labels is None else whole.labels.subset(rows), rows)
    return parts


def _read_container(path: Path, split_column: bool) -> Parts:
    arrays = open_arrays(path)
    parts = {}
    for split, prefixes in PREFIXES.items():
        for prefix in prefixes:
            features = _first(arrays, prefix, FEATURES)
            if features is None:
                continue
            labels = _first(arrays, prefix, LABELS)
            offsets = arrays.get(f"{prefix}label_offsets")
            parts[split] = _part(features, None if labels is None else labels_from_array(labels, offsets))
    if not parts:
        raise ValueError(f"{path} must have a key {' or '.join(FEATURES)}, found {some(arrays, 20) or 'none'}")
    split = _first(arrays, "", SPLIT_COLUMNS) if split_column else None
    if split is not None and UNSPLIT in parts:
        whole = parts.pop(UNSPLIT)
        added = _split_up(whole, path, _splits_of(split, len(whole.features)))
        if both := added.keys() & parts:
            raise ValueError(f"{_what(split)} names rows as {some(sorted(both))}, and {path} has others of that name")
        parts |= added
    return Parts(parts, _class_names(path, arrays))


def _splits_of(stored: Stored, rows: int) -> list[str]:
    if stored.dtype.kind not in "US" or stored.shape != (rows,):
        raise ValueError(
            f"{_what(stored)} must be {rows:,} strings (train, validation or test), one for each row, found "
            f"{stored.dtype} of shape {list(stored.shape)}; or give each split keys of its own, as train_features"
        )
    return names_from_array(stored)


def _first(arrays: dict[str, Stored], prefix: str, words: Sequence[str]) -> Stored | None:
    return next((arrays[prefix + word] for word in words if prefix + word in arrays), None)


def _class_names(path: Path, arrays: dict[str, Stored]) -> list[str] | None:
    if "class_names" in arrays:
        return names_from_array(arrays["class_names"])
    text = safetensors_metadata(path).get("class_names") if path.suffix.lower() == ".safetensors" else None
    if text is None:
        return None
    try:
        names = json.loads(text)
    except json.JSONDecodeError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names in the metadata of {path} must be a JSON list of strings, found {text[:40]!r}")
    return names


def _feature_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder that hold features, with their split."""
    for split, prefixes in PREFIXES.items():
        stems = [prefix + word for prefix in prefixes for word in FEATURES]
        whole = [prefix.removesuffix("_") for prefix in prefixes if prefix]
        found = _find(folder, [*whole, *stems], ARRAY_SUFFIXES)
        if found is not None:
            yield split, found


def _find(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path | None:
    paths = (folder / (stem + suffix) for stem in stems for suffix in suffixes)
    return next((path for path in paths if path.is_file()), None)


def _read_folder(folder: Path, cache: Path | None, split_column: bool) -> Parts:
    parts: dict[str, Part] = {}
    names = None
    for split, path in _feature_files(folder):
        inner = read_parts(path, cache=cache, split_column=split_column)
        added = inner.by_split if split == UNSPLIT else {split: choose_part(inner, path, split)}
        for key in added:
            if key in parts:
                raise ValueError(f"{path} has {key} rows, and another file of {folder} has some too; keep one of them")
        parts |= added
        names = inner.class_names or names
    if not parts:
        raise ValueError(f"{folder} has no features.npy and no train.npy (or .npz, .safetensors, .parquet)")
    given = _find(folder, ["class_names"], [".txt", ".npy"])
    return Parts(parts, names if given is None else read_names(given))
