"""Tables with one example in each row (CSV, JSON lines, parquet) and files of labels."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data.classes import CHUNK, LabelBuilder, RawLabels, printable
from hetxl.data.parquet import parquet_columns, parquet_ids, parquet_rows
from hetxl.data.progress import counted
from hetxl.data.stored import Stored, open_arrays

LABEL_COLUMNS = ("label", "labels", "class", "target", "targets", "y")
SPLIT_COLUMNS = ("split",)
TABLE_SUFFIXES = (".csv", ".jsonl", ".parquet")
LABEL_SUFFIXES = (".npy", ".txt", ".csv", ".jsonl", ".parquet")
SEPARATOR = "|"
"""Between the labels of one row, in text files."""


def find_column(columns: Sequence[str], wanted: Sequence[str]) -> str | None:
    """The first of the wanted names that a table has, whatever its case; None if it has none."""
    by_name = {column.strip().lower(): column for column in reversed(columns)}
    return next((by_name[name] for name in wanted if name in by_name), None)


def table_columns(path: Path) -> list[str]:
    """The columns of a table; of JSON lines, those of the first row."""
    if path.suffix.lower() == ".parquet":
        return parquet_columns(path)
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file, _text_errors(path):
            return next(_csv_reader(file), [])
    for row in _json_rows(path):
        return list(row)
    return []


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[list[Any]]:
    """The values of some columns, row by row.

    Args:
        path: of a file that ends in .csv, .jsonl or .parquet.
        columns: which of `table_columns`.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return ([row[column] for column in columns] for row in parquet_rows(path, columns))
    if suffix == ".csv":
        return _csv_rows(path, columns)
    return ([row.get(column) for column in columns] for row in _json_rows(path))


def _csv_reader(file: Iterable[str]) -> Any:
    return csv.reader(file, skipinitialspace=True)  # "cat, a.png", and quotes after the space


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    with path.open(newline="", encoding="utf-8-sig") as file, _text_errors(path):
        reader = _csv_reader(file)
        header = next(reader, [])
        places = [header.index(column) for column in columns]
        for row in reader:
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(row)} fields where the header has {len(header)}; quote "
                    "fields that hold a comma"
                )
            yield [row[place] for place in places]


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as file, _text_errors(path):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f'{path}, line {number} must be an object such as {{"path": …}}, found {line[:40]!r}')
            yield row


@contextmanager
def _text_errors(path: Path) -> Iterator[None]:
    """Says which file it is that cannot be read as text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"{path} is no readable CSV file ({error})") from error


def read_labels(path: Path) -> RawLabels:
    """The labels of a file, one row each.

    | file | what it holds |
    | --- | --- |
    | .npy | ids or names [n] |
    | .txt | a label on each line; several parted by `|` |
    | .csv | the same in a column called label, labels, class, target, targets or y, or in the only column |
    | .jsonl, .parquet | such a column, of ids, names or lists of them |

    Args:
        path: of the file.
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return labels_from_array(open_arrays(path)[""])
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    if suffix == ".txt":
        return _build(_lines(path), str(path), SEPARATOR)
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"labels must be a file that ends in {', '.join(LABEL_SUFFIXES)}; found {path}")
    columns = table_columns(path)
    column = find_column(columns, LABEL_COLUMNS)
    if column is not None:
        return labels_from_table(path, column)
    if len(columns) == 1:
        values = (row[0] for row in table_rows(path, columns))
        # A CSV file of one column may have no header: its first line is a label then.
        return _build(chain(columns, values) if suffix == ".csv" else values, str(path), _separator(path))
    raise ValueError(
        f"{path} must have a column {' or '.join(LABEL_COLUMNS)}, found {', '.join(map(printable, columns))}"
    )


def labels_from_table(path: Path, column: str) -> RawLabels:
    """The labels in a column of a table."""
    ids = parquet_ids(path, column) if path.suffix.lower() == ".parquet" else None
    if ids is not None:
        return RawLabels(ids, str(path))
    return _build((row[0] for row in table_rows(path, [column])), str(path), _separator(path))


def _separator(path: Path) -> str | None:
    """CSV has no lists; the other tables do, and a name may hold a `|` there."""
    return SEPARATOR if path.suffix.lower() == ".csv" else None


def _build(labels: Iterable[object], source: str, separator: str | None) -> RawLabels:
    builder = LabelBuilder(source, separator)
    with closing(counted(labels, f"Reading {source}")) as rows:
        for label in rows:
            builder.add(label)
    return builder.build()


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file, _text_errors(path):
        for line in file:
            yield line.rstrip("\n").strip()


def read_names(path: Path) -> list[str]:
    """Class names: the lines of a .txt file, or an array of strings in a .npy file."""
    if path.suffix.lower() == ".npy":
        return names_from_array(open_arrays(path)[""])
    names = list(_lines(path))
    if "" in names:
        raise ValueError(f"{path}, line {names.index('') + 1} is empty; give one class name in each line")
    return names


def names_from_array(stored: Stored) -> list[str]:
    """An array of strings [K] as a list."""
    if stored.dtype.kind not in "US" or len(stored.shape) != 1:
        raise TypeError(
            f"{_what(stored)} must be a list of strings, found {stored.dtype} of shape {list(stored.shape)}; save it "
            "as np.array(names, dtype=str)"
        )
    return [_text(name) for name in stored.array.tolist()]


def labels_from_array(stored: Stored, offsets: Stored | None = None) -> RawLabels:
    """Labels in an array: ids or names.

    Args:
        stored: [n], or [m] with offsets.
        offsets: [n + 1], where each row's labels begin and end; None for one label each.
    """
    what = _what(stored)
    if len(stored.shape) != 1:
        raise ValueError(
            f"{what} must have one dimension, found shape {list(stored.shape)}; for several labels in a row give "
            "labels [m] and label_offsets [n + 1]"
        )
    bounds = None if offsets is None else _check_offsets(offsets, len(stored))
    if stored.dtype.kind in "US":
        codes, names = _number_names(stored)
        if "" in names and bounds is None:
            row = int((codes == names.index("")).argmax())
            raise ValueError(f"{what} has no label in row {row:,} (counted from 0); give one or leave it out")
        return RawLabels(codes, what, names, bounds)
    if stored.dtype.kind not in "iu" or stored.bfloat16:
        raise TypeError(
            f"{what} must hold whole numbers or names, found {stored.dtype}; convert with .astype(np.int64)"
        )
    return RawLabels(stored.array, what, None, bounds)


def _what(stored: Stored) -> str:
    return f"array {stored.name!r} of {stored.path}" if stored.name else str(stored.path)


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")


def _number_names(stored: Stored) -> tuple[np.ndarray, list[str]]:
    """Names [n] as numbers [n] into a list of the different ones; in pieces, without a Python string for each row."""
    index: dict[str, int] = {}
    codes = np.empty(len(stored), dtype=np.int64)
    for start in range(0, len(stored), CHUNK):
        names, inverse = np.unique(stored.array[start : start + CHUNK], return_inverse=True)
        numbers = [index.setdefault(_text(name), len(index)) for name in names.tolist()]
        codes[start : start + CHUNK] = np.array(numbers, dtype=np.int64)[inverse.reshape(-1)]
    return codes, list(index)


def _check_offsets(offsets: Stored, count: int) -> np.ndarray:
    what = _what(offsets)
    if offsets.dtype.kind not in "iu" or len(offsets.shape) != 1 or len(offsets) < 1:
        raise TypeError(f"{what} must be whole numbers [n + 1], found {offsets.dtype} of shape {list(offsets.shape)}")
    bounds = np.asarray(offsets.array).astype(np.int64)
    if bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{what} must rise from 0 to the number of labels, {count:,}; found {bounds[0]} at the start, {bounds[-1]} "
            "at the end" + (", and a step back between" if (np.diff(bounds) < 0).any() else "")
        )
    return bounds
