"""Arrays in .npy, .npz and .safetensors files, mapped into memory where they are: nothing is read before it is used."""

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

COMPRESSED_LIMIT = 2**30
"""Compressed arrays cannot be mapped; up to this many bytes in one file they are loaded."""

BLOCK_BYTES = 2**24
"""How much is read at a time when all of an array is gone through."""

SAFETENSORS_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in a file, mapped when first read. Pickled, it is the place and not the numbers.

    Attributes:
        path: of the file.
        name: of the array, for errors.
        dtype: as stored; two-byte integers for bfloat16.
        shape: of the array.
        offset: where it starts, in bytes.
        fortran: whether columns lie together instead of rows.
        bfloat16: whether the integers are the upper halves of float32.
        held: the array itself, where it could not be mapped.
    """

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int = 0
    fortran: bool = False
    bfloat16: bool = False
    held: np.ndarray | None = None

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "array"}

    @cached_property
    def array(self) -> np.ndarray:
        """The array as stored, of shape `shape`; read-only."""
        if self.held is not None:
            return self.held
        if math.prod(self.shape) == 0:  # nothing cannot be mapped
            return np.empty(self.shape, self.dtype)
        order = "F" if self.fortran else "C"
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=self.shape, order=order)

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.bfloat16 or self.dtype.kind == "f"

    def block(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, [stop − start, ...]; floating-point numbers as float32."""
        return self._deliver(self.array[start:stop])

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Some rows [b], in any order, as [b, ...]; floating-point numbers as float32."""
        order = np.argsort(rows, kind="stable")  # read front to back
        found = self._deliver(self.array[rows[order]])
        out = np.empty_like(found)
        out[order] = found
        return out

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """All rows front to back: where each block starts, and the block."""
        row_bytes = max(1, self.dtype.itemsize * math.prod(self.shape[1:]))
        step = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, len(self), step):
            yield start, self.block(start, min(start + step, len(self)))

    def _deliver(self, found: np.ndarray) -> np.ndarray:
        if self.bfloat16:
            return (found.astype(np.uint32) << 16).view(np.float32)
        if self.dtype.kind != "f":
            return np.asarray(found)
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, which the check of values reports
            return np.asarray(found, dtype=np.float32)


def open_arrays(path: Path) -> dict[str, Stored]:
    """The arrays of a file by name; that of a .npy file is called "".

    Args:
        path: of a .npy, .npz or .safetensors file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    readers = {".npy": _open_npy, ".npz": _open_npz, ".safetensors": _open_safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} must end in .npy, .npz or .safetensors, found {path.suffix!r}")
    return reader(path)


def safetensors_metadata(path: Path) -> dict[str, str]:
    """The texts that a .safetensors file carries beside its arrays."""
    metadata = _safetensors_header(path)[0].get("__metadata__", {})
    return metadata if isinstance(metadata, dict) else {}


def _open_npy(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        return {"": _npy_at(file, path, "", 0, path.stat().st_size)}


def _npy_at(file: BinaryIO, path: Path, name: str, start: int, length: int) -> Stored:
    """The array whose .npy header is at `start` of a file that has `length` bytes for it."""
    what = f"array {name!r} of {path}" if name else str(path)
    file.seek(start)
    shape, fortran, dtype = _npy_header(file, what)
    offset = file.tell()
    needed = offset - start + dtype.itemsize * math.prod(shape)
    if needed > length:
        raise ValueError(f"{what} has {length:,} bytes and its header says {needed:,}: it was cut off; write it again")
    return Stored(path, name, dtype, shape, offset, fortran)


def _npy_header(file: Any, what: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        reader = readers[np.lib.format.read_magic(file)]
        shape, fortran, dtype = reader(file)
    except (ValueError, KeyError, EOFError, SyntaxError) as error:
        raise ValueError(f"{what} has no readable .npy header: write it again with numpy.save") from error
    if dtype.hasobject:
        raise ValueError(
            f"{what} holds Python objects (a pickle), which are never loaded; save names as strings "
            "(np.array(names, dtype=str)) and lists as label_offsets and labels"
        )
    if dtype.names is not None:
        raise ValueError(f"{what} is a structured array; save one plain array for each of {', '.join(dtype.names)}")
    return shape, bool(fortran), dtype


def _open_npz(path: Path) -> dict[str, Stored]:
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            _check_compressed(path, members)
            return {
                member.filename.removesuffix(".npy"): _npz_member(archive, file, path, member) for member in members
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error) as error:
        raise ValueError(f"{path} is no readable .npz file ({error}): it was cut off or damaged; write it again") from (
            error
        )


def _check_compressed(path: Path, members: list[zipfile.ZipInfo]) -> None:
    compressed = sum(member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED)
    if compressed > COMPRESSED_LIMIT:
        raise ValueError(
            f"{path} holds {compressed / 2**30:.1f} GB of compressed arrays, which cannot be mapped into memory; "
            "write it with numpy.savez (not savez_compressed) or as .npy files"
        )


def _npz_member(archive: zipfile.ZipFile, file: BinaryIO, path: Path, member: zipfile.ZipInfo) -> Stored:
    name = member.filename.removesuffix(".npy")
    if member.flag_bits & 1:
        raise ValueError(f"array {name!r} of {path} is encrypted; write it with numpy.savez")
    if member.compress_type == zipfile.ZIP_STORED:
        # The entry's own header, of 30 bytes, a name and extras, stands before its bytes.
        file.seek(member.header_offset + 26)
        start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        return _npy_at(file, path, name, start, min(member.file_size, path.stat().st_size - start))
    what = f"array {name!r} of {path}"
    with archive.open(member) as stream:
        shape, fortran, dtype = _npy_header(stream, what)
        body = stream.read()
    if dtype.itemsize * math.prod(shape) > len(body):
        raise ValueError(f"{what} is shorter than its header says: it was cut off; write it again")
    flat = np.frombuffer(body, dtype=dtype, count=math.prod(shape))
    held = flat.reshape(shape, order="F" if fortran else "C")
    return Stored(path, name, dtype, shape, held=held)


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the arrays start, and how many bytes the file has."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is not a table")
            return header, 8 + length, size
    except (ValueError, struct.error, RecursionError) as error:
        raise ValueError(f"{path} is no readable .safetensors file ({error}): write it again") from error


def _open_safetensors(path: Path) -> dict[str, Stored]:
    header, start, size = _safetensors_header(path)
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        what = f"array {name!r} of {path}"
        try:
            kind, shape = entry["dtype"], tuple(int(length) for length in entry["shape"])
            first, last = (int(place) for place in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{what} has no readable entry in the header: write the file again") from error
        if kind not in SAFETENSORS_TYPES:
            raise ValueError(f"{what} has type {kind}; store it as one of {', '.join(SAFETENSORS_TYPES)}")
        dtype = np.dtype(SAFETENSORS_TYPES[kind])
        if min(shape, default=0) < 0 or first < 0 or last - first != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{what} has a shape that does not fit its bytes: write the file again")
        if start + last > size:
            raise ValueError(f"{path} has {size:,} bytes and its header says {start + last:,}: it was cut off")
        arrays[name] = Stored(path, name, dtype, shape, start + first, bfloat16=kind == "BF16")
    return arrays
