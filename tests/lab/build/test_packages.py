"""Packages are downloaded, checked and unpacked; errors say why they are not; licences are in one line."""

import importlib.util
import json
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

import pytest

from hetxl_lab.build import packages
from hetxl_lab.build.packages import RECORD, Unavailable, debian_licence, debian_package, python_package, wheel_licence
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


def test_debian_package_is_unpacked(tmp_path):
    expected = needs_debian(SMALL_DEBIAN)
    package = debian_package(SMALL_DEBIAN, tmp_path)
    assert (package.name, package.version, package.sha256) == expected[:3]
    assert package.root == tmp_path / f"hello-{package.version}"
    assert (package.root / "usr/share/doc/hello/copyright").is_file()
    assert package.licence == "see usr/share/doc/hello/copyright, which mentions: GNU General Public License"
    assert len(package.sha256) == 64
    assert names(tmp_path) == [package.root.name]


def test_python_package_is_unpacked(tmp_path):
    expected = needs_python(SMALL_PYTHON)
    package = python_package(SMALL_PYTHON, tmp_path)
    assert package[:4] == expected[:4]
    assert package.root == tmp_path / f"six-{package.version}.wheel"
    assert "def add_metaclass" in (package.root / "six.py").read_text()
    assert package.licence.startswith("MIT")
    assert names(tmp_path) == [package.root.name]


@pytest.mark.parametrize(
    ("get", "needs", "name"), [(debian_package, needs_debian, "hello"), (python_package, needs_python, "six")]
)
def test_unpacked_package_is_not_downloaded_again(get, needs, name, monkeypatch):
    first = needs(name)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "no-such-python")
    assert get(name, first.root.parent) == first


def test_packages_of_similar_names_are_not_confused(tmp_path):
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


def test_concurrent_downloads_leave_one_package(tmp_path, pip_that_leaves):
    with zipfile.ZipFile(tmp_path / "whole", "w") as wheel:
        wheel.writestr("toy.py", "x = 1\n" * 1000)
        wheel.writestr("toy-1.5.dist-info/METADATA", "Name: toy\nVersion: 1.5\nLicense: MIT\n")
    pip_that_leaves(tmp_path / "whole", pause=0.3)
    folder = tmp_path / "packages"
    with ThreadPoolExecutor(4) as pool:
        package = list(pool.map(lambda _: python_package("toy", folder), range(4)))
    assert len(set(package)) == 1
    assert (package[0].version, package[0].licence) == ("1.5", "MIT (see toy-1.5.dist-info/METADATA)")
    assert names(folder) == ["toy-1.5.wheel"]
    assert names(package[0].root) == [RECORD, "toy-1.5.dist-info", "toy.py"]


@pytest.mark.parametrize("record", ["", '{"a":' * 10**5, "[]", '{"kind": 3}'])
def test_a_package_with_a_damaged_record_is_downloaded_again(tmp_path, pip_that_leaves, record):
    with zipfile.ZipFile(tmp_path / "whole", "w") as wheel:
        wheel.writestr("toy.py", "x = 1\n")
        wheel.writestr("toy-1.5.dist-info/METADATA", "Name: toy\nVersion: 1.5\nLicense: MIT\n")
    pip_that_leaves(tmp_path / "whole")
    package = python_package("toy", tmp_path / "packages")
    (package.root / RECORD).write_text(record)
    (package.root / "toy.py").write_text("x = 2\n")
    assert python_package("toy", tmp_path / "packages") == package
    assert (package.root / "toy.py").read_text() == "x = 1\n"
    assert names(tmp_path / "packages") == [package.root.name]


def test_downloads_of_killed_processes_are_removed_and_those_in_progress_are_not(tmp_path):
    (tmp_path / ".toy-abcd1234" / "download").mkdir(parents=True)
    with packages._temporary(tmp_path, "toy") as first, packages._temporary(tmp_path, "toy") as second:
        assert sorted(tmp_path.iterdir()) == sorted((first, second))
    assert list(tmp_path.iterdir()) == []


def test_wrong_checksum_is_refused(tmp_path, tools):
    needs_debian(SMALL_DEBIAN)
    tools("apt-cache", f"echo 'SHA256: {'0' * 64}'")
    with pytest.raises(Unavailable, match=r"hello: the checksum of hello_.*deb is not that of `apt-cache show`"):
        debian_package(SMALL_DEBIAN, tmp_path / "packages")
    assert names(tmp_path / "packages") == []


def test_unknown_package_raises(tmp_path):
    needs_debian(SMALL_DEBIAN)
    with pytest.raises(Unavailable, match="package no-such-package-at-all: apt-get: E: Unable to locate"):
        debian_package("no-such-package-at-all", tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("tool", ["apt-get", "apt-cache", "dpkg-deb"])
def test_missing_tool_raises(tmp_path, tools, monkeypatch, tool):
    for name in {"apt-get", "apt-cache", "dpkg-deb"} - {tool}:
        tools(name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    with pytest.raises(
        Unavailable, match=f"^{tool}, which downloads the Debian package hello, is not available; use Debian or Ubuntu"
    ):
        debian_package("hello", tmp_path / "packages")


def test_missing_pip_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip, which downloads .* six, is not installed; run: python -m ensurepip"):
        python_package("six", tmp_path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo one >&2; echo 'E: no network' >&2; echo >&2; exit 100",
            "apt-get: E: no network; as root, run `apt-get",
        ),
        ("exit 3", "apt-get: exit code 3"),
        ("exit 0", "`apt-get download hello` left 0 files, expected 1"),
        ("touch a.deb b.deb", "left 2 files, expected 1"),
        ("exec sleep 20", "apt-get did not finish within 0.3 seconds"),
    ],
)
def test_failing_tool_raises_with_its_message(tmp_path, tools, monkeypatch, script, message):
    for name in ("apt-cache", "dpkg-deb"):
        tools(name, "exit 0")
    tools("apt-get", script)
    monkeypatch.setattr(packages, "TIMEOUT", 0.3)
    with pytest.raises(Unavailable, match=message):
        debian_package("hello", tmp_path / "packages")
    assert names(tmp_path / "packages") == []


@pytest.mark.parametrize("name", ["", "--help", "a b", "../x", "x=1"])
@pytest.mark.parametrize("get", [debian_package, python_package])
def test_invalid_names_raise(tmp_path, get, name):
    with pytest.raises(ValueError, match=f"name must be the name of a .* package, found '{name}'"):
        get(name, tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (None, "is not a valid wheel: File is not a zip file"),
        ({"toy.py": "x = 1"}, "is not a valid wheel"),
        ({"toy.dist-info/METADATA": "Name: toy"}, "has no version"),
    ],
    ids=["no zip", "no metadata", "no version"],
)
def test_invalid_wheels_raise(tmp_path, pip_that_leaves, members, message):
    if members is None:
        (tmp_path / "file").write_text("text")
    else:
        with zipfile.ZipFile(tmp_path / "file", "w") as wheel:
            for name, text in members.items():
                wheel.writestr(name, text)
    pip_that_leaves(tmp_path / "file")
    with pytest.raises(Unavailable, match=rf"the Python package toy: .*toy-1.0-py3-none-any.whl {message}"):
        python_package("toy", tmp_path / "packages")
    assert names(tmp_path / "packages") == []


def test_python_that_does_not_run_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(Unavailable, match=r"cannot run .*nowhere"):
        python_package("six", tmp_path / "packages")


READABLE = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: konatu

Files: *
Copyright: 2002 somebody
License: MIT
 The text of it.
 .
 License: of another sort, in the text

Files: debian/*
 debian/rules
Copyright: 2010 a maintainer
License: GPL-2+

Files: doc/a
 doc/b
License: OFL-1.1

Files: doc/c
License: MIT

License: GPL-2+
 On Debian systems, see elsewhere.
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (READABLE, "MIT, OFL-1.1 (see usr/share/doc/x/copyright)"),
        (
            "It is free; see the GNU\n  General Public License, or the public domain.",
            "see usr/share/doc/x/copyright, which mentions: GNU General Public License, public domain",
        ),
        ("Format: x\n\nLicensed under the SIL Open Font License.", "see .*which mentions: SIL Open Font License"),
        ("All you wish.", "see usr/share/doc/x/copyright"),
        (None, "see usr/share/doc/x/copyright"),
    ],
    ids=["machine-readable", "prose", "a format without names", "nothing known", "no file"],
)
def test_licence_of_a_debian_package(tmp_path, text, expected):
    folder = tmp_path / "usr/share/doc/x"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "copyright").write_text(text)
    package = debian_licence("x", tmp_path)
    assert package == (expected if ".*" not in expected else expected.replace(".*", "usr/share/doc/x/copyright, "))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("License-Expression: MIT\nLicense: other", "MIT (see x/METADATA)"),
        ("License: Apache 2.0", "Apache 2.0 (see x/METADATA)"),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License", "MIT License (see x/METADATA)"),
        ("License: A whole\n  text in lines\nClassifier: Topic :: Text", "see x/METADATA"),
        ("Summary: nothing", "see x/METADATA"),
    ],
)
def test_licence_is_read_from_a_wheels_fields(fields, expected):
    metadata = f"Metadata-Version: 2.1\nName: x\n{fields}\n\nLicense: in the body, which is no field\n"
    assert wheel_licence(metadata, PurePath("x/METADATA")) == expected
