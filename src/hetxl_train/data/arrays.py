"""Embeddings [n, D] or images [n, H, W(, C)] with labels, from array files, which are mapped and never copied whole.

| data | contents |
| --- | --- |
| `DATA.npz`, `DATA.safetensors` | `features` (or `embeddings`, `x`, …) [n, D], or `images` [n, H, W] or |
| | [n, H, W, C] of uint8, and `labels` (or `targets`, `y`, …) [n] |
| – with several labels in a row | `labels` [m] and `label_offsets` [n + 1], where each row's begin and the last end |
| – with splits | the same keys after `train_`, `validation_` (or `val_`) and `test_`; or, in a .npz, `split` [n] |
| – with class names | `class_names` [K] strings; in safetensors a JSON list under that key of the metadata |
| `DATA.npy` with `labels=` | [n, D] or images, and a label file; without, `DATA_labels.npy` (or .txt, …) beside it |
| a directory | `features.npy` and `labels.npy`; or by split `train.npy` and `train_labels.npy`, or `train.npz`, …; |
| | `class_names.txt` or `.npy` if ids have names |

`split` is train, validation (or `val`, `valid`, `dev`) or test. Label files (.npy, .txt, .csv, .jsonl, .parquet) are
those of `hetxl_train.data.label_files`. Labels are ids (any whole numbers from 0) or names. Features are float16,
float32, float64 or (safetensors) bfloat16, and arrive as float32.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from hetxl._files import parse_json
from hetxl_train.console import progress_bar
from hetxl_train.data import label_files
from hetxl_train.data.build_dataset import UNSPLIT, Part, Parts, choose_part, split_name, split_parts
from hetxl_train.data.dataset import Fetched, InputSpec, Split
from hetxl_train.data.image_files import PixelArray, is_image_array
from hetxl_train.data.labels import Labels, RawLabels, some
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays, safetensors_metadata
from hetxl_train.data.tables import AUTO, FEATURES, LABELS, SPLIT, Columns, open_table, read_table

ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors")
INPUTS = (*FEATURES, "images", "image")
PREFIXES = {UNSPLIT: ("",), "train": ("train_",), "validation": ("validation_", "val_"), "test": ("test_",)}


class ArraySplit(Split):
    """Rows of an array [n, D], features, or [n, C], tokens; `rows` are those of this split, None for all."""

    def __init__(self, array: MappedArray, labels: Labels, rows: np.ndarray | None = None) -> None:
        self.array, self.labels, self.rows = array, labels, rows

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b]; seeds have no effect."""
        rows = np.asarray(rows, dtype=np.int64)
        values = self.array.gather(rows if self.rows is None else self.rows[rows])
        return Fetched(torch.from_numpy(values if self.array.is_float else values.astype(np.int64)), rows)


def read_arrays(
    path: Path, columns: Columns = AUTO, *, labels: Path | None = None, cache: Path | None = None, splits: bool = True
) -> Parts:
    """Read the features or images of a file or directory and, if it has them, their labels.

    `split` of a file splits its rows, unless `splits` is False.
    """
    suffix = path.suffix.lower()
    if labels is not None and (path.is_dir() or suffix != ".npy"):
        raise ValueError(f"labels={labels} is only for .npy files of features; {path} must contain its labels")
    if path.is_dir():
        return _read_directory(path, columns, cache, splits)
    if suffix == ".npy":
        return _parts({UNSPLIT: _read_npy(path, labels)})
    if suffix == ".parquet":
        return read_table(open_table(path), columns, cache=cache, labelled=False, splits=splits)
    return _read_container(path, columns, splits)


def _parts(by_split: dict[str, Part], class_names: Sequence[str] | None = None) -> Parts:
    """Return parts of features, or of images if they hold pixels."""
    images = [is_image_array(part.inputs) for part in by_split.values()]
    if all(images):
        parts = {split: part._replace(inputs=PixelArray(part.inputs)) for split, part in by_split.items()}
        return Parts("image", parts, class_names)
    return Parts("features", by_split, class_names)


def is_array_directory(directory: Path) -> bool:
    """Return whether a directory has array files with the names of this module."""
    return next(_feature_files(directory), None) is not None


def check_features(arrays: Sequence[MappedArray], finite: bool = True) -> InputSpec:
    """Return the input of feature arrays, which must be floating-point and of equal width; `finite` rejects NaN."""
    width = arrays[0].shape[1]
    for array in dict.fromkeys(arrays):  # several parts may share one
        if not array.is_float:
            raise TypeError(f"{array} must be floating-point, found {array.dtype}; save it as float32")
        if array.shape[1] != width:
            raise ValueError(f"{array} has {array.shape[1]} features, {arrays[0]} has {width}; they must match")
        if finite:
            check_finite(array)
    return InputSpec("features", (width,))


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


def _check_part(array: MappedArray, labels: RawLabels | None) -> Part:
    if not is_image_array(array) and (len(array.shape) != 2 or array.shape[1] == 0):
        raise ValueError(
            f"{array} must hold features [n, D], one row for each example, or images [n, H, W] or [n, H, W, C] of "
            f"uint8, found {array.dtype} of shape {list(array.shape)}"
        )
    if len(array) == 0:
        raise ValueError(f"{array} has no rows")
    if labels is not None and len(labels) != len(array):
        raise ValueError(
            f"{array} has {len(array):,} rows but {labels.source} has labels for {len(labels):,}; they must match"
        )
    return Part(array, labels)


def _read_npy(path: Path, labels: Path | None) -> Part:
    features = open_arrays(path)[""]
    stem = path.stem
    for word in INPUTS:
        stem = stem.removesuffix(word) if stem == word or stem.endswith(f"_{word}") else stem
    base = stem if not stem or stem.endswith("_") else f"{stem}_"
    label_file = labels or _find(path.parent, [base + word for word in LABELS], label_files.LABEL_SUFFIXES)
    if label_file is None:
        return _check_part(features, None)
    offsets = _find(path.parent, [f"{base}label_offsets"], [".npy"])
    if offsets is not None and labels is None and label_file.suffix.lower() == ".npy":
        return _check_part(
            features, label_files.labels_from_array(open_arrays(label_file)[""], open_arrays(offsets)[""])
        )
    return _check_part(features, label_files.read_labels(label_file))


def _read_container(path: Path, columns: Columns, splits: bool) -> Parts:
    arrays = open_arrays(path)
    inputs = INPUTS if columns.features is None else (columns.features,)
    targets = LABELS if columns.label is None else (columns.label,)
    parts = {}
    for split, prefixes in PREFIXES.items():
        for prefix in prefixes:
            features = _first(arrays, prefix, inputs)
            if features is None:
                continue
            labels = _first(arrays, prefix, targets)
            offsets = arrays.get(f"{prefix}label_offsets")
            raw = None if labels is None else label_files.labels_from_array(labels, offsets)
            parts[split] = _check_part(features, raw)
    if not parts:
        raise ValueError(f"{path} must have a key {' or '.join(inputs)}, found {some(arrays, 20) or 'none'}")
    split = _first(arrays, "", SPLIT if columns.split is None else (columns.split,)) if splits else None
    if split is not None and UNSPLIT in parts:
        whole = parts.pop(UNSPLIT)
        rows = len(whole.inputs)
        if split.dtype.kind not in "US" or split.shape != (rows,):
            raise ValueError(
                f"{split} must be {rows:,} strings (train, validation or test), one for each row, found {split.dtype} "
                f"of shape {list(split.shape)}; or use separate keys for each split, such as train_features"
            )
        names = label_files.names_from_array(split)
        added = split_parts(whole, (split_name(path, name, number) for number, name in enumerate(names, 1)))
        if both := added.keys() & parts:
            raise ValueError(f"{split} names rows as {some(sorted(both))}, but {path} has others of that name")
        parts |= added
    return _parts(parts, _class_names(path, arrays))


def _first(arrays: dict[str, MappedArray], prefix: str, words: Sequence[str]) -> MappedArray | None:
    return next((arrays[prefix + word] for word in words if prefix + word in arrays), None)


def _class_names(path: Path, arrays: dict[str, MappedArray]) -> list[str] | None:
    if "class_names" in arrays:
        return label_files.names_from_array(arrays["class_names"])
    text = safetensors_metadata(path).get("class_names") if path.suffix.lower() == ".safetensors" else None
    if text is None:
        return None
    names = parse_json(text, f"class_names in the metadata of {path}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names in the metadata of {path} must be a JSON list of strings, found {text[:40]!r}")
    return names


def _feature_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a directory that hold features, with their split."""
    for split, prefixes in PREFIXES.items():
        stems = [prefix + word for prefix in prefixes for word in INPUTS]
        whole = [prefix.removesuffix("_") for prefix in prefixes if prefix]
        path = _find(directory, [*whole, *stems], (*ARRAY_SUFFIXES, ".parquet"))
        if path is not None:
            yield split, path


def _find(directory: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path | None:
    paths = (directory / (stem + suffix) for stem in stems for suffix in suffixes)
    return next((path for path in paths if path.is_file()), None)


def _read_directory(directory: Path, columns: Columns, cache: Path | None, splits: bool) -> Parts:
    parts: dict[str, Part] = {}
    names, kinds = None, {}
    for split, path in _feature_files(directory):
        inner = read_arrays(path, columns, cache=cache, splits=splits)
        added = inner.by_split if split == UNSPLIT else {split: choose_part(inner.by_split, path, split)}
        if repeated := [key for key in added if key in parts]:
            raise ValueError(f"{path} has {repeated[0]} rows, but so has another file of {directory}; keep one of them")
        parts |= added
        kinds[inner.kind] = path
        names = inner.class_names or names
    if len(kinds) > 1:
        raise ValueError(f"{directory} must hold inputs of one kind, found {' and '.join(kinds)}")
    names_file = _find(directory, ["class_names"], [".txt", ".npy"])
    return Parts(next(iter(kinds)), parts, names if names_file is None else label_files.read_names(names_file))
