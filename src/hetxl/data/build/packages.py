"""Packages as raw material: downloaded by the machine's own tools, checked and unpacked, never installed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hetxl.data.build.files import sha256_of, sync_tree
from hetxl.data.build.licences import debian_licence, wheel_licence
from hetxl.data.progress import progress_bar

RECORD = ".package.json"
"""What a package is, in the folder that it was unpacked in."""

TIMEOUT = 1800
"""Seconds after which a tool is given up."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")


class Package(NamedTuple):
    """A package that was unpacked.

    Attributes:
        name: "fonts-konatu"
        version: "20121218-11"
        sha256: of the file that was downloaded.
        licence: one line for a reader, from the package itself.
        root: folder that it was unpacked in.
    """

    name: str
    version: str
    sha256: str
    licence: str
    root: Path


class Unavailable(RuntimeError):  # noqa: N818
    """A package that cannot be had on this machine, or the tool that would bring it."""


def debian_package(name: str, folder: Path) -> Package:
    """Download a Debian package by `apt-get download`, which needs no root, and unpack it by `dpkg-deb`.

    What is in `folder` already is not downloaded again. The file is checked against the checksum in apt's own lists.

    Args:
        name: of the package.
        folder: of all packages; this one is unpacked in `folder`/NAME-VERSION.
    """
    return _package("Debian", name, folder, _fetch_debian)


def python_package(name: str, folder: Path) -> Package:
    """Download the wheel of a Python package by pip, without what it depends on, and unzip it.

    It is not installed: this Python does not find it. What is in `folder` already is not downloaded again.

    Args:
        name: of the package, as pip knows it.
        folder: of all packages; this one is unpacked in `folder`/NAME-VERSION.wheel.
    """
    return _package("Python", name, folder, _fetch_python)


class _Fetched(NamedTuple):
    version: str
    sha256: str
    licence: str
    suffix: str


def _package(kind: str, name: str, folder: Path, fetch: Callable[[str, Path, Path], _Fetched]) -> Package:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be the name of a {kind} package, found {name!r}")
    there = _find(kind, name, folder)
    if there is not None:
        return there
    folder.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole: processes may ask for the same package at the same time.
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as temporary:
        download, content = Path(temporary) / "download", Path(temporary) / "content"
        download.mkdir()
        content.mkdir()
        with progress_bar(f"Downloading {name}", None):
            fetched = fetch(name, download, content)
        record = {"kind": kind, "name": name, **fetched._asdict()}
        (content / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        sync_tree(content)
        # A Debian version may hold ":", which not every file system takes.
        root = folder / f"{name}-{fetched.version.replace(':', '%3a')}{fetched.suffix}"
        try:
            os.rename(content, root)
        except OSError:
            if _read(kind, name, root) is None:  # unless another process was faster
                raise
    return Package(name, fetched.version, fetched.sha256, fetched.licence, root)


def _find(kind: str, name: str, folder: Path) -> Package | None:
    """A package that was unpacked before; the last by its name if there are several versions."""
    found = [_read(kind, name, root) for root in sorted(folder.glob(f"{name}-*"))] if folder.is_dir() else []
    return next((package for package in reversed(found) if package is not None), None)


def _read(kind: str, name: str, root: Path) -> Package | None:
    try:
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
        if (record["kind"], record["name"]) != (kind, name):
            return None
        return Package(name, record["version"], record["sha256"], record["licence"], root)
    except (OSError, ValueError, KeyError, TypeError):  # not one of ours: it is downloaded anew
        return None


def _fetch_debian(name: str, download: Path, content: Path) -> _Fetched:
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(
                f"{tool} is needed for the Debian package {name} and is not here: Debian and Ubuntu have it; "
                "elsewhere, build in a container of Debian and copy the folder of caches"
            )
    what = f"the Debian package {name}"
    _run(["apt-get", "download", "--quiet", name], download, what, "; as root, `apt-get update` brings apt's lists")
    files = sorted(download.glob("*.deb"))
    if len(files) != 1:
        raise Unavailable(f"{what}: `apt-get download {name}` left {len(files)} files, not 1")
    version = _run(["dpkg-deb", "--field", str(files[0]), "Version"], download, what).strip()
    shown = _run(["apt-cache", "show", f"{name}={version}"], download, what)
    sha256 = sha256_of(files[0])
    if sha256 not in re.findall(r"^SHA256: *([0-9a-f]{64}) *$", shown, re.MULTILINE):
        raise Unavailable(
            f"{what}: the file {files[0].name} has not the checksum that `apt-cache show` tells; try again"
        )
    _run(["dpkg-deb", "--extract", str(files[0]), str(content)], download, what)
    return _Fetched(version, sha256, debian_licence(name, content), "")


def _fetch_python(name: str, download: Path, content: Path) -> _Fetched:
    what = f"the Python package {name}"
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(f"pip is needed for {what} and is not in this environment; run: python -m ensurepip")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    _run([*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(download), name], download, what)
    files = sorted(download.glob("*.whl"))
    if len(files) != 1:
        raise Unavailable(f"{what}: `pip download {name}` left {len(files)} wheels, not 1")
    try:
        with zipfile.ZipFile(files[0]) as wheel:
            wheel.extractall(content)  # every member is checked against its own checksum
        (metadata,) = content.glob("*.dist-info/METADATA")
        text = metadata.read_text(encoding="utf-8")
    except (zipfile.BadZipFile, ValueError) as error:
        raise Unavailable(f"{what}: {files[0].name} is no sound wheel: {error}") from None
    version = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    if version is None:
        raise Unavailable(f"{what}: {files[0].name} does not tell its version")
    return _Fetched(version[1], sha256_of(files[0]), wheel_licence(text, metadata.relative_to(content)), ".wheel")


def _run(command: Sequence[str], folder: Path, what: str, hint: str = "") -> str:
    """What a tool prints; its last words where it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what}: {command[0]} was given up after {TIMEOUT} seconds") from None
    except OSError as error:
        raise Unavailable(f"{what}: {command[0]} does not run: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1] if lines else f"exit code {done.returncode}"
        raise Unavailable(f"{what} cannot be had: {Path(command[0]).name} says: {said}{hint}")
    return done.stdout
