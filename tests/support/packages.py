"""Packages that tests use: downloaded once; tests are skipped with the reason if they are unavailable."""

import os
from pathlib import Path

import pytest

from hetxl_lab.build.packages import Package, Unavailable, debian_package, python_package


def session_packages() -> Path:
    """Return the directory of the packages that tests share."""
    return Path(os.environ.get("HETXL_TEST_PACKAGES") or "~/.cache/hetxl-tests").expanduser() / "packages"


def needs_debian(name: str) -> Package:
    """Return a Debian package; skip the test with the reason if it is unavailable."""
    try:
        return debian_package(name, session_packages())
    except Unavailable as reason:
        pytest.skip(str(reason))


def needs_python(name: str) -> Package:
    """Return a Python package; skip the test with the reason if it is unavailable."""
    try:
        return python_package(name, session_packages())
    except Unavailable as reason:
        pytest.skip(str(reason))


def cache_with_packages(directory: Path) -> Path:
    """Return a cache directory with the packages that tests share; what is built stays in it."""
    session_packages().mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "packages").symlink_to(session_packages(), target_is_directory=True)
    return directory
