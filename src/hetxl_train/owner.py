"""The one process that may write to a directory at a time."""

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
"""The file that the owner holds locked; it says which process on which machine that is."""


class OwnedError(OSError):
    """Another process works in the directory; the message says which."""


@contextlib.contextmanager
def owned(directory: Path) -> Iterator[Path]:
    """Own a directory, which is created if need be, inside the block; raise an OwnedError if another process does.

    The system releases the lock when the process ends, however it ends. What a killed owner left half-written is
    removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with _locked(path) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        remove_leftovers(directory)
        try:
            yield directory
        finally:
            if fcntl is not None:  # Windows removes no open file
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
            # The owner before may have removed the file between its opening and its locking here.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                yield file
                return


def _lock(file: IO[str]) -> None:
    """Lock a file or raise an OSError at once."""
    if fcntl is not None:
        # Of the process, not of the open file: workers that outlive a killed process do not hold it.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # others: the file system has no locks
                raise
    else:
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore
