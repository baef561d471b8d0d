"""Built data on disk: made once, checked whenever it is opened, and never half there."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetxl.data.build.files import sha256_of, sync, sync_tree, write_array, write_json
from hetxl.data.build.packages import Package
from hetxl.data.build.registry import command, text
from hetxl.data.corpus_cache import cache_folder
from hetxl.data.progress import progress_bar

try:
    import fcntl
except ImportError:  # Windows: two builds at the same time would disturb each other
    fcntl = None

__all__ = [
    "Built",
    "Damaged",
    "Made",
    "array",
    "build",
    "find",
    "packages_folder",
    "read_json",
    "watched",
    "write_array",
    "write_json",
]

FORMAT = 1
"""Of manifest.json."""

MANIFEST = "manifest.json"
Options = Mapping[str, str | int | float | bool]


class Made(NamedTuple):
    """What a build was made of.

    Attributes:
        packages: its sources.
        notes: what a reader should know.
    """

    packages: Sequence[Package]
    notes: Sequence[str] = ()


class Built(NamedTuple):
    """A build that was found whole.

    Attributes:
        folder: of its files.
        manifest: `name`, `options`, `version`, `files` (with size and sha256), `packages` and `notes`.
    """

    folder: Path
    manifest: dict[str, Any]

    def sources(self) -> list[str]:
        """One line for each package with its version and one with its licence, for `Dataset.notes`."""
        lines = []
        for package in self.manifest["packages"]:
            lines.append(f"source: {package['name']} {package['version']}")
            lines.append(f"licence of {package['name']}: {package['licence']}")
        return lines


class Damaged(ValueError):  # noqa: N818
    """Built data with a file that is missing or not what it was."""


class _Watch(NamedTuple):
    force: bool
    made: list[Path]


_watch: ContextVar[_Watch | None] = ContextVar("_watch", default=None)


@contextmanager
def watched(force: bool = False) -> Iterator[list[Path]]:
    """While the block runs, note which builds are made and not just found.

    Args:
        force: make those anew that are there.

    Returns:
        The folders made so far.
    """
    watch = _Watch(force, [])
    token = _watch.set(watch)
    try:
        yield watch.made
    finally:
        _watch.reset(token)


def packages_folder(cache: Path | None) -> Path:
    """Where packages are unpacked.

    Args:
        cache: folder of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """
    return _cache(cache) / "packages"


def build(name: str, options: Options, cache: Path | None, make: Callable[[Path], Made], version: int) -> Path:
    """Make a dataset's files, unless they are there and sound.

    The files are made in a folder beside the final one, always the same: `make` may go on from what an interrupted
    build has left there. Two processes that build the same take turns, and the second finds it done.

    Args:
        name: of the dataset.
        options: that change the files.
        cache: folder of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
        make: writes files into a folder, each at once (`write_array`, `write_json`), and tells what they are made of.
        version: of the files; to be raised when they are made in another way.

    Returns:
        The folder of the files.
    """
    folder = _folder(name, options, cache, version)
    watch = _watch.get() or _Watch(False, [])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), name):
        if not watch.force and _sound(folder):
            return folder
        partial = folder.with_name(folder.name + ".partial")
        if watch.force and partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=True)
        made = make(partial)
        _finish(partial, name, options, version, made)
        old = folder.with_name(folder.name + ".old")
        if folder.exists():  # damaged, or to be made anew: out of the way only now that there is another
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
        os.rename(partial, folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    watch.made.append(folder)
    return folder


def find(name: str, options: Options, cache: Path | None, version: int) -> Built:
    """A dataset that was built, with all checksums compared.

    Args:
        name: of the dataset.
        options: that change the files.
        cache: folder of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
        version: of the files.
    """
    folder = _folder(name, options, cache, version)
    if not folder.is_dir():
        raise FileNotFoundError(f"{name} is not built on this machine; build it with: {command(name, options)}")
    try:
        return _check(folder)
    except Damaged as error:
        raise Damaged(f"{error}; build it again with: {command(name, options)} --force") from None


def array(built: Built, name: str) -> np.ndarray:
    """An array of a build, mapped into memory.

    Args:
        built: from `find`.
        name: of the file, with or without .npy.
    """
    return np.load(_path(built, name, ".npy"), mmap_mode="r", allow_pickle=False)


def read_json(built: Built, name: str) -> Any:
    """What is in a JSON file of a build.

    Args:
        built: from `find`.
        name: of the file, with or without .json.
    """
    return json.loads(_path(built, name, ".json").read_text(encoding="utf-8"))


def _path(built: Built, name: str, suffix: str) -> Path:
    file = name if name.endswith(suffix) else name + suffix
    if file not in built.manifest["files"]:
        raise ValueError(f"{built.folder} has no file {file}, only {', '.join(built.manifest['files'])}")
    return built.folder / file


def _cache(cache: Path | None) -> Path:
    folder = cache_folder(cache)
    if folder is None:
        raise FileNotFoundError("this machine has no folder for caches; set HETXL_CACHE to one")
    return folder.absolute()


def _folder(name: str, options: Options, cache: Path | None, version: int) -> Path:
    written = ",".join(f"{option}={text(options[option])}" for option in sorted(options))
    if not re.fullmatch(r"[A-Za-z0-9=,._+-]{0,80}", written):
        written = hashlib.blake2b(written.encode(), digest_size=8).hexdigest()
    return _cache(cache) / "built" / "-".join(filter(None, (name, str(version), written)))


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold a lock; the system gives it back if this process is killed."""
    with open(path, "ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with progress_bar(f"Waiting for another build of {name}", None):
                    fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _finish(partial: Path, name: str, options: Options, version: int, made: Made) -> None:
    """Write the manifest and flush everything to the disk."""
    files = {}
    for path in sorted(partial.rglob("*")):
        if path.is_dir():
            continue
        if path.name.startswith(".") or path.name == MANIFEST:  # a write that was interrupted
            path.unlink()
        else:
            file = path.relative_to(partial).as_posix()
            files[file] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    packages = [{key: value for key, value in package._asdict().items() if key != "root"} for package in made.packages]
    manifest = {
        "format": FORMAT,
        "name": name,
        "version": version,
        "options": dict(options),
        "files": files,
        "packages": packages,
        "notes": list(made.notes),
    }
    write_json(partial / MANIFEST, manifest)
    sync_tree(partial)


def _sound(folder: Path) -> bool:
    with contextlib.suppress(Damaged):
        return folder.is_dir() and bool(_check(folder))
    return False


def _check(folder: Path) -> Built:
    """Read a build's manifest and compare all its files with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {file: (entry["size"], entry["sha256"]) for file, entry in manifest["files"].items()}
        known = manifest["format"] == FORMAT and manifest.keys() >= {"name", "options", "packages", "notes"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known, files, manifest = False, {}, {}
    if not known:
        raise Damaged(f"{folder / MANIFEST} is missing or damaged")
    for file, (size, _) in files.items():
        path = folder / file
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise Damaged(f"{path} {what}")
    with progress_bar(f"Checking {manifest['name']}", sum(size for size, _ in files.values())) as advance:
        for file, (_, sha256) in files.items():
            if sha256_of(folder / file, advance) != sha256:
                raise Damaged(f"{folder / file} is damaged: its checksum is not that of the manifest")
    return Built(folder, manifest)
