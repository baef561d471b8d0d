"""Labels and class names in separate files."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from hetxl_train.data.labels import CHUNK, SEPARATOR, RawLabels, printable
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays
from hetxl_train.data.tables import (
    LABELS,
    TABLE_SUFFIXES,
    build_labels,
    find_column,
    find_label,
    open_table,
    read_column_labels,
)
from hetxl_train.data.text_tables import text_errors

LABEL_SUFFIXES = (".npy", ".txt", *TABLE_SUFFIXES)


def read_labels(path: Path) -> RawLabels:
    """Read the labels of a file, one row each.

    | file | contents |
    | --- | --- |
    | .npy | ids or names [n] |
    | .txt | a label on each line; several separated by `|` |
    | .csv | the same in a column called label, labels, class, target, targets or y, or in the only column |
    | .jsonl, .parquet | such a column, of ids, names or lists of them |
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return labels_from_array(open_arrays(path)[""])
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    if suffix == ".txt":
        return build_labels(_lines(path), str(path), SEPARATOR)
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"labels must be a file that ends in {', '.join(LABEL_SUFFIXES)}; found {path}")
    table = open_table(path)
    columns = list(table.kinds)
    if len(columns) > 1 or find_column(columns, LABELS) is not None:
        return read_column_labels(table, find_label(table))
    values = (row[0] for row in table.rows(columns))
    if suffix != ".csv":
        return build_labels(values, str(path), table.separator)
    # A CSV file of one column may have no header: its first line is a label then.
    labels = list(values)
    if labels and columns[0] not in labels:
        raise ValueError(
            f"{path}: the first line, {printable(columns[0])!r}, is not a label of another row; call the column label "
            "if it is a header, or save the file as .txt if it is a label"
        )
    return build_labels(chain(columns, labels), str(path), table.separator)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file, text_errors(path):
        for line in file:
            yield line.rstrip("\n").strip()


def read_names(path: Path) -> list[str]:
    """Read class names: the lines of a .txt file, or an array of strings in a .npy file."""
    if path.suffix.lower() == ".npy":
        return names_from_array(open_arrays(path)[""])
    names = list(_lines(path))
    if "" in names:
        raise ValueError(f"{path}, line {names.index('') + 1} is empty; give one class name in each line")
    return names


def names_from_array(array: MappedArray) -> list[str]:
    """Return an array of strings [K] as a list."""
    if array.dtype.kind not in "US" or len(array.shape) != 1:
        raise TypeError(
            f"{array} must be a list of strings, found {array.dtype} of shape {list(array.shape)}; save it as "
            "np.array(names, dtype=str)"
        )
    return [_text(name) for name in array.array.tolist()]


def labels_from_array(array: MappedArray, offsets: MappedArray | None = None) -> RawLabels:
    """Return the labels in an array of ids or names [n]; or [m] with offsets [n + 1], where each row's begin."""
    if len(array.shape) != 1:
        raise ValueError(
            f"{array} must have one dimension, found shape {list(array.shape)}; for several labels in a row give "
            "labels [m] and label_offsets [n + 1]"
        )
    bounds = None if offsets is None else _check_offsets(offsets, len(array))
    if array.dtype.kind in "US":
        codes, names = _number_names(array)
        if "" in names and bounds is None:
            row = int((codes == names.index("")).argmax())
            raise ValueError(f"{array} has no label in row {row:,} (counted from 0); give one or leave it out")
        return RawLabels(codes, str(array), names, bounds)
    if not array.is_integer:
        raise TypeError(
            f"{array} must hold whole numbers or names, found {array.dtype}; convert with .astype(np.int64)"
        )
    return RawLabels(array.array, str(array), None, bounds)


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")


def _number_names(array: MappedArray) -> tuple[np.ndarray, list[str]]:
    """Return names [n] as indices [n] into the distinct ones; in chunks, without a Python string for each row."""
    index: dict[str, int] = {}
    codes = np.empty(len(array), dtype=np.int64)
    for start in range(0, len(array), CHUNK):
        names, inverse = np.unique(array.array[start : start + CHUNK], return_inverse=True)
        numbers = [index.setdefault(_text(name), len(index)) for name in names.tolist()]
        codes[start : start + CHUNK] = np.array(numbers, dtype=np.int64)[inverse.reshape(-1)]
    return codes, list(index)


def _check_offsets(offsets: MappedArray, count: int) -> np.ndarray:
    if offsets.dtype.kind not in "iu" or len(offsets.shape) != 1 or len(offsets) < 1:
        raise TypeError(
            f"{offsets} must be whole numbers [n + 1], found {offsets.dtype} of shape {list(offsets.shape)}"
        )
    bounds = np.asarray(offsets.array).astype(np.int64)
    if bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{offsets} must rise from 0 to the number of labels, {count:,}; found {bounds[0]} at the start, "
            f"{bounds[-1]} at the end" + (", and a step back between" if (np.diff(bounds) < 0).any() else "")
        )
    return bounds
