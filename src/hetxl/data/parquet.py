"""Parquet files: columns as rows of a table, and a column of embeddings as an array that can be mapped into memory."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data.corpus_cache import cache_folder
from hetxl.data.progress import progress_bar
from hetxl.data.stored import Stored, open_arrays

ROWS_AT_A_TIME = 4096


def parquet_columns(path: Path) -> list[str]:
    """The names of a file's columns."""
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a file front to back, each with the columns asked for."""
    with _opened(path) as file:
        for batch in file.iter_batches(ROWS_AT_A_TIME, columns=list(columns)):
            yield from batch.to_pylist()


def parquet_ids(path: Path, column: str) -> np.ndarray | None:
    """A column of whole numbers, one in each row, as [n] int64; None if it is another kind of column or has gaps."""
    with _opened(path) as file:
        import pyarrow as pa

        if not pa.types.is_integer(file.schema_arrow.field(column).type):
            return None
        ids = np.empty(file.metadata.num_rows, dtype=np.int64)
        done = 0
        for batch in file.iter_batches(ROWS_AT_A_TIME, columns=[column]):
            if batch.column(0).null_count:
                return None
            ids[done : done + len(batch)] = batch.column(0).to_numpy()
            done += len(batch)
    return ids


def parquet_features(path: Path, column: str, cache: Path | None = None) -> Stored:
    """A column of equally long lists of numbers as an array [n, D] in a file of the cache.

    A parquet file cannot be read row by row in any order. The column is written once, row group by row group, to a .npy
    file, and found there the next time as long as the parquet file has not changed.

    Args:
        path: the parquet file.
        column: name of the column.
        cache: folder for the array; by default $HETXL_CACHE, or ~/.cache/hetxl.
    """
    state = path.stat()
    key = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\0{column}"
    folder = _made_cache(cache)
    target = folder / f"{path.stem[:40]}-{hashlib.blake2b(key.encode(errors='replace'), digest_size=8).hexdigest()}.npy"
    with _opened(path) as file:
        rows = file.metadata.num_rows
        if target.is_file():
            try:
                stored = open_arrays(target)[""]
                if len(stored) == rows:
                    return stored
            except ValueError:
                pass  # cut off or damaged: written again
        if rows == 0:
            raise ValueError(f"{path} has no rows")
        _write_column(file, path, column, rows, target)
    return open_arrays(target)[""]


def _made_cache(cache: Path | None) -> Path:
    """The folder for the arrays, made if it is not there."""
    folder = cache_folder(cache)
    try:
        if folder is None:
            raise OSError("the user has no home")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the cache folder cannot be made ({error}); set HETXL_CACHE to a folder for it") from error
    return folder


def _write_column(file: Any, path: Path, column: str, rows: int, target: Path) -> None:
    """To a temporary file first: what has the target's name is whole."""
    width, done, temporary = None, 0, None
    try:
        with (
            tempfile.NamedTemporaryFile(dir=target.parent, suffix=".tmp", delete=False) as out,
            progress_bar(f"Reading {path.name}", rows) as advance,
        ):
            temporary = Path(out.name)
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=[column]):
                block = _as_matrix(batch.column(0), path, column, done)
                if width is None:
                    width = block.shape[1]
                    _check_room(target.parent, rows * width * block.dtype.itemsize)
                    header = {"descr": block.dtype.str, "fortran_order": False, "shape": (rows, width)}
                    np.lib.format.write_array_header_1_0(out, header)
                if block.shape[1] != width:
                    raise ValueError(
                        f"{path}: column {column!r} has {width} numbers in row 0 and {block.shape[1]} in "
                        f"row {done}; all rows must have as many"
                    )
                out.write(np.ascontiguousarray(block).tobytes())
                done += len(block)
                advance(len(block))
        os.replace(temporary, target)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"the cache folder {folder} has {free / 2**30:.1f} GB free, and {needed / 2**30:.1f} GB are needed; set "
            "HETXL_CACHE to a folder with more, or store the features as .npy"
        )


def _as_matrix(values: Any, path: Path, column: str, first: int) -> np.ndarray:
    """Lists of numbers as [b, D] of float32, or of float16 where that is how they are stored."""
    import pyarrow as pa

    what = f"{path}: column {column!r}"
    kind = values.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ValueError(f"{what} must hold lists of numbers, found {kind}")
    if not pa.types.is_floating(kind.value_type):
        raise TypeError(f"{what} must hold floating-point numbers, found {kind.value_type}; store it as float32")
    if values.null_count:
        row = first + int(np.asarray(values.is_null()).argmax())
        raise ValueError(f"{what} has nothing in row {row:,}; leave it out")
    lengths = _lengths(values)
    if (lengths != lengths[0]).any():
        row = int((lengths != lengths[0]).argmax())
        raise ValueError(
            f"{what} has {lengths[0]} numbers in row {first:,} and {lengths[row]} in row {first + row:,}; all rows "
            "must have as many"
        )
    dtype = np.float16 if pa.types.is_float16(kind.value_type) else np.float32
    # A missing number becomes NaN, which the check of values reports with its row.
    with np.errstate(over="ignore"):
        flat = values.flatten().to_numpy(zero_copy_only=False).astype(dtype)
    return flat.reshape(len(values), int(lengths[0]))


def _lengths(values: Any) -> np.ndarray:
    """How long each list of a column without missing ones is, [b]."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(values.type):
        return np.full(len(values), values.type.list_size)
    return np.diff(values.offsets.to_numpy())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
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
        raise ValueError(f"{path} is no readable parquet file ({reason}): it was cut off or damaged") from error
