"""The cache directory, and copies of data without random access."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hetxl._files import sha256_of, write_bytes
from hetxl_train.console import Console, progress_bar
from hetxl_train.data.remote import open_address

GB = 2**30
HELD = GB // 4  # bytes; smaller copies stay in memory
LIMIT = 100 * GB  # the largest copy, unless $HETXL_CACHE_LIMIT says otherwise


def cache_directory(cache: Path | None = None) -> Path | None:
    """Return `cache`, or $HETXL_CACHE, or ~/.cache/hetxl; it need not exist. None if the user has no home directory."""
    try:
        return Path(cache or os.environ.get("HETXL_CACHE") or "~/.cache/hetxl").expanduser()
    except RuntimeError:
        return None


def make_cache_directory(cache: Path | None = None) -> Path:
    """Return the directory of `cache_directory`, created if needed; an OSError says what to set if that fails."""
    directory = cache_directory(cache)
    try:
        if directory is None:
            raise OSError("the user has no home directory")
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache directory cannot be created ({error}); set HETXL_CACHE to a writable directory"
        ) from error
    return directory


def fingerprint_of(addresses: Sequence[str], *more: str) -> str:
    """Return a name that changes with the size or modification time of one of the files."""
    key = [*more]
    for address in addresses:
        fs, path = open_address(address)
        info = fs.info(path)
        changed = next((str(info[name]) for name in ("mtime", "ETag", "etag", "LastModified") if name in info), "")
        key += [fs.unstrip_protocol(path), str(info["size"]), changed]
    return hashlib.blake2b("\0".join(key).encode(errors="replace"), digest_size=8).hexdigest()


def write_checksum(path: Path) -> None:
    """Write the checksum of a copy, a file or a directory, to a file with its name."""
    write_bytes(_checksum_path(path), _checksum(path).encode())


def is_whole(path: Path) -> bool | None:
    """Return whether a copy matches its checksum; None if one of the two does not exist."""
    if not path.exists() or not _checksum_path(path).exists():
        return None
    return _checksum_path(path).read_bytes() == _checksum(path).encode()


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checksum(path: Path) -> str:
    files = sorted(file for file in path.rglob("*.arrow")) if path.is_dir() else [path]
    with progress_bar(f"Checking {path.name}", sum(file.stat().st_size for file in files)) as advance:
        return " ".join(sha256_of(file, advance) for file in files)


def announce_copy(source: str, column: str, size: int, directory: Path) -> None:
    """Print that a column is copied, how large it is and where to; raise an OSError if it is too large."""
    limit = float(os.environ.get("HETXL_CACHE_LIMIT") or LIMIT / GB) * GB
    free = shutil.disk_usage(directory).free
    what = f"a copy of column {column!r} of {source} takes {size / GB:.1f} GB"
    if size > limit:
        raise OSError(
            f"{what}, above the limit of {limit / GB:.0f} GB; set HETXL_CACHE_LIMIT to more (in GB), or store "
            "embeddings as .npy and images as .tar shards, which are not copied"
        )
    if size > free:
        raise OSError(f"{what}, but {directory} has {free / GB:.1f} GB free; set HETXL_CACHE to a directory with more")
    Console().say(
        f"Copying column {column!r} of {source} ({size / GB:.1f} GB) to {directory} once, so that its rows can be read "
        "in any order"
    )
