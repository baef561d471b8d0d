"""Remote files (`s3://…`, `https://…`, `memory://…`) through fsspec, in addition to local paths."""

import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def is_remote(address: object) -> bool:
    """Return whether an address is a URL for fsspec and not a local path."""
    return "://" in str(address)


def open_address(address: str | Path) -> tuple[Any, str]:
    """Return the file system of an address and the path there."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(str(address))
    except ImportError as error:
        raise ImportError(f"{address} needs a package of fsspec: {error}") from error
    except ValueError as error:
        raise ValueError(f"{address} is not an address that fsspec opens: {error}") from error


def read_remote(
    addresses: Sequence[str], starts: Sequence[int] | None = None, ends: Sequence[int] | None = None
) -> list[bytes | OSError]:
    """Return the contents of files, or their byte ranges, or an error for each that cannot be read.

    All are requested at once, so a store with a latency of 50 ms returns a batch in little more than that.
    """
    contents: dict[int, Any] = {}
    protocols = [address.split("://")[0] for address in addresses]
    for protocol in dict.fromkeys(protocols):
        rows = [row for row, other in enumerate(protocols) if other == protocol]
        fs = open_address(addresses[rows[0]])[0]
        ranges = [None if bounds is None else [bounds[row] for row in rows] for bounds in (starts, ends)]
        paths = [fs._strip_protocol(addresses[row]) for row in rows]
        contents |= zip(rows, fs.cat_ranges(paths, *ranges, on_error="return"), strict=True)
    return [_content(contents[row]) for row in range(len(addresses))]


def _content(content: Any) -> bytes | OSError:
    return OSError(str(content)) if isinstance(content, Exception) and not isinstance(content, OSError) else content


def join(directory: str | Path, file: str) -> str:
    """Return the address of a file that a table in a directory names."""
    if is_remote(file) or not is_remote(directory):
        return file if is_remote(file) else str(Path(directory) / file)
    return posixpath.join(str(directory), file)
