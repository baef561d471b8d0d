"""Embeddings [n, D] with labels, from array files. They are memory-mapped and never copied whole.

| data | contents |
| --- | --- |
| `DATA.npz`, `DATA.safetensors` | `features` (or `embeddings`, `x`) [n, D] and `labels` (or `targets`, `y`) [n] |
| – with several labels in a row | `labels` [m] and `label_offsets` [n + 1], where each row's begin and the last end |
| – with splits | the same keys after `train_`, `validation_` (or `val_`) and `test_`; or, in a .npz, `split` [n] |
| – with class names | `class_names` [K] strings; in safetensors a JSON list under that key of the metadata |
| `DATA.npy` with `labels=` | [n, D], and a label file; without `labels=`, `DATA_labels.npy` (or .txt, …) beside it |
| `DATA.parquet` | a column `features` (or …) of equally long lists, and `labels` (or …) of labels or lists; |
| | optionally `split` |
| a directory | `features.npy` and `labels.npy`; or by split `train.npy` and `train_labels.npy`, or `train.npz`, …; |
| | `class_names.txt` or `.npy` if ids have names |

`split` is train, validation (or `val`, `valid`, `dev`) or test. Label files (.npy, .txt, .csv, .jsonl, .parquet) are
those of `hetxl_train.data.manifests`. Labels are ids (any whole numbers from 0) or names. Features are float16,
float32, float64 or (safetensors) bfloat16, and arrive as float32.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hetxl_train.console import counted, progress_bar
from hetxl_train.data import manifests
from hetxl_train.data.build_dataset import UNSPLIT, Plan, add_splits, assemble, choose_part, row_type, split_name
from hetxl_train.data.dataset import SPLITS, Dataset, Fetched, InputSpec, Split
from hetxl_train.data.labels import Labels, RawLabels, some
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays, safetensors_metadata

FEATURES = ("features", "embeddings", "x")
LABELS = ("labels", "targets", "y")
ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors", ".parquet")
PREFIXES = {UNSPLIT: ("",), "train": ("train_",), "validation": ("validation_", "val_"), "test": ("test_",)}


class Part(NamedTuple):
    """Features and their labels."""

    features: MappedArray  # [n, D]
    labels: RawLabels | None  # the labels of the rows of this part; None for features without labels
    rows: np.ndarray | None = None  # the rows of the features that belong to this part; None for all


class Parts(NamedTuple):
    """The contents of a file or directory: parts by split, and names for their ids."""

    by_split: dict[str, Part]
    class_names: Sequence[str] | None = None


class ArraySplit(Split):
    """Rows of an array [n, D], features, or [n, C], tokens; `rows` are those of this split, None for all."""

    def __init__(self, array: MappedArray, labels: Labels, rows: np.ndarray | None = None) -> None:
        self.array, self.labels, self.rows = array, labels, rows

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b]; seeds have no effect."""
        rows = np.asarray(rows, dtype=np.int64)
        values = self.array.gather(rows if self.rows is None else self.rows[rows])
        return Fetched(torch.from_numpy(values if self.array.is_float else values.astype(np.int64)), rows)


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
    """Load a dataset of embeddings from a file or directory in one of the forms of this module.

    The plan says how to build it; the other arguments are those of `hetxl_train.data.open_dataset`.
    """
    parts, names = read_parts(path, labels=labels, cache=cache)

    def read(other: Path) -> Mapping[str, Part]:
        nonlocal names
        added = read_parts(other, cache=cache)
        if added.class_names is not None:
            if names is not None and list(names) != list(added.class_names):
                raise ValueError(f"class_names of {other} differ from those of {path}; write the same in both")
            names = added.class_names
        return added.by_split

    add_splits(parts, path, {"validation": validation, "test": test}, read)
    width = next(iter(parts.values())).features.shape[1]
    for split, part in parts.items():
        if part.features.shape[1] != width:
            raise ValueError(
                f"{part.features.path} has {part.features.shape[1]} features for {split!r}, the others have {width}"
            )
    if check:
        for array in dict.fromkeys(part.features for part in parts.values()):  # several parts may share one
            check_finite(array)
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
    """Read the features of a file or directory and, if it has them, their labels.

    `split` of a file splits its rows, unless `split_column` is False.
    """
    suffix = path.suffix.lower()
    if labels is not None and (path.is_dir() or suffix != ".npy"):
        raise ValueError(f"labels={labels} goes with a .npy file of features; {path} must hold its labels itself")
    if path.is_dir():
        return _read_directory(path, cache, split_column)
    if suffix == ".npy":
        return Parts({UNSPLIT: _read_npy(path, labels)})
    if suffix == ".parquet":
        return Parts(_read_parquet(path, cache, split_column))
    return _read_container(path, split_column)


def is_array_directory(directory: Path) -> bool:
    """Whether a directory holds array files under the names of this module."""
    return next(_feature_files(directory), None) is not None


def check_finite(array: MappedArray) -> None:
    """Raise a ValueError for NaN and infinite values; reads block by block."""
    bad, first = 0, None
    with progress_bar(f"Checking {array.path.name}", len(array)) as advance:
        for start, block in array.blocks():
            if not np.isfinite(block).all():
                rows = np.flatnonzero(~np.isfinite(block).all(axis=1))
                bad += len(rows)
                first = start + int(rows[0]) if first is None else first
            advance(len(block))
    if bad:
        raise ValueError(
            f"{array} has NaN or infinite values (as float32) in {bad:,} of {len(array):,} rows, first in row "
            f"{first:,} (counted from 0); repair them or leave these rows out"
        )


def _check_part(features: MappedArray, labels: RawLabels | None) -> Part:
    if len(features.shape) != 2 or features.shape[1] == 0:
        raise ValueError(
            f"{features} must hold features [n, D], found shape {list(features.shape)}; one row for each example"
        )
    if len(features) == 0:
        raise ValueError(f"{features} has no rows")
    if labels is not None and len(labels) != len(features):
        raise ValueError(
            f"{features} has {len(features):,} rows but {labels.source} has labels for {len(labels):,}; they must match"
        )
    return Part(features, labels)


def _require_labels(part: Part) -> RawLabels:
    if not part.features.is_float:
        raise TypeError(f"{part.features} must be floating-point, found {part.features.dtype}; save it as float32")
    if part.labels is None:
        raise ValueError(
            f"{part.features} has no labels: looked for {', '.join(LABELS)} in the same file, or beside a .npy file as "
            "NAME_labels.npy; or give labels=FILE"
        )
    return part.labels


def _read_npy(path: Path, labels: Path | None) -> Part:
    features = open_arrays(path)[""]
    stem = path.stem
    for word in FEATURES:
        stem = stem.removesuffix(word) if stem == word or stem.endswith(f"_{word}") else stem
    base = stem if not stem or stem.endswith("_") else f"{stem}_"
    label_file = labels or _find(path.parent, [base + word for word in LABELS], manifests.LABEL_SUFFIXES)
    if label_file is None:
        return _check_part(features, None)
    offsets = _find(path.parent, [f"{base}label_offsets"], [".npy"])
    if offsets is not None and labels is None and label_file.suffix.lower() == ".npy":
        return _check_part(features, manifests.labels_from_array(open_arrays(label_file)[""], open_arrays(offsets)[""]))
    return _check_part(features, manifests.read_labels(label_file))


def _read_parquet(path: Path, cache: Path | None, split_column: bool) -> dict[str, Part]:
    columns = manifests.parquet_columns(path)
    features = manifests.require_column(path, columns, FEATURES)
    labels = manifests.find_column(columns, manifests.LABEL_COLUMNS)
    raw = None if labels is None else manifests.labels_from_table(path, labels)
    whole = _check_part(manifests.parquet_features(path, features, cache), raw)
    split = manifests.find_column(columns, manifests.SPLIT_COLUMNS) if split_column else None
    if split is None:
        return {UNSPLIT: whole}
    with closing(counted(manifests.table_rows(path, [split]), f"Reading {path}")) as rows:
        return _split_up(whole, path, (value for (value,) in rows))


def _split_up(whole: Part, path: Path, names: Iterable[Any]) -> dict[str, Part]:
    """Return the rows of each split, in ascending order, from the split that each row names."""
    numbers = (SPLITS.index(split_name(path, name, number)) for number, name in enumerate(names, 1))
    codes = np.fromiter(numbers, dtype=np.int8)
    by_split = {name: np.flatnonzero(codes == code).astype(row_type(len(codes))) for code, name in enumerate(SPLITS)}
    return {
        split: Part(whole.features, None if whole.labels is None else whole.labels.subset(rows), rows)
        for split, rows in by_split.items()
        if len(rows)
    }


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
            raw = None if labels is None else manifests.labels_from_array(labels, offsets)
            parts[split] = _check_part(features, raw)
    if not parts:
        raise ValueError(f"{path} must have a key {' or '.join(FEATURES)}, found {some(arrays, 20) or 'none'}")
    split = _first(arrays, "", manifests.SPLIT_COLUMNS) if split_column else None
    if split is not None and UNSPLIT in parts:
        whole = parts.pop(UNSPLIT)
        rows = len(whole.features)
        if split.dtype.kind not in "US" or split.shape != (rows,):
            raise ValueError(
                f"{split} must be {rows:,} strings (train, validation or test), one for each row, found {split.dtype} "
                f"of shape {list(split.shape)}; or give each split keys of its own, as train_features"
            )
        added = _split_up(whole, path, manifests.names_from_array(split))
        if both := added.keys() & parts:
            raise ValueError(f"{split} names rows as {some(sorted(both))}, but {path} has others of that name")
        parts |= added
    return Parts(parts, _class_names(path, arrays))


def _first(arrays: dict[str, MappedArray], prefix: str, words: Sequence[str]) -> MappedArray | None:
    return next((arrays[prefix + word] for word in words if prefix + word in arrays), None)


def _class_names(path: Path, arrays: dict[str, MappedArray]) -> list[str] | None:
    if "class_names" in arrays:
        return manifests.names_from_array(arrays["class_names"])
    text = safetensors_metadata(path).get("class_names") if path.suffix.lower() == ".safetensors" else None
    if text is None:
        return None
    names = None
    with suppress(json.JSONDecodeError):
        names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names in the metadata of {path} must be a JSON list of strings, found {text[:40]!r}")
    return names


def _feature_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a directory that hold features, with their split."""
    for split, prefixes in PREFIXES.items():
        stems = [prefix + word for prefix in prefixes for word in FEATURES]
        whole = [prefix.removesuffix("_") for prefix in prefixes if prefix]
        path = _find(directory, [*whole, *stems], ARRAY_SUFFIXES)
        if path is not None:
            yield split, path


def _find(directory: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path | None:
    paths = (directory / (stem + suffix) for stem in stems for suffix in suffixes)
    return next((path for path in paths if path.is_file()), None)


def _read_directory(directory: Path, cache: Path | None, split_column: bool) -> Parts:
    parts: dict[str, Part] = {}
    names = None
    for split, path in _feature_files(directory):
        inner = read_parts(path, cache=cache, split_column=split_column)
        added = inner.by_split if split == UNSPLIT else {split: choose_part(inner.by_split, path, split)}
        if repeated := [key for key in added if key in parts]:
            raise ValueError(f"{path} has {repeated[0]} rows, but so has another file of {directory}; keep one of them")
        parts |= added
        names = inner.class_names or names
    if not parts:
        raise ValueError(f"{directory} has no features.npy and no train.npy (or .npz, .safetensors, .parquet)")
    names_file = _find(directory, ["class_names"], [".txt", ".npy"])
    return Parts(parts, names if names_file is None else manifests.read_names(names_file))
