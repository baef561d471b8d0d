"""Packages that are downloaded for real, and what is said where they cannot be."""

import importlib.util
import json
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetxl.data.build import packages
from hetxl.data.build.packages import RECORD, Unavailable, debian_package, python_package
from support.packages import needs_debian, needs_python

SMALL_DEBIAN, SMALL_PYTHON = "hello", "six"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put a script in front of all tools."""

    def add(name, script):
        folder = tmp_path / "tools"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return add


@pytest.fixture
def pip_that_leaves(tmp_path, monkeypatch):
    """Let a script stand in for pip that leaves a given file as the wheel."""

    def install(file, pause=0):
        fake = tmp_path / "python"
        target = '"$2/toy-1.0-py3-none-any.whl"'
        fake.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\nsleep {pause}\ncp "{file}" {target}\n')
        fake.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(fake))

    return install


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_debian_package(tmp_path):
    kept = needs_debian(SMALL_DEBIAN)
    found = debian_package(SMALL_DEBIAN, tmp_path)
    assert (found.name, found.version, found.sha256) == kept[:3]
    assert found.root == tmp_path / f"hello-{found.version}"
    assert (found.root / "usr/share/doc/hello/copyright").is_file()
    assert found.licence == "see usr/share/doc/hello/copyright, which mentions: GNU General Public License"
    assert len(found.sha256) == 64
    assert names(tmp_path) == [found.root.name]


def test_a_python_package(tmp_path):
    kept = needs_python(SMALL_PYTHON)
    found = python_package(SMALL_PYTHON, tmp_path)
    assert found[:4] == kept[:4]
    assert found.root == tmp_path / f"six-{found.version}.wheel"
    assert "def add_metaclass" in (found.root / "six.py").read_text()
    assert found.licence.startswith("MIT")
    assert names(tmp_path) == [found.root.name]


@pytest.mark.parametrize(
    ("get", "needs", "name"), [(debian_package, needs_debian, "hello"), (python_package, needs_python, "six")]
)
def test_what_is_there_is_not_downloaded(get, needs, name, monkeypatch):
    first = needs(name)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "no-such-python")
    assert get(name, first.root.parent) == first


def test_only_the_package_itself_counts(tmp_path):
    # The name of one package may begin like that of another, and a Python package may have a Debian package's name.
    other = tmp_path / "hello-traditional-2.10"
    other.mkdir()
    record = {"kind": "Debian", "name": "hello-traditional", "version": "2.10", "sha256": "0", "licence": "GPL"}
    (other / RECORD).write_text(json.dumps(record))
    wheel = tmp_path / "hello-1.0.wheel"
    wheel.mkdir()
    (wheel / RECORD).write_text(json.dumps(record | {"kind": "Python", "name": "hello"}))
    (tmp_path / "hello-0").mkdir()
    for damaged in ("", "[]", '{"kind": "Debian"}'):
        (tmp_path / "hello-0" / RECORD).write_text(damaged)
        assert packages._find("Debian", "hello", tmp_path) is None
    assert packages._find("Debian", "hello-traditional", tmp_path).root == other
    assert packages._find("Python", "hello", tmp_path).root == wheel


def test_at_the_same_time(tmp_path, pip_that_leaves):
    with zipfile.ZipFile(tmp_path / "whole", "w") as wheel:
        wheel.writestr("toy.py", "x = 1\n" * 1000)
        wheel.writestr("toy-1.5.dist-info/METADATA", "Name: toy\nVersion: 1.5\nLicense: MIT\n")
    pip_that_leaves(tmp_path / "whole", pause=0.3)
    folder = tmp_path / "packages"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: python_package("toy", folder), range(4)))
    assert len(set(found)) == 1
    assert (found[0].version, found[0].licence) == ("1.5", "MIT (see toy-1.5.dist-info/METADATA)")
    assert names(folder) == ["toy-1.5.wheel"]
    assert names(found[0].root) == [RECORD, "toy-1.5.dist-info", "toy.py"]


def test_a_checksum_that_is_not_apts(tmp_path, tools):
    needs_debian(SMALL_DEBIAN)
    tools("apt-cache", f"echo 'SHA256: {'0' * 64}'")
    with pytest.raises(Unavailable, match=r"hello: the file hello_.*deb has not the checksum that `apt-cache show`"):
        debian_package(SMALL_DEBIAN, tmp_path / "packages")
    assert names(tmp_path / "packages") == []


def test_a_package_that_does_not_exist(tmp_path):
    needs_debian(SMALL_DEBIAN)
    with pytest.raises(Unavailable, match="no-such-package-at-all cannot be had: apt-get says: E: Unable to locate"):
        debian_package("no-such-package-at-all", tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("tool", ["apt-get", "apt-cache", "dpkg-deb"])
def test_a_tool_that_is_missing(tmp_path, tools, monkeypatch, tool):
    for name in {"apt-get", "apt-cache", "dpkg-deb"} - {tool}:
        tools(name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    with pytest.raises(
        Unavailable, match=f"^{tool} is needed for the Debian package hello .*Debian and Ubuntu have it"
    ):
        debian_package("hello", tmp_path / "packages")


def test_pip_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip is needed for the Python package six .*run: python -m ensurepip"):
        python_package("six", tmp_path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo one >&2; echo 'E: no network' >&2; echo >&2; exit 100",
            "apt-get says: E: no network; as root, `apt-get",
        ),
        ("exit 3", "apt-get says: exit code 3"),
        ("exit 0", "`apt-get download hello` left 0 files, not 1"),
        ("touch a.deb b.deb", "left 2 files, not 1"),
        ("exec sleep 20", "apt-get was given up after 0.3 seconds"),
    ],
)
def test_tools_that_fail(tmp_path, tools, monkeypatch, script, message):
    for name in ("apt-cache", "dpkg-deb"):
        tools(name, "exit 0")
    tools("apt-get", script)
    monkeypatch.setattr(packages, "TIMEOUT", 0.3)
    with pytest.raises(Unavailable, match=message):
        debian_package("hello", tmp_path / "packages")
    assert names(tmp_path / "packages") == []


@pytest.mark.parametrize("name", ["", "--help", "a b", "../x", "x=1"])
@pytest.mark.parametrize("get", [debian_package, python_package])
def test_names_that_are_none(tmp_path, get, name):
    with pytest.raises(ValueError, match=f"name must be the name of a .* package, found '{name}'"):
        get(name, tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (None, "is no sound wheel: File is not a zip file"),
        ({"toy.py": "x = 1"}, "is no sound wheel"),
        ({"toy.dist-info/METADATA": "Name: toy"}, "does not tell its version"),
    ],
    ids=["no zip", "no metadata", "no version"],
)
def test_wheels_that_are_none(tmp_path, pip_that_leaves, members, message):
    if members is None:
        (tmp_path / "file").write_text("text")
    else:
        with zipfile.ZipFile(tmp_path / "file", "w") as wheel:
            for name, text in members.items():
                wheel.writestr(name, text)
    pip_that_leaves(tmp_path / "file")
    with pytest.raises(Unavailable, match=rf"the Python package toy: toy-1.0-py3-none-any.whl {message}"):
        python_package("toy", tmp_path / "packages")
    assert names(tmp_path / "packages") == []


def test_a_python_that_does_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(Unavailable, match="nowhere does not run"):
        python_package("six", tmp_path / "packages")
