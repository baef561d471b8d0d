"""Packages that tests are made with: downloaded once, and a reason shown where they cannot be had."""

import os
from pathlib import Path

import pytest

from hetxl.data.build.packages import Package, Unavailable, debian_package, python_package


def session_packages() -> Path:
    """Where packages are kept between tests."""
    return Path(os.environ.get("HETXL_TEST_PACKAGES") or "~/.cache/hetxl-tests").expanduser() / "packages"


def needs_debian(name: str) -> Package:
    """A Debian package; the test is skipped, with the reason, where it cannot be had."""
    try:
        return debian_package(name, session_packages())
    except Unavailable as reason:
        pytest.skip(str(reason))


def needs_python(name: str) -> Package:
    """A Python package; the test is skipped, with the reason, where it cannot be had."""
    try:
        return python_package(name, session_packages())
    except Unavailable as reason:
        pytest.skip(str(reason))


def cache_with_packages(folder: Path) -> Path:
    """A folder for caches whose packages are those that were downloaded before; what is built stays in it."""
    session_packages().mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "packages").symlink_to(session_packages(), target_is_directory=True)
    return folder
