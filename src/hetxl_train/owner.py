"""Ensure that only one process at a time writes to a directory."""

import contextlib
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"
"""The lock file, which names the owning process and its machine."""


class OwnedError(OSError):
    """Another process uses the directory; the message names it."""


@contextlib.contextmanager
def owned(directory: Path) -> Iterator[Path]:
    """Own a directory inside the block, and create it if missing; raise an OwnedError if another process owns it.

    The system releases the lock when the process ends in any way. Half-written files of a killed owner are removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with _locked(path) as file:
        try:
            with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, and names no process
                file.truncate(0)
                os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
            remove_leftovers(directory)
            yield directory
        finally:
            if fcntl is not None:  # Windows cannot remove open files
                path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary directories of `hetxl._files` below a directory that no other process writes to."""
    for parent, names, _ in os.walk(directory):
        for name in [name for name in names if re.fullmatch(r"\..+\.[a-z0-9_]{8}", name)]:
            shutil.rmtree(Path(parent) / name, ignore_errors=True)
            names.remove(name)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    while True:
        with open(path, "a+", encoding="utf-8") as file:
            try:
                _lock(file)
            except OSError:
                file.seek(0)
                owner = file.read(200).strip() or "another process"
                raise OwnedError(
                    f"{path.parent} is in use by {owner}; wait until it ends, or choose another --out"
                ) from None
            # The previous owner may have removed the file after it was opened here and before it was locked.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                yield file
                return


def _lock(file: IO[str]) -> None:
    """Lock a file or raise an OSError at once."""
    if fcntl is not None:
        # A lock of the process, not of the open file, so that workers that outlive a killed process do not hold it.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # other errors mean that the file system has no locks
                raise
    else:
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore
