"""The directory for files that can be made again."""

import os
from pathlib import Path


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
