"""Files and directories that exist whole or not at all, and their checksums.

Each is written under a temporary name of its own, flushed to the disk and then renamed, and the rename is flushed too:
a process that is killed, or a machine that loses power, leaves the old content or the new, never a part.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = 2**20


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary directory; unless an error is raised, it and what else was written
    there, under names that begin with its own, move to the directory of `path`, which is created if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        yield Path(directory) / path.name
        for file in sorted(Path(directory).iterdir(), reverse=True):  # NAME.data before the NAME that needs it
            file.chmod(0o644)
            sync(file)
            os.replace(file, path.parent / file.name)
        sync(path.parent)


@contextlib.contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to write files to, which replaces `path` unless an error is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file by a function that is given its temporary name."""
    with whole_file(path) as temporary:
        write(temporary)


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes."""
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write JSON."""
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    # What UTF-8 has no bytes for, as in a path of another encoding, becomes JSON's own escape, and reads back the same.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> Any:
    """Read JSON; the error of a file that is not JSON names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def write_array(path: Path, values: np.ndarray) -> None:
    """Write a .npy file of values of any shape, but no Python objects."""
    if path.suffix != ".npy":
        raise ValueError(f"path must end in .npy, found {path}")
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, values, allow_pickle=False)


def write_arrays(path: Path, values: Mapping[str, Any]) -> None:
    """Write arrays, numbers and texts by name as a compressed .npz file, whatever its suffix."""
    with whole_file(path) as temporary, open(temporary, "wb") as file:  # given a name, numpy would add its own ending
        np.savez_compressed(file, **values)


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
    """Flush all files below a directory to the disk, and the directories' lists of them."""
    for parent, _, names in os.walk(directory):
        for path in (*(Path(parent) / name for name in names), Path(parent)):
            if not path.is_symlink():
                sync(path)


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk, where the system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no directories
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
