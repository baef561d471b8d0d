"""Files of built data: checksums, and writes that are whole or not there."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = 2**20


def sha256_of(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal digits.

    Args:
        path: of the file.
        advance: told how many bytes more were read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()


def write_array(path: Path, values: np.ndarray) -> None:
    """Write a .npy file under another name, flush it to the disk, then give it its name.

    Args:
        path: of the file, with its suffix.
        values: any shape; no Python objects.
    """
    if path.suffix != ".npy":
        raise ValueError(f"path must end in .npy, found {path}")
    write_whole(path, lambda name: _save(name, values))


def write_arrays(path: Path, values: Mapping[str, Any]) -> None:
    """Write a compressed .npz file in the same way, whatever its suffix.

    Args:
        path: of the file.
        values: arrays, numbers and texts by name.
    """

    def write(name: Path) -> None:
        with open(name, "wb") as file:  # given a name, numpy would add its own ending
            np.savez_compressed(file, **values)

    write_whole(path, write)


def write_json(path: Path, values: object) -> None:
    """Write JSON in the same way.

    Args:
        path: of the file, with its suffix.
        values: what JSON can hold.
    """
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, lambda name: name.write_bytes(text.encode("utf-8")))


def sync_tree(folder: Path) -> None:
    """Flush all files below a folder to the disk, and the folders' lists of them.

    Args:
        folder: that is about to get its name.
    """
    for parent, _, names in os.walk(folder):
        for path in (*(Path(parent) / name for name in names), Path(parent)):
            if not path.is_symlink():
                sync(path)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk, where the system can.

    Args:
        path: of either.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _save(path: Path, values: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, values, allow_pickle=False)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, flush it to the disk, then give it its name: it is there whole or not at all.

    Args:
        path: of the file; its folder is made if need be.
        write: writes what is given another name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer: several may write the same file.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
