"""Tables with one example in each row (CSV, JSON lines, parquet), label files, and parquet columns of embeddings."""

import csv
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hetxl._files import write_whole
from hetxl_train.console import counted, progress_bar
from hetxl_train.data.cache import make_cache_directory
from hetxl_train.data.labels import CHUNK, LabelBuilder, RawLabels, some
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays

LABEL_COLUMNS = ("label", "labels", "class", "target", "targets", "y")
SPLIT_COLUMNS = ("split",)
TABLE_SUFFIXES = (".csv", ".jsonl", ".parquet")
LABEL_SUFFIXES = (".npy", ".txt", ".csv", ".jsonl", ".parquet")
SEPARATOR = "|"  # between the labels of one row, in text files
PARQUET_BATCH = 4096  # rows of a parquet file that are read at a time


def find_column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column with the first of the names that a table has, ignoring case; None if it has none of them."""
    by_name = {column.strip().lower(): column for column in reversed(columns)}
    return next((by_name[name] for name in names if name in by_name), None)


def require_column(path: Path, columns: Sequence[str], names: Sequence[str]) -> str:
    """Return the column with the first of the names that a table has, or raise a ValueError."""
    column = find_column(columns, names)
    if column is None:
        raise ValueError(f"{path} must have a column {' or '.join(names)}, found {some(columns, 20) or 'none'}")
    return column


def table_columns(path: Path) -> list[str]:
    """Return the columns of a table; of JSON lines, those of the first row."""
    if path.suffix.lower() == ".parquet":
        return parquet_columns(path)
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file, _text_errors(path):
            return next(_csv_reader(file), [])
    return next((list(row) for row in _json_rows(path)), [])


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of some of the `table_columns` of a .csv, .jsonl or .parquet file, row by row."""
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
        indices = [header.index(column) for column in columns]
        for row in reader:
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(row)} fields where the header has {len(header)}; quote "
                    "fields that hold a comma"
                )
            yield [row[index] for index in indices]


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
    """Name the file that cannot be read as text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a readable CSV file ({error})") from error


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
        return _build(_lines(path), str(path), SEPARATOR)
    if suffix not in TABLE_SUFFIXES:
        raise ValueError(f"labels must be a file that ends in {', '.join(LABEL_SUFFIXES)}; found {path}")
    columns = table_columns(path)
    if find_column(columns, LABEL_COLUMNS) is None and len(columns) == 1:
        values = (row[0] for row in table_rows(path, columns))
        # A CSV file of one column may have no header: its first line is a label then.
        return _build(chain(columns, values) if suffix == ".csv" else values, str(path), separator_of(path))
    return labels_from_table(path, require_column(path, columns, LABEL_COLUMNS))


def labels_from_table(path: Path, column: str) -> RawLabels:
    """Read the labels in a column of a table."""
    ids = parquet_ids(path, column) if path.suffix.lower() == ".parquet" else None
    if ids is not None:
        return RawLabels(ids, str(path))
    return _build((row[0] for row in table_rows(path, [column])), str(path), separator_of(path))


def separator_of(path: Path) -> str | None:
    """Return what separates the labels of a row: CSV has no lists; other tables do, and names may hold a `|` there."""
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


def parquet_columns(path: Path) -> list[str]:
    """Return the names of a parquet file's columns."""
    with _open_parquet(path) as file:
        return list(file.schema_arrow.names)


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, each with the columns asked for."""
    with _open_parquet(path) as file:
        for batch in file.iter_batches(PARQUET_BATCH, columns=list(columns)):
            yield from batch.to_pylist()


def parquet_ids(path: Path, column: str) -> np.ndarray | None:
    """Read a column of whole numbers as [n] int64; None if it is another kind of column or has gaps."""
    with _open_parquet(path) as file:
        import pyarrow as pa

        if not pa.types.is_integer(file.schema_arrow.field(column).type):
            return None
        values = file.read([column]).column(0)
        return None if values.null_count else values.to_numpy().astype(np.int64, copy=False)


def parquet_features(path: Path, column: str, cache: Path | None = None) -> MappedArray:
    """Return a column of equally long lists of numbers as an array [n, D] in a file of the cache.

    A parquet file cannot be read row by row in any order. The column is written once, batch by batch, to a .npy file,
    which is used again as long as the parquet file has not changed.
    """
    state = path.stat()
    key = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{column}"
    digest = hashlib.blake2b(key.encode(errors="replace"), digest_size=8).hexdigest()
    target = make_cache_directory(cache) / f"{path.stem[:40]}-{digest}.npy"
    with _open_parquet(path) as file:
        rows = file.metadata.num_rows
        with suppress(FileNotFoundError, ValueError):  # cut off or damaged: written again
            array = open_arrays(target)[""]
            if len(array) == rows:
                return array
        if rows == 0:
            raise ValueError(f"{path} has no rows")
        write_whole(target, lambda temporary: _write_column(file, path, column, temporary))
    return open_arrays(target)[""]


def _write_column(file: Any, path: Path, column: str, target: Path) -> None:
    width, done, rows = None, 0, file.metadata.num_rows
    with target.open("wb") as out, progress_bar(f"Reading {path.name}", rows) as advance:
        for batch in file.iter_batches(PARQUET_BATCH, columns=[column]):
            block = _as_matrix(batch.column(0), path, column, done)
            if width is None:
                width = block.shape[1]
                needed, free = rows * width * block.dtype.itemsize, shutil.disk_usage(target.parent).free
                if needed > free:
                    raise OSError(
                        f"the cache directory {target.parent} has {free / 2**30:.1f} GB free, but {needed / 2**30:.1f} "
                        "GB are needed; set HETXL_CACHE to a directory with more, or store the features as .npy"
                    )
                header = {"descr": block.dtype.str, "fortran_order": False, "shape": (rows, width)}
                np.lib.format.write_array_header_1_0(out, header)
            if block.shape[1] != width:
                raise ValueError(_uneven(path, column, 0, width, done, block.shape[1]))
            out.write(np.ascontiguousarray(block).tobytes())
            done += len(block)
            advance(len(block))


def _uneven(path: Path, column: str, first: int, width: int, row: int, length: int) -> str:
    return (
        f"{path}: column {column!r} has {width} numbers in row {first:,} and {length} in row {row:,}; all rows must "
        "have the same length"
    )


def _as_matrix(values: Any, path: Path, column: str, first: int) -> np.ndarray:
    """Return lists of numbers as [b, D] of float32, or of float16 if stored so."""
    import pyarrow as pa

    what = f"{path}: column {column!r}"
    kind = values.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ValueError(f"{what} must hold lists of numbers, found {kind}")
    if not pa.types.is_floating(kind.value_type):
        raise TypeError(f"{what} must hold floating-point numbers, found {kind.value_type}; store it as float32")
    if values.null_count:
        row = first + int(np.asarray(values.is_null()).argmax())
        raise ValueError(f"{what} has no list in row {row:,}; leave it out")
    fixed = pa.types.is_fixed_size_list(kind)
    lengths = np.full(len(values), kind.list_size) if fixed else np.diff(values.offsets.to_numpy())
    if (lengths != lengths[0]).any():
        row = int((lengths != lengths[0]).argmax())
        raise ValueError(_uneven(path, column, first, int(lengths[0]), first + row, int(lengths[row])))
    dtype = np.float16 if pa.types.is_float16(kind.value_type) else np.float32
    # A missing number becomes NaN, which the check of values reports with its row.
    with np.errstate(over="ignore"):
        flat = values.flatten().to_numpy(zero_copy_only=False).astype(dtype)
    return flat.reshape(len(values), int(lengths[0]))


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow: pip install pyarrow") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a readable parquet file ({reason}): it was cut off or damaged") from error
