"""Write files and directories atomically, with checksums.

Content is written under a unique temporary name, flushed to the disk and renamed; the rename is flushed too. If the
process is killed or the machine loses power, the old content or the new content remains, never a part.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

_BLOCK = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOST = (*_FULL, errno.EIO)
"""Flush errors that mean lost bytes. Other errors mean that the system cannot flush this kind of file."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary directory, and move it to `path` unless an error is raised.

    Other files written there whose names begin with its name move as well. The directory of `path` is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming_full(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        yield Path(directory) / path.name
        for file in sorted(Path(directory).iterdir(), reverse=True):  # NAME.data before NAME, which needs it
            file.chmod(0o644)
            sync(file)
            os.replace(file, path.parent / file.name)
        sync(path.parent)


@contextlib.contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces `path` unless an error is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming_full(path):
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield temporary
            temporary.chmod(0o755)
            sync_tree(temporary)
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def naming_full(path: Path) -> Iterator[None]:
    """Add the file's name to the error of a full disk, which a failed write does not name."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        advice = "; free some space and rerun the command"  # errors of files inside a directory already have it
        raise OSError(error.errno, f"{error.strerror}".removesuffix(advice) + advice, str(path)) from None


@contextlib.contextmanager
def whole_text(path: Path) -> Iterator[IO[str]]:
    """Yield a text file that is renamed to `path` when the block ends; line ends are written unchanged."""
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        yield file


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file with a function of its temporary path."""
    with whole_file(path) as temporary:
        write(temporary)


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes."""
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write JSON."""
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    # Characters that UTF-8 cannot encode, as in paths of another encoding, become JSON escapes and read back unchanged.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def json_checksum(content: Any) -> str:
    """Return the SHA-256 of JSON content; the order of keys does not matter."""
    try:
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise ValueError("JSON content is nested too deeply for a checksum") from None


CHECKED, CHECKSUM = "checked", "checksum"
"""The first and the last entry of a JSON object with a checksum: if one is damaged, the other shows it."""


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum."""
    # As it is read: lists for tuples, text for keys.
    stored: dict[str, Any] = json.loads(json.dumps({CHECKED: "sha256", **content}))
    write_json(path, stored | {CHECKSUM: json_checksum(stored)})


def read_checked(path: Path, instead: str) -> dict[str, Any]:
    """Read a file written by `write_checked`; raise a ValueError ending in the advice `instead` if it was changed."""
    content = parse_json(path.read_bytes(), str(path), dict)
    _verify(content, path, instead)
    return content


def read_json(path: Path, kind: type | None = None, finite: bool = True, instead: str = "restore or rewrite it") -> Any:
    """Read a JSON file and check that its content is of `kind`, such as dict; errors name the file.

    An object that carries a checksum is verified and returned without it; files of older versions carry none.
    """
    content = parse_json(path.read_bytes(), str(path), kind, finite)
    if isinstance(content, dict) and (CHECKED in content or CHECKSUM in content):
        _verify(content, path, instead)
    return content


def _verify(content: dict[str, Any], path: Path, instead: str) -> None:
    """Verify the checksum of a JSON object and remove it."""
    if content.pop(CHECKSUM, None) != json_checksum(content):
        raise ValueError(f"{path} was changed or damaged: its content does not match its checksum; {instead}")
    content.pop(CHECKED, None)


def parse_json(text: str | bytes, source: str, kind: type | None = None, finite: bool = True) -> Any:
    """Return the content of JSON text, or raise a ValueError that names its source.

    NaN and infinite numbers raise unless `finite` is False. Nesting too deep for Python to read raises too.
    """
    check = _finite if finite else None
    try:
        content = json.loads(text, parse_float=check, parse_constant=check)
    except RecursionError:
        raise ValueError(f"{source} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # of the decoder, of UTF-8, of an integer with too many digits
        raise ValueError(f"{source} is not valid JSON: {error}") from None
    if kind is not None and not isinstance(content, kind):
        raise ValueError(f"{source} must hold a JSON {_KINDS[kind]}, found {_shortened(content)}")
    return _Object(content, source) if isinstance(content, dict) else content


class _Object(dict[str, Any]):
    """A JSON object whose error for a missing entry names its source."""

    def __init__(self, content: dict[str, Any], source: str):
        super().__init__(content)
        self.source = source

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.source} has no entry {key!r}; restore it or write it again")

    def __reduce__(self) -> Any:  # pickled as a plain dict
        return dict, (dict(self),)


_KINDS = {dict: "object", list: "list", str: "text"}


@contextlib.contextmanager
def reading(path: Path, instead: str) -> Iterator[None]:
    """Add the file's name and the advice `instead` to errors of its content: missing entries, wrong types, or arrays
    too large for memory."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RuntimeError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        reason = " ".join(missing.partition("\n")[0].split())[:200] or type(error).__name__
        raise ValueError(f"{path} cannot be read ({reason}); {instead}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _shortened(content: Any) -> str:
    name = _KINDS.get(type(content))
    return f"{content!r:.40}" if name is None else f"a {name}" if name != "object" else "an object"


def write_array(path: Path, values: np.ndarray) -> None:
    """Write values of any shape as a .npy file, without Python objects."""
    if path.suffix != ".npy":
        raise ValueError(f"path must end in .npy, found {path}")
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, values, allow_pickle=False)


def write_arrays(path: Path, values: Mapping[str, Any], compressed: bool = True) -> None:
    """Write arrays, numbers and texts by name as a .npz file of any suffix; uncompressed files can be memory-mapped."""
    with whole_file(path) as temporary, open(temporary, "wb") as file:  # numpy would append .npz to a path
        (np.savez_compressed if compressed else np.savez)(file, **values)


def read_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Read the named arrays of a .npz file, or all; raise a ValueError that names the file if that fails."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        # Opened here, because numpy does not close damaged files.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in (file.files if names is None else names)}
    except Exception as error:  # numpy, zipfile, zlib, lzma and ast raise different errors for damaged bytes
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        reason = "Python objects are never loaded" if "pickle" in reason else reason
        raise ValueError(f"{path} is not an .npz file of arrays ({reason})") from None


def sha256_of(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits; `advance` is called with the bytes of each block read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()


def sync_tree(directory: Path) -> None:
    """Flush all files and directories below a directory to the disk."""
    for parent, _, names in os.walk(directory):
        for path in (*(Path(parent) / name for name in names), Path(parent)):
            if not path.is_symlink():
                sync(path)


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk, if the system supports it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows cannot open directories
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in _LOST:
            raise
    finally:
        os.close(handle)
