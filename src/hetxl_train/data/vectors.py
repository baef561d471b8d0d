"""Columns of embeddings in Arrow tables as arrays [n, D]."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetxl._files import whole_file
from hetxl_train.console import progress_bar
from hetxl_train.data.cache import HELD, announce_copy, fingerprint_of, is_whole, make_cache_directory, write_checksum
from hetxl_train.data.mapped_arrays import MappedArray, open_arrays

TIME = 1e9
"""When a copy says it was written: processes that write the same one at once do not change it for each other."""


def vectors_in_memory(batches: Iterable[Any], rows: int, source: str, column: str) -> MappedArray:
    """Return a column as an array [n, D] in memory."""
    blocks = list(_matrices(batches, rows, source, column))
    return MappedArray.in_memory(np.concatenate(blocks) if blocks else np.empty((0, 1), np.float32), source, column)


def stored_vectors(
    batches: Callable[[], Iterable[Any]],
    rows: int,
    source: str,
    column: str,
    files: Sequence[str] = (),
    cache: Path | None = None,
) -> MappedArray:
    """Return a column of equally long lists of numbers as an array [n, D].

    A large one is written once, batch by batch, to a file of the cache, which is used again until `files` change; it
    stays in memory if it is small or from no file.
    """
    if rows == 0:
        raise ValueError(f"{source} has no rows")
    first = next(_matrices(batches(), 0, source, column))
    size = rows * first.shape[1] * first.dtype.itemsize
    if size <= HELD or not files:
        return vectors_in_memory(batches(), rows, source, column)
    directory = make_cache_directory(cache)
    target = directory / f"{Path(files[0]).stem[:40]}-{fingerprint_of(files, column)}.npy"
    if not is_whole(target):
        announce_copy(source, column, size, directory)
        with whole_file(target) as temporary:
            _write(batches(), rows, source, column, first, temporary)
            os.utime(temporary, (TIME, TIME))
            write_checksum(temporary)
    return open_arrays(target)[""].called(source, column)


def _write(batches: Iterable[Any], rows: int, source: str, column: str, first: np.ndarray, target: Path) -> None:
    header = {"descr": first.dtype.str, "fortran_order": False, "shape": (rows, first.shape[1])}
    with target.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, header)
        for block in _matrices(batches, rows, source, column):
            out.write(np.ascontiguousarray(block).tobytes())


def _matrices(batches: Iterable[Any], rows: int, source: str, column: str) -> Iterator[np.ndarray]:
    """Yield blocks [b, D] of the same D."""
    width, done = None, 0
    with progress_bar(f"Reading {source}", rows or None) as advance:
        for batch in batches:
            values = batch.column(column)
            block = _as_matrix(values.combine_chunks() if hasattr(values, "chunks") else values, source, column, done)
            width = block.shape[1] if width is None else width
            if block.shape[1] != width:
                raise ValueError(uneven(source, column, 0, width, done, block.shape[1]))
            yield block
            done += len(block)
            advance(len(block))


def uneven(source: str, column: str, first: int, width: int, row: int, length: int) -> str:
    """Return the error of a column whose lists differ in length."""
    return (
        f"{source}: column {column!r} has {width} numbers in row {first:,} and {length} in row {row:,}; all rows must "
        "have the same length"
    )


def _as_matrix(values: Any, source: str, column: str, first: int) -> np.ndarray:
    """Return lists of numbers as [b, D] of float32, or of float16 if stored so."""
    import pyarrow as pa

    what = f"{source}: column {column!r}"
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
        raise ValueError(uneven(source, column, first, int(lengths[0]), first + row, int(lengths[row])))
    dtype = np.float16 if pa.types.is_float16(kind.value_type) else np.float32
    # A missing number becomes NaN, which the check of values reports with its row.
    with np.errstate(over="ignore"):
        flat = values.flatten().to_numpy(zero_copy_only=False).astype(dtype)
    return flat.reshape(len(values), int(lengths[0]))
