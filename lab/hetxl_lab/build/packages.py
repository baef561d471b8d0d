"""Download packages with the machine's own tools, check them and unpack them, without installing them."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path, PurePath
from typing import NamedTuple

from hetxl._files import read_json, sha256_of, sync_tree
from hetxl_train.console import progress_bar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RECORD = ".package.json"  # describes a package, in the directory that it was unpacked to
TIMEOUT = 1800  # seconds after which a tool is killed
LICENCES: dict[str, str] = read_json(Path(__file__).with_name("licences.json"))
"""Patterns of licence names in free text, and the names to print."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")


class Package(NamedTuple):
    """An unpacked package."""

    name: str  # "fonts-konatu"
    version: str  # "20121218-11"
    sha256: str  # of the downloaded file
    licence: str  # in one line, from the package itself
    root: Path  # directory that it was unpacked to


class Unavailable(RuntimeError):  # noqa: N818
    """A package, or the tool that downloads it, is not available on this machine."""


def debian_package(name: str, directory: Path) -> Package:
    """Download a Debian package by `apt-get download`, which needs no root, and unpack it by `dpkg-deb`.

    The directory is `directory`/NAME-VERSION; an existing package is not downloaded again. The checksum of the file
    must be that in apt's lists.
    """
    return _package("Debian", name, directory, _fetch_debian)


def python_package(name: str, directory: Path) -> Package:
    """Download the wheel of a Python package by pip, without its dependencies, and unzip it.

    The directory is `directory`/NAME-VERSION.wheel. The package is not installed, so Python cannot import it. An
    existing package is not downloaded again.
    """
    return _package("Python", name, directory, _fetch_python)


class _Fetched(NamedTuple):
    version: str
    sha256: str
    licence: str
    suffix: str


def _package(kind: str, name: str, directory: Path, fetch: Callable[[str, Path, Path], _Fetched]) -> Package:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be the name of a {kind} package, found {name!r}")
    existing = _find(kind, name, directory)
    if existing is not None:
        return existing
    directory.mkdir(parents=True, exist_ok=True)
    # Use a temporary name until it is complete, since several processes may request the same package at once.
    with _temporary(directory, name) as temporary:
        download, content = temporary / "download", temporary / "content"
        download.mkdir()
        content.mkdir()
        with progress_bar(f"Downloading {name}", None):
            fetched = fetch(name, download, content)
        record = {"kind": kind, "name": name, **fetched._asdict()}
        (content / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        sync_tree(content)
        # A Debian version may hold ":", which not every file system allows.
        root = directory / f"{name}-{fetched.version.replace(':', '%3a')}{fetched.suffix}"
        try:
            os.rename(content, root)
        except OSError:
            with _locked(directory):
                if _read(kind, name, root) is None:  # it is damaged; otherwise another process was faster
                    shutil.rmtree(root, ignore_errors=True)
                    os.rename(content, root)
    return Package(name, fetched.version, fetched.sha256, fetched.licence, root)


@contextlib.contextmanager
def _temporary(directory: Path, name: str) -> Iterator[Path]:
    """Yield a temporary directory for a download; those that killed processes left are removed."""
    with contextlib.ExitStack() as stack:
        with _locked(directory):  # until the new one is locked, so that no process takes it for a leftover
            for leftover in directory.glob(f".{name}-*"):
                with contextlib.suppress(OSError), _locked(leftover, wait=False):
                    shutil.rmtree(leftover)
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix=f".{name}-")))
            stack.enter_context(_locked(temporary))
        yield temporary


@contextlib.contextmanager
def _locked(directory: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a directory, which the system releases when the process ends; raise an OSError without waiting."""
    if fcntl is None:  # without locks, other processes cannot be detected
        if not wait:
            raise OSError("no locks")
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def _find(kind: str, name: str, directory: Path) -> Package | None:
    """Return a package that was unpacked before, the last by name if there are several versions."""
    packages = [_read(kind, name, root) for root in sorted(directory.glob(f"{name}-*"))] if directory.is_dir() else []
    return next((package for package in reversed(packages) if package is not None), None)


def _read(kind: str, name: str, root: Path) -> Package | None:
    try:
        record = read_json(root / RECORD, dict)
        if (record["kind"], record["name"]) != (kind, name):
            return None
        return Package(name, record["version"], record["sha256"], record["licence"], root)
    except (OSError, ValueError, KeyError, TypeError):  # not written by `_package`: download it again
        return None


def _fetch_debian(name: str, download: Path, content: Path) -> _Fetched:
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(
                f"{tool}, which downloads the Debian package {name}, is not available; use Debian or Ubuntu, "
                "or build in a Debian container and copy the cache directory"
            )
    package = f"the Debian package {name}"
    _run(["apt-get", "download", "--quiet", name], download, package, "; as root, run `apt-get update` first")
    files = sorted(download.glob("*.deb"))
    if len(files) != 1:
        raise Unavailable(f"{package}: `apt-get download {name}` left {len(files)} files, expected 1")
    version = _run(["dpkg-deb", "--field", str(files[0]), "Version"], download, package).strip()
    listing = _run(["apt-cache", "show", f"{name}={version}"], download, package)
    sha256 = sha256_of(files[0])
    if sha256 not in re.findall(r"^SHA256: *([0-9a-f]{64}) *$", listing, re.MULTILINE):
        raise Unavailable(f"{package}: the checksum of {files[0].name} is not that of `apt-cache show`; try again")
    _run(["dpkg-deb", "--extract", str(files[0]), str(content)], download, package)
    return _Fetched(version, sha256, debian_licence(name, content), "")


def _fetch_python(name: str, download: Path, content: Path) -> _Fetched:
    package = f"the Python package {name}"
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(f"pip, which downloads {package}, is not installed; run: python -m ensurepip")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    _run([*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(download), name], download, package)
    files = sorted(download.glob("*.whl"))
    if len(files) != 1:
        raise Unavailable(f"{package}: `pip download {name}` left {len(files)} wheels, expected 1")
    try:
        with zipfile.ZipFile(files[0]) as wheel:
            wheel.extractall(content)  # compares every member with its checksum
        (metadata,) = content.glob("*.dist-info/METADATA")
        text = metadata.read_text(encoding="utf-8")
    except (zipfile.BadZipFile, ValueError) as error:
        raise Unavailable(f"{package}: {files[0].name} is not a valid wheel: {error}") from None
    version = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    if version is None:
        raise Unavailable(f"{package}: the metadata of {files[0].name} has no version")
    return _Fetched(version[1], sha256_of(files[0]), wheel_licence(text, metadata.relative_to(content)), ".wheel")


def _run(command: Sequence[str], directory: Path, package: str, hint: str = "") -> str:
    """Run a tool and return its output; an error shows the last line that it printed."""
    try:
        process = subprocess.run(
            command,
            cwd=directory,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",  # this makes the output text
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{package}: {command[0]} did not finish within {TIMEOUT} seconds") from None
    except OSError as error:
        raise Unavailable(f"{package}: cannot run {command[0]}: {error}") from None
    if process.returncode:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise Unavailable(f"cannot download {package}: {Path(command[0]).name}: {reason}{hint}")
    return process.stdout


def debian_licence(name: str, root: Path) -> str:
    """Return the licences in the copyright file of a Debian package in one line, without that of the packaging."""
    path = f"usr/share/doc/{name}/copyright"
    try:
        text = (root / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"see {path}"
    if re.match(r"(Format|Format-Specification):", text):
        short_names = _machine_readable(text)
        if short_names:
            return f"{', '.join(short_names)} (see {path})"
    mentioned = [licence for pattern, licence in LICENCES.items() if re.search(pattern, text, re.IGNORECASE)]
    return f"see {path}" + (f", which mentions: {', '.join(mentioned)}" if mentioned else "")


def wheel_licence(metadata: str, path: PurePath) -> str:
    """Return the licence in the text of METADATA, at a path in a wheel, in one line."""
    fields = HeaderParser().parsestr(metadata)
    names = [fields.get("License-Expression", ""), fields.get("License", "")]
    names += [value.rsplit("::", 1)[-1] for value in fields.get_all("Classifier", []) if value.startswith("License ::")]
    # Some packages have the full text of a licence in this field.
    for name in map(str.strip, names):
        if name and name.upper() != "UNKNOWN" and "\n" not in name and len(name) <= 100:
            return f"{name} (see {path.as_posix()})"
    return f"see {path.as_posix()}"


def _machine_readable(text: str) -> list[str]:
    """Return the short names of the licences of all files but the packaging, without repetition."""
    names = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        files = re.search(r"^Files:((?:.*)(?:\n[ \t].*)*)", paragraph, re.MULTILINE)
        licence = re.search(r"^License:[ \t]*(\S.*)", paragraph, re.MULTILINE)
        if files and licence and not all(name.startswith("debian/") for name in files[1].split()):
            names.append(licence[1].strip())
    return list(dict.fromkeys(names))
