"""Arrays in .npy, .npz and .safetensors files, memory-mapped: nothing is read before it is used."""

import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from hetxl._files import parse_json

COMPRESSED_LIMIT = 2**30  # compressed arrays cannot be mapped; up to this many bytes in one file they are loaded
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, struct.error, OSError, NotImplementedError)
"""What reading a damaged archive raises."""
BLOCK_BYTES = 2**24  # how much is read at a time when a whole array is scanned
SAFETENSORS_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?"}
SAFETENSORS_TYPES |= {f"{sign}{8 * size}": f"<{sign.lower()}{size}" for sign in "IU" for size in (8, 4, 2, 1)}
"""Types of .safetensors files as numpy has them; bfloat16 as two-byte integers."""


@dataclass(frozen=True, eq=False)
class MappedArray:
    """An array in a file, mapped when first read. Its pickle holds the location, not the numbers."""

    path: Path
    name: str  # the array's name, for errors
    dtype: np.dtype  # as stored; two-byte integers for bfloat16
    shape: tuple[int, ...]
    offset: int = 0  # its first byte in the file
    fortran: bool = False  # whether it is stored column by column
    bfloat16: bool = False  # whether the integers are the upper halves of float32
    held: np.ndarray | None = None  # the array itself, if it could not be mapped
    source: str = ""  # what it was copied from, for errors: users do not know the files of the cache
    stamp: tuple[int, int] | None = None  # size and time of the file when it was opened; None for an array not in one

    @classmethod
    def in_memory(cls, array: np.ndarray, source: str, name: str) -> "MappedArray":
        """Return an array that is in no file; errors name the source that it was read from."""
        return cls(Path(source), name, array.dtype, array.shape, held=array, source=source)

    def called(self, source: str, name: str) -> "MappedArray":
        """Return the same array, which errors name as a column of the source that it was copied from."""
        return replace(self, source=source, name=name)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __str__(self) -> str:
        if self.source:
            return f"column {self.name!r} of {self.source}"
        return f"array {self.name!r} of {self.path}" if self.name else str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "array"}

    @cached_property
    def array(self) -> np.ndarray:
        """The array as stored, of shape `shape`; read-only."""
        if self.held is not None:
            return self.held
        if math.prod(self.shape) == 0:  # an empty range cannot be mapped
            return np.empty(self.shape, self.dtype)
        order = "F" if self.fortran else "C"
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=self.shape, order=order)

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.bfloat16 or self.dtype.kind == "f"

    @property
    def is_integer(self) -> bool:
        """Whether it holds whole numbers."""
        return self.dtype.kind in "iu" and not self.bfloat16

    def check_unchanged(self) -> None:
        """Raise if the file was changed since it was opened; reading one that was cut off would kill the process."""
        if self.held is None and self.stamp is not None:
            check_unchanged(self.path, self.stamp)

    def block(self, start: int, stop: int) -> np.ndarray:
        """Read rows start to stop, [stop − start, ...]; floating-point numbers as float32."""
        self.check_unchanged()
        return self._convert(self.array[start:stop])

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Read rows [b], in any order, as [b, ...]; floating-point numbers as float32."""
        self.check_unchanged()
        order = np.argsort(rows, kind="stable")  # read front to back
        values = self._convert(self.array[rows[order]])
        out = np.empty_like(values)
        out[order] = values
        return out

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Read all rows front to back: yield where each block starts, and the block."""
        row_bytes = max(1, self.dtype.itemsize * math.prod(self.shape[1:]))
        step = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, len(self), step):
            yield start, self.block(start, min(start + step, len(self)))

    def _convert(self, values: np.ndarray) -> np.ndarray:
        if self.bfloat16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        if self.dtype.kind != "f":
            return np.asarray(values)
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, which the check of values reports
            return np.asarray(values, dtype=np.float32)


def open_arrays(path: Path) -> dict[str, MappedArray]:
    """Return the arrays of a .npy, .npz or .safetensors file by name; that of a .npy file is called ""."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    readers = {".npy": _open_npy, ".npz": _open_npz, ".safetensors": _open_safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} must end in .npy, .npz or .safetensors, found {path.suffix!r}")
    before = stamp(path)
    arrays = reader(path)
    return {name: replace(array, stamp=before) if array.held is None else array for name, array in arrays.items()}


class ChangedError(OSError):
    """A file that was changed while it was in use; the message names it."""


def stamp(file: str | Path | int) -> tuple[int, int]:
    """Return what changes when a file does, by its path or as it is open: its size and its time."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def check_unchanged(path: str | Path, before: tuple[int, int], opened: int | None = None) -> None:
    """Raise if a file does not have the stamp that it had; `opened` if it is open."""
    if stamp(path if opened is None else opened) != before:
        raise ChangedError(f"{path} was changed while it was in use; rerun the command on the new content")


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Return the texts that a .safetensors file carries beside its arrays."""
    return _safetensors_header(path)[0].get("__metadata__") or {}


def _open_npy(path: Path) -> dict[str, MappedArray]:
    with path.open("rb") as file:
        return {"": _npy_at(file, path, "", 0, path.stat().st_size)}


def _npy_at(file: BinaryIO, path: Path, name: str, start: int, length: int) -> MappedArray:
    """Return the array whose .npy header is at `start` of a file that has `length` bytes for it."""
    file.seek(start)
    shape, fortran, dtype = _npy_header(file, path, name)
    array = MappedArray(path, name, dtype, shape, file.tell(), fortran)
    needed = array.offset - start + dtype.itemsize * math.prod(shape)
    if needed > length:
        raise ValueError(f"{array} has {length:,} bytes but its header says {needed:,}: it was cut off; write it again")
    return array


def _npy_header(file: Any, path: Path, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    what = f"array {name!r} of {path}" if name else str(path)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        reader = readers[np.lib.format.read_magic(file)]
        shape, fortran, dtype = reader(file)
    except Exception as error:  # numpy reads the header as Python source, and passes on what that raises
        raise ValueError(f"{what} has no readable .npy header: write it again with numpy.save") from error
    if any(size < 0 for size in shape) or (dtype.itemsize == 0 and math.prod(shape)):
        raise ValueError(f"{what} has shape {list(shape)} of {dtype} in its header: it is damaged; write it again")
    if dtype.hasobject:
        raise ValueError(
            f"{what} holds Python objects (a pickle), which are never loaded; save names as strings "
            "(np.array(names, dtype=str)) and lists as label_offsets and labels"
        )
    if dtype.names is not None:
        raise ValueError(f"{what} is a structured array; save one plain array for each of {', '.join(dtype.names)}")
    return shape, bool(fortran), dtype


def _open_npz(path: Path) -> dict[str, MappedArray]:
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            compressed = sum(member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED)
            if compressed > COMPRESSED_LIMIT:
                raise ValueError(
                    f"{path} holds {compressed / 2**30:.1f} GB of compressed arrays, which cannot be mapped into "
                    "memory; write it with numpy.savez (not savez_compressed) or as .npy files"
                )
            names = [member.filename for member in members]
            if twice := sorted({name.removesuffix(".npy") for name in names if names.count(name) > 1}):
                raise ValueError(f"{path} holds {', '.join(twice)} twice; write each array once")
            arrays = (_npz_member(archive, file, path, member) for member in members)
            return {array.name: array for array in arrays}
    except _DAMAGED as error:
        message = f"{path} is not a readable .npz file ({error}): it was cut off or damaged; write it again"
        raise ValueError(message) from error


def _npz_member(archive: zipfile.ZipFile, file: BinaryIO, path: Path, member: zipfile.ZipInfo) -> MappedArray:
    name = member.filename.removesuffix(".npy")
    if member.flag_bits & 1:
        raise ValueError(f"array {name!r} of {path} is encrypted; write it with numpy.savez")
    if member.compress_type == zipfile.ZIP_STORED:
        # The entry's own header, of 30 bytes, a name and extras, precedes its bytes.
        file.seek(member.header_offset + 26)
        start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        return _npy_at(file, path, name, start, min(member.file_size, path.stat().st_size - start))
    with archive.open(member) as stream:
        shape, fortran, dtype = _npy_header(stream, path, name)
        body = stream.read()
    if dtype.itemsize * math.prod(shape) > len(body):
        raise ValueError(f"array {name!r} of {path} is shorter than its header says: it was cut off; write it again")
    flat = np.frombuffer(body, dtype=dtype, count=math.prod(shape))
    return MappedArray(path, name, dtype, shape, held=flat.reshape(shape, order="F" if fortran else "C"))


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the first byte of the arrays; `safe_open` checks that both fit the file."""
    try:
        with safe_open(path, "np"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return parse_json(file.read(length), f"the header of {path}", dict), 8 + length
    except SafetensorError as error:
        message = f"{path} is not a readable .safetensors file ({error}): it was cut off or damaged; write it again"
        raise ValueError(message) from error


def _open_safetensors(path: Path) -> dict[str, MappedArray]:
    header, start = _safetensors_header(path)
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind = entry["dtype"]
        if kind not in SAFETENSORS_TYPES:
            types = ", ".join(SAFETENSORS_TYPES)
            raise ValueError(f"array {name!r} of {path} has type {kind}; store it as one of {types}")
        numbers = [*entry["shape"], *entry["data_offsets"]]
        if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
            raise ValueError(f"array {name!r} of {path} is damaged: its shape or offset is not a number")
        offset = start + entry["data_offsets"][0]
        dtype, shape = np.dtype(SAFETENSORS_TYPES[kind]), tuple(entry["shape"])
        arrays[name] = MappedArray(path, name, dtype, shape, offset, bfloat16=kind == "BF16")
    return arrays
