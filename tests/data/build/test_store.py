"""Built data: once, whole, checked, and found again."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hetxl.data.build.packages import Package
from hetxl.data.build.store import (
    Damaged,
    Made,
    array,
    build,
    find,
    packages_folder,
    read_json,
    watched,
    write_array,
    write_json,
)

PACKAGE = Package("some-fonts", "1:2.0", "ab" * 32, "MIT", Path("unpacked"))
OPTIONS = {"size": 3, "kind": "plain"}


def make(folder):
    write_array(folder / "values.npy", np.arange(12).reshape(4, 3))
    write_json(folder / "deep" / "names.json", ["a", "漢"])
    return Made([PACKAGE], ["made for a test"])


def count(calls):
    def counted(folder):
        calls.append(folder)
        return make(folder)

    return counted


def test_a_build_is_found(tmp_path):
    folder = build("toy", OPTIONS, tmp_path, make, 2)
    assert folder == tmp_path / "built" / "toy-2-kind=plain,size=3"
    built = find("toy", OPTIONS, tmp_path, 2)
    assert built.folder == folder
    values = array(built, "values")
    np.testing.assert_array_equal(values, np.arange(12).reshape(4, 3))
    assert isinstance(values, np.memmap)
    assert not values.flags.writeable
    assert read_json(built, "deep/names.json") == ["a", "漢"]
    assert built.manifest["options"] == OPTIONS
    assert built.manifest["notes"] == ["made for a test"]
    assert built.manifest["files"].keys() == {"values.npy", "deep/names.json"}
    assert built.manifest["packages"] == [
        {"name": "some-fonts", "version": "1:2.0", "sha256": "ab" * 32, "licence": "MIT"}
    ]
    assert built.sources() == ["source: some-fonts 1:2.0", "licence of some-fonts: MIT"]
    with pytest.raises(ValueError, match=r"has no file other.npy, only deep/names.json, values.npy"):
        array(built, "other")


def test_the_same_options_give_the_same_bytes(tmp_path):
    first, second = (build("toy", OPTIONS, tmp_path / name, make, 1) for name in "ab")
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 3
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes()
    assert not [path for path in (tmp_path / "a" / "built").iterdir() if path.suffix in (".partial", ".old")]


def test_once(tmp_path):
    calls = []
    with watched() as made:
        folder = build("toy", {}, tmp_path, count(calls), 1)
        assert made == [folder]
    with watched() as made:
        assert build("toy", {}, tmp_path, count(calls), 1) == folder
        assert made == []
    assert len(calls) == 1
    build("toy", {}, tmp_path, count(calls), 2)
    build("toy", {"size": 1}, tmp_path, count(calls), 1)
    assert len(calls) == 3


def test_force(tmp_path):
    calls = []
    folder = build("toy", {}, tmp_path, count(calls), 1)
    left = folder.with_name(folder.name + ".partial")
    left.mkdir()
    (left / "half.npy").write_text("of an interrupted build")
    with watched(force=True) as made:
        build("toy", {}, tmp_path, count(calls), 1)
    assert (len(calls), made) == (2, [folder])
    assert find("toy", {}, tmp_path, 1).manifest["files"].keys() == {"values.npy", "deep/names.json"}

    def fails(folder):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), watched(force=True):
        build("toy", {}, tmp_path, fails, 1)
    assert find("toy", {}, tmp_path, 1).folder == folder  # the old one is there until there is a new one


@pytest.mark.parametrize(
    "options", [{"path": "a/b c"}, {"text": "x" * 200}, {"name": "é"}], ids=["odd letters", "long", "not ASCII"]
)
def test_options_that_make_no_name(tmp_path, options):
    folder = build("toy", options, tmp_path, make, 1)
    assert len(folder.name) == len("toy-1-") + 16
    assert find("toy", options, tmp_path, 1).manifest["options"] == options
    assert build("toy", {key: value + "." for key, value in options.items()}, tmp_path, make, 1) != folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "values.npy").unlink(), r"values.npy is missing"),
        (lambda folder: (folder / "values.npy").write_bytes(b"x"), r"values.npy has 1 bytes instead of 224"),
        (
            lambda folder: (folder / "deep/names.json").write_bytes(
                (folder / "deep/names.json").read_bytes().replace(b"a", b"b")
            ),
            r"deep/names.json is damaged: its checksum is not that of the manifest",
        ),
        (lambda folder: (folder / "manifest.json").unlink(), r"manifest.json is missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), r"manifest.json is missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {'), r"manifest.json is missing or damaged"),
        (
            lambda folder: (folder / "manifest.json").write_text(
                (folder / "manifest.json").read_text().replace('"format": 1', '"format": 99')
            ),
            r"manifest.json is missing or damaged",
        ),
    ],
    ids=["missing", "short", "changed", "no manifest", "a list", "half a manifest", "another format"],
)
def test_damage_is_named_and_mended(tmp_path, damage, message):
    folder = build("toy", OPTIONS, tmp_path, make, 1)
    damage(folder)
    again = "; build it again with: hetxl data build toy:size=3,kind=plain --force"
    with pytest.raises(Damaged, match=f"{message}{again}") as error:
        find("toy", OPTIONS, tmp_path, 1)
    assert isinstance(error.value, ValueError)
    with watched() as made:
        build("toy", OPTIONS, tmp_path, make, 1)
    assert made == [folder]
    assert len(array(find("toy", OPTIONS, tmp_path, 1), "values")) == 4


def test_what_was_not_built(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"^toy is not built on this machine; build it with: hetxl data build toy$"
    ):
        find("toy", {}, tmp_path, 1)
    with pytest.raises(FileNotFoundError, match=r"hetxl data build toy:size=3,big=true$"):
        find("toy", {"size": 3, "big": True}, tmp_path, 1)


def test_an_interrupted_build_goes_on(tmp_path):
    written = []

    def in_parts(folder):
        for part in range(4):
            path = folder / f"{part}.npy"
            if path.exists():
                continue
            if part == 2 and len(written) == 2:
                (folder / ".2.npy.123").write_text("half a file")
                raise KeyboardInterrupt
            write_array(path, np.full(3, part))
            written.append(part)
        return Made([])

    with pytest.raises(KeyboardInterrupt):
        build("toy", {}, tmp_path, in_parts, 1)
    with pytest.raises(FileNotFoundError):
        find("toy", {}, tmp_path, 1)
    written.append(None)
    build("toy", {}, tmp_path, in_parts, 1)
    assert written == [0, 1, None, 2, 3]
    built = find("toy", {}, tmp_path, 1)
    assert list(built.manifest["files"]) == ["0.npy", "1.npy", "2.npy", "3.npy"]
    assert sorted(path.name for path in built.folder.iterdir()) == ["0.npy", "1.npy", "2.npy", "3.npy", "manifest.json"]
    assert [int(array(built, str(part))[0]) for part in range(4)] == [0, 1, 2, 3]


def test_at_the_same_time(tmp_path):
    calls, inside = [], threading.Event()

    def slow(folder):
        calls.append(folder)
        inside.wait(0.3)  # long enough for the others to come to the lock
        return make(folder)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build("toy", {}, tmp_path, slow, 1), range(4)))
    assert len(calls) == 1
    assert set(found) == {find("toy", {}, tmp_path, 1).folder}


def test_where_packages_are(tmp_path, monkeypatch):
    assert packages_folder(tmp_path) == tmp_path / "packages"
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path / "other"))
    assert packages_folder(None) == tmp_path / "other" / "packages"
    monkeypatch.setenv("HETXL_CACHE", "~no-such-user/cache")
    with pytest.raises(FileNotFoundError, match="no folder for caches; set HETXL_CACHE"):
        packages_folder(None)


def test_the_manifest_is_plain_json(tmp_path):
    folder = build("toy", {}, tmp_path, make, 1)
    assert json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["name"] == "toy"
