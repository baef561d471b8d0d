"""Build datasets by name and store them on disk: built once, checked on every opening, and never left half written."""

import contextlib
import difflib
import functools
import hashlib
import importlib
import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetxl import _files
from hetxl._checks import integer_at_least
from hetxl._files import read_json, sha256_of, sync, sync_tree
from hetxl_lab.build.packages import Package
from hetxl_train import plugins
from hetxl_train.console import progress_bar
from hetxl_train.data.cache import cache_directory
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import check_options, open_dataset, split_spec

try:
    import fcntl
except ImportError:  # Windows has no lock: two builds at the same time would conflict
    fcntl = None

FORMAT = 1  # version of manifest.json
MANIFEST = "manifest.json"
DATASETS = "hetxl_lab.datasets"

write_json = functools.partial(_files.write_json, indent=1)  # the same bytes as ever

Options = Mapping[str, str | int | float | bool]


class Sources(NamedTuple):
    """The sources of a dataset."""

    packages: Sequence[Package]  # packages with the raw material
    notes: Sequence[str] = ()  # remarks for a report


class Built(NamedTuple):
    """A complete build."""

    directory: Path  # of its files
    manifest: dict[str, Any]  # `name`, `options`, `version`, `files` (with size and sha256), `packages` and `notes`

    def array(self, name: str) -> np.ndarray:
        """Return the array of a file NAME.npy, memory-mapped."""
        return np.load(self._path(f"{name}.npy"), mmap_mode="r", allow_pickle=False)

    def json(self, name: str) -> Any:
        """Return the content of a file NAME.json."""
        return read_json(self._path(f"{name}.json"))

    def source_notes(self) -> list[str]:
        """Return the version and the licence of each package, a line each, for `Dataset.notes`."""
        lines = "source: {name} {version}", "licence of {name}: {licence}"
        return [line.format(**package) for package in self.manifest["packages"] for line in lines]

    def _path(self, file: str) -> Path:
        if file not in self.manifest["files"]:
            raise ValueError(f"{self.directory} has no file {file}, only {', '.join(self.manifest['files'])}")
        return self.directory / file


class Damaged(ValueError):  # noqa: N818
    """A file of a built dataset is missing, or differs from the manifest."""


class Outcome(NamedTuple):
    """The result of `build_dataset`."""

    directory: Path  # of the files
    rebuilt: bool  # whether this call built them
    size: int  # of all files, in bytes
    dataset: Dataset  # as `open_dataset` returns it

    def lines(self) -> list[str]:
        """Return a summary: the directory, rows and classes, and the notes with sources and licences."""
        name = self.dataset.name
        directory = f"{self.directory} ({self.size / 1e6:,.1f} MB)"
        rows = ", ".join(f"{len(split):,} {part}" for part, split in self.dataset.splits.items())
        return [
            f"{name}: built in {directory}" if self.rebuilt else f"{name} exists already: {directory}",
            f"rows: {rows}; {self.dataset.num_classes:,} classes",
            *self.dataset.notes,
        ]


def build_dataset(data: str, *, force: bool = False, cache: Path | None = None) -> Outcome:
    """Build a dataset, unless it exists, and open it, as `hetxl data build` does.

    Args:
        data: name of the dataset, with options as in "words:classes=20000".
        force: build it again if it exists.
        cache: directory of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """
    name, options = split_spec(data)
    if name not in builder_names():
        near = difflib.get_close_matches(name.partition(":")[0], builder_names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{data!r} is not a dataset that can be built{hint}\n" + "\n".join(dataset_listing()))
    builder, build_options = _builder(name), defaults(_builder(name))
    loader_options = defaults(plugins.load("datasets", name))
    check_options(options, [option for option in loader_options if option != "cache"], name)
    if options:  # report wrong values before a long build, not after it
        with contextlib.suppress(FileNotFoundError, Damaged):
            open_dataset(name, cache=cache, **options)  # pyright: ignore[reportArgumentType]
    with record_builds(force) as rebuilt:
        directory = builder(**{key: value for key, value in options.items() if key in build_options}, cache=cache)
    dataset = open_dataset(name, cache=cache, **options)  # pyright: ignore[reportArgumentType]
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return Outcome(directory, directory in rebuilt, size, dataset)


def builder_names() -> list[str]:
    """Return the lab's entry points `hetxl.datasets`; the module of each also has a function `build_NAME`."""
    return [name for name, entry in plugins.entries("datasets").items() if entry.module == f"{DATASETS}.{name}"]


def dataset_listing() -> list[str]:
    """Return a line for each dataset that can be built: its name and the first line of its module's docstring."""
    modules = {name: inspect.getmodule(_builder(name)) for name in builder_names()}
    return [f"{name}: {(inspect.getdoc(module) or '').splitlines()[0].rstrip('.')}" for name, module in modules.items()]


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a build or load function with their defaults."""
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def command(name: str, options: Options) -> str:
    """Return the command that builds a dataset, without the options that have their defaults."""
    usual = defaults(_builder(name)) if name in builder_names() else {}
    changed = [f"{option}={_text(value)}" for option, value in options.items() if usual.get(option, ...) != value]
    return f"hetxl data build {name}" + (":" + ",".join(changed) if changed else "")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _builder(name: str) -> Callable[..., Path]:
    return getattr(importlib.import_module(f"{DATASETS}.{name}"), f"build_{name}")


class _Recorder(NamedTuple):
    force: bool
    rebuilt: list[Path]


_recorder: ContextVar[_Recorder | None] = ContextVar("_recorder", default=None)


@contextmanager
def record_builds(force: bool = False) -> Iterator[list[Path]]:
    """Yield a list of the datasets' directories that are built while the block runs; by force also those that exist."""
    recorder = _Recorder(force, [])
    token = _recorder.set(recorder)
    try:
        yield recorder.rebuilt
    finally:
        _recorder.reset(token)


def packages_directory(cache: Path | None) -> Path:
    """Return the directory that packages are unpacked in; `cache` as in `build`."""
    return _cache(cache) / "packages"


def build(name: str, options: Options, cache: Path | None, write: Callable[[Path], Sources], version: int) -> Path:
    """Write the files of a dataset, unless they exist and match their manifest, and return their directory.

    The files are written to a fixed directory beside the final one, so that `write` can resume an interrupted build.
    Of two processes that build the same dataset, the second waits and uses the files of the first.

    Args:
        options: options that change the files.
        cache: directory of caches; None for $HETXL_CACHE, or ~/.cache/hetxl.
        write: writes whole files (`write_array`, `write_json`) into a directory, and returns their sources.
        version: version of the files; increase it when their content changes.
    """
    directory = _directory(name, options, cache, version)
    recorder = _recorder.get() or _Recorder(False, [])
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(directory.name + ".lock"), name):
        if not recorder.force and _is_complete(directory):
            return directory
        partial = directory.with_name(directory.name + ".partial")
        if recorder.force and partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=True)
        _finish(partial, name, options, version, write(partial))
        old = directory.with_name(directory.name + ".old")
        if directory.exists():  # damaged or to be rebuilt; replace it only after the new one is complete
            shutil.rmtree(old, ignore_errors=True)
            os.rename(directory, old)
        os.rename(partial, directory)
        sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    recorder.rebuilt.append(directory)
    return directory


def open_built(name: str, options: Options, cache: Path | None, version: int) -> Built:
    """Open a dataset that was built, after comparing all checksums; arguments as in `build`."""
    directory = _directory(name, options, cache, version)
    if not directory.is_dir():
        raise FileNotFoundError(f"{name} is not built on this machine; build it with: {command(name, options)}")
    try:
        return _check(directory)
    except Damaged as error:
        raise Damaged(f"{error}; build it again with: {command(name, options)} --force") from None


def hash_fraction(*parts: str) -> float:
    """Return a number in [0, 1) that depends only on the texts, to split by."""
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big") / 2**64


def check_limit(limit: int | None, seed: int) -> None:
    """Check the options of a loader that `limited` takes."""
    integer_at_least("seed", seed, 0)
    if limit is not None:
        integer_at_least("limit", limit, 1)


def limited(rows: np.ndarray, limit: int | None, seed: int) -> np.ndarray:
    """Return at most `limit` of the rows [n], drawn at random by the seed, in their order; None for all."""
    if limit is None or limit >= len(rows):
        return rows
    return rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:limit])]


def _cache(cache: Path | None) -> Path:
    directory = cache_directory(cache)
    if directory is None:
        raise FileNotFoundError("this machine has no directory for caches; set HETXL_CACHE to one")
    return directory.absolute()


def _directory(name: str, options: Options, cache: Path | None, version: int) -> Path:
    key = ",".join(f"{option}={_text(options[option])}" for option in sorted(options))
    if not re.fullmatch(r"[A-Za-z0-9=,._+-]{0,80}", key):
        key = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return _cache(cache) / "built" / "-".join(filter(None, (name, str(version), key)))


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold a lock; the system releases it if this process is killed."""
    with open(path, "ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with progress_bar(f"Waiting for another build of {name}", None):
                    fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _finish(partial: Path, name: str, options: Options, version: int, sources: Sources) -> None:
    """Write the manifest and flush everything to the disk."""
    files = {}
    for path in sorted(partial.rglob("*")):
        if path.is_dir():
            continue
        file = path.relative_to(partial).as_posix()
        if file.startswith(".") or "/." in file or file == MANIFEST:  # an interrupted write
            path.unlink()
        else:
            files[file] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    manifest = {
        "format": FORMAT,
        "name": name,
        "version": version,
        "options": dict(options),
        "files": files,
        "packages": [dict(zip(Package._fields[:-1], package, strict=False)) for package in sources.packages],
        "notes": list(sources.notes),
    }
    write_json(partial / MANIFEST, manifest)
    sync_tree(partial)


def _is_complete(directory: Path) -> bool:
    with contextlib.suppress(Damaged):
        return directory.is_dir() and bool(_check(directory))
    return False


def _check(directory: Path) -> Built:
    """Read the manifest of a build and compare all its files with it."""
    try:
        manifest = read_json(directory / MANIFEST, dict)
        files = {file: (int(entry["size"]), str(entry["sha256"])) for file, entry in manifest["files"].items()}
        known = manifest["format"] == FORMAT and manifest.keys() >= {"name", "options", "packages", "notes"}
        known &= bool(files) and all(
            package.keys() >= {"name", "version", "licence"} for package in manifest["packages"]
        )
        known &= all(isinstance(note, str) for note in manifest["notes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known, files, manifest = False, {}, {}
    if not known:
        raise Damaged(f"{directory / MANIFEST} is missing or damaged")
    for file, (size, _) in files.items():
        path = directory / file
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise Damaged(f"{path} is missing" if actual is None else f"{path} has {actual:,} bytes, expected {size:,}")
    with progress_bar(f"Checking {manifest['name']}", sum(size for size, _ in files.values())) as advance:
        for file, (_, sha256) in files.items():
            if sha256_of(directory / file, advance) != sha256:
                raise Damaged(f"{directory / file} is damaged: its checksum differs from the manifest's")
    return Built(directory, manifest)
