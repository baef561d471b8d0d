"""Datasets are built once, completely, by name, and checked whenever they are opened."""

import importlib
import inspect
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hetxl._files import write_array
from hetxl_lab.build.packages import Package
from hetxl_lab.build.store import (
    Damaged,
    Sources,
    build,
    build_dataset,
    builder_names,
    command,
    dataset_listing,
    defaults,
    hash_fraction,
    limited,
    open_built,
    packages_directory,
    record_builds,
    write_json,
)
from hetxl_train import plugins
from support.packages import cache_with_packages, needs_debian

PACKAGE = Package("some-fonts", "1:2.0", "ab" * 32, "MIT", Path("unpacked"))
OPTIONS = {"size": 3, "kind": "plain"}


def write(directory):
    write_array(directory / "values.npy", np.arange(12).reshape(4, 3))
    write_json(directory / "deep" / "names.json", ["a", "漢"])
    return Sources([PACKAGE], ["made for a test"])


def count(calls):
    def counted(directory):
        calls.append(directory)
        return write(directory)

    return counted


def test_opened_build_has_its_files_and_manifest(tmp_path):
    directory = build("toy", OPTIONS, tmp_path, write, 2)
    assert directory == tmp_path / "built" / "toy-2-kind=plain,size=3"
    built = open_built("toy", OPTIONS, tmp_path, 2)
    assert built.directory == directory
    values = built.array("values")
    np.testing.assert_array_equal(values, np.arange(12).reshape(4, 3))
    assert isinstance(values, np.memmap)
    assert not values.flags.writeable
    assert built.json("deep/names") == ["a", "漢"]
    assert built.manifest["options"] == OPTIONS
    assert built.manifest["notes"] == ["made for a test"]
    assert built.manifest["files"].keys() == {"values.npy", "deep/names.json"}
    assert built.manifest["packages"] == [
        {"name": "some-fonts", "version": "1:2.0", "sha256": "ab" * 32, "licence": "MIT"}
    ]
    assert built.source_notes() == ["source: some-fonts 1:2.0", "licence of some-fonts: MIT"]
    with pytest.raises(ValueError, match=r"has no file other.npy, only deep/names.json, values.npy"):
        built.array("other")


def test_the_same_options_give_the_same_bytes(tmp_path):
    first, second = (build("toy", OPTIONS, tmp_path / name, write, 1) for name in "ab")
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 3
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes()
    assert not [path for path in (tmp_path / "a" / "built").iterdir() if path.suffix in (".partial", ".old")]


def test_existing_build_is_not_repeated(tmp_path):
    calls = []
    with record_builds() as rebuilt:
        directory = build("toy", {}, tmp_path, count(calls), 1)
        assert rebuilt == [directory]
    with record_builds() as rebuilt:
        assert build("toy", {}, tmp_path, count(calls), 1) == directory
        assert rebuilt == []
    assert len(calls) == 1
    build("toy", {}, tmp_path, count(calls), 2)
    build("toy", {"size": 1}, tmp_path, count(calls), 1)
    assert len(calls) == 3


def test_force_replaces_a_build_only_when_the_new_one_is_complete(tmp_path):
    calls = []
    directory = build("toy", {}, tmp_path, count(calls), 1)
    left = directory.with_name(directory.name + ".partial")
    left.mkdir()
    (left / "half.npy").write_text("of an interrupted build")
    with record_builds(force=True) as rebuilt:
        build("toy", {}, tmp_path, count(calls), 1)
    assert (len(calls), rebuilt) == (2, [directory])
    assert open_built("toy", {}, tmp_path, 1).manifest["files"].keys() == {"values.npy", "deep/names.json"}

    def fails(directory):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), record_builds(force=True):
        build("toy", {}, tmp_path, fails, 1)
    assert open_built("toy", {}, tmp_path, 1).directory == directory  # the old one is there until there is a new one


@pytest.mark.parametrize(
    "options", [{"path": "a/b c"}, {"text": "x" * 200}, {"name": "é"}], ids=["odd letters", "long", "not ASCII"]
)
def test_options_unfit_for_a_file_name_are_hashed(tmp_path, options):
    directory = build("toy", options, tmp_path, write, 1)
    assert len(directory.name) == len("toy-1-") + 16
    assert open_built("toy", options, tmp_path, 1).manifest["options"] == options
    assert build("toy", {key: value + "." for key, value in options.items()}, tmp_path, write, 1) != directory


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: (directory / "values.npy").unlink(), r"values.npy is missing"),
        (lambda directory: (directory / "values.npy").write_bytes(b"x"), r"values.npy has 1 bytes, expected 224"),
        (
            lambda directory: (directory / "deep/names.json").write_bytes(
                (directory / "deep/names.json").read_bytes().replace(b"a", b"b")
            ),
            r"deep/names.json is damaged: its checksum differs from the manifest's",
        ),
        (lambda directory: (directory / "manifest.json").unlink(), r"manifest.json is missing or damaged"),
        (lambda directory: (directory / "manifest.json").write_text("[]"), r"manifest.json is missing or damaged"),
        (
            lambda directory: (directory / "manifest.json").write_text('{"files": {'),
            r"manifest.json is missing or damaged",
        ),
        (
            lambda directory: (directory / "manifest.json").write_text(
                (directory / "manifest.json").read_text().replace('"format": 1', '"format": 99')
            ),
            r"manifest.json is missing or damaged",
        ),
    ],
    ids=["missing", "short", "changed", "no manifest", "a list", "half a manifest", "another format"],
)
def test_damage_is_reported_and_repaired(tmp_path, damage, message):
    directory = build("toy", OPTIONS, tmp_path, write, 1)
    damage(directory)
    again = "; build it again with: hetxl data build toy:size=3,kind=plain --force"
    with pytest.raises(Damaged, match=f"{message}{again}") as error:
        open_built("toy", OPTIONS, tmp_path, 1)
    assert isinstance(error.value, ValueError)
    with record_builds() as rebuilt:
        build("toy", OPTIONS, tmp_path, write, 1)
    assert rebuilt == [directory]
    assert len(open_built("toy", OPTIONS, tmp_path, 1).array("values")) == 4


def test_missing_build_names_the_command(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"^toy is not built on this machine; build it with: hetxl data build toy$"
    ):
        open_built("toy", {}, tmp_path, 1)
    with pytest.raises(FileNotFoundError, match=r"hetxl data build toy:size=3,big=true$"):
        open_built("toy", {"size": 3, "big": True}, tmp_path, 1)


def test_interrupted_build_continues(tmp_path):
    written = []

    def in_parts(directory):
        for part in range(4):
            path = directory / f"{part}.npy"
            if path.exists():
                continue
            if part == 2 and len(written) == 2:
                (directory / ".2.npy.123").write_text("half a file")
                raise KeyboardInterrupt
            write_array(path, np.full(3, part))
            written.append(part)
        return Sources([])

    with pytest.raises(KeyboardInterrupt):
        build("toy", {}, tmp_path, in_parts, 1)
    with pytest.raises(FileNotFoundError):
        open_built("toy", {}, tmp_path, 1)
    written.append(None)
    build("toy", {}, tmp_path, in_parts, 1)
    assert written == [0, 1, None, 2, 3]
    built = open_built("toy", {}, tmp_path, 1)
    assert list(built.manifest["files"]) == ["0.npy", "1.npy", "2.npy", "3.npy"]
    assert sorted(path.name for path in built.directory.iterdir()) == [
        "0.npy",
        "1.npy",
        "2.npy",
        "3.npy",
        "manifest.json",
    ]
    assert [int(built.array(str(part))[0]) for part in range(4)] == [0, 1, 2, 3]


def test_concurrent_builds_run_once(tmp_path):
    calls, inside = [], threading.Event()

    def slow(directory):
        calls.append(directory)
        inside.wait(0.3)  # long enough for the others to come to the lock
        return write(directory)

    with ThreadPoolExecutor(4) as pool:
        outcome = list(pool.map(lambda _: build("toy", {}, tmp_path, slow, 1), range(4)))
    assert len(calls) == 1
    assert set(outcome) == {open_built("toy", {}, tmp_path, 1).directory}


def test_packages_directory_is_in_the_cache(tmp_path, monkeypatch):
    assert packages_directory(tmp_path) == tmp_path / "packages"
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path / "other"))
    assert packages_directory(None) == tmp_path / "other" / "packages"
    monkeypatch.setenv("HETXL_CACHE", "~no-such-user/cache")
    with pytest.raises(FileNotFoundError, match="no directory for caches; set HETXL_CACHE"):
        packages_directory(None)


def test_the_manifest_is_plain_json(tmp_path):
    directory = build("toy", {}, tmp_path, write, 1)
    assert json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["name"] == "toy"


SMALL = "words:entries=1500,classes=100"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    needs_debian("dict-gcide")
    directory = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_dataset(SMALL, cache=directory)
    return directory


def test_build_dataset_reuses_or_rebuilds(cache):
    outcome = build_dataset(SMALL, cache=cache)
    assert not outcome.rebuilt
    assert outcome.directory == cache / "built" / "words-1-entries=1500"
    assert outcome.size == sum(path.stat().st_size for path in outcome.directory.iterdir())
    assert outcome.dataset.num_classes == 100
    lines = outcome.lines()
    assert lines[0].startswith(f"words exists already: {outcome.directory} (")
    assert lines[1].endswith("; 100 classes")
    assert any(line.startswith("source: dict-gcide ") for line in lines)
    assert any(line.startswith("licence of dict-gcide: ") for line in lines)
    again = build_dataset(SMALL, force=True, cache=cache)
    assert again.rebuilt
    assert again.lines()[0].startswith("words: built in ")
    assert again.lines()[1:] == lines[1:]


def test_build_dataset_repairs_damage(cache):
    directory = build_dataset(SMALL, cache=cache).directory
    (directory / "ids.npy").write_bytes(b"")
    assert build_dataset(SMALL, cache=cache).rebuilt


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            "wrds",
            ValueError,
            "'wrds' is not a dataset that can be built; did you mean 'words'?\n(.*\n)*words: Next",
        ),
        ("pycode", ValueError, "'pycode' is not a dataset that can be built\nglyphs: "),
        ("words:clases=3", TypeError, "'words' has no option 'clases', only classes, .*did you mean 'classes'"),
        ("words:cache=x", TypeError, "'words' has no option 'cache'"),
        ("words:classes=1", ValueError, "classes must be at least 2, found 1"),
        ("words:entries=few", TypeError, "entries must be an integer"),
    ],
)
def test_build_dataset_refuses_wrong_names_and_options(tmp_path, data, error, message):
    with pytest.raises(error, match=message.replace("?", r"\?")):
        build_dataset(data, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_listing_has_a_line_for_each_dataset():
    assert sorted(builder_names()) == ["glyphs", "icons", "wordnet", "words"]
    for name, line in zip(builder_names(), dataset_listing(), strict=True):
        assert re.fullmatch(rf"{name}: .{{20,}}[^.]", line)


@pytest.mark.parametrize("name", builder_names())
def test_build_and_load_functions_agree(name):
    module = importlib.import_module(f"hetxl_lab.datasets.{name}")
    builder, loader = getattr(module, f"build_{name}"), plugins.load("datasets", name)
    for function in (builder, loader):
        parameters = inspect.signature(function).parameters.values()
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
        assert defaults(function)["cache"] is None
    # What changes the files changes the data.
    assert defaults(builder).items() <= defaults(loader).items()
    assert command(name, defaults(builder)) == f"hetxl data build {name}"


def test_command_has_the_options_that_differ_from_the_defaults():
    assert command("words", {}) == "hetxl data build words"
    assert command("words", {"entries": 50}) == "hetxl data build words:entries=50"
    options = {"entries": 50, "big": False, "share": 0.5, "kind": "a"}
    assert command("toy", options) == "hetxl data build toy:entries=50,big=false,share=0.5,kind=a"


def test_limited_rows_are_a_reproducible_sample_in_order():
    rows = np.arange(100, 200)
    first, again, other = (limited(rows, 20, seed) for seed in (3, 3, 4))
    assert len(set(first.tolist())) == 20
    assert (np.diff(first) > 0).all()
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert limited(rows, None, 0) is limited(rows, 100, 0) is rows


def test_hash_fraction_depends_on_where_the_texts_are_cut():
    fractions = [hash_fraction("a", "bc"), hash_fraction("ab", "c"), hash_fraction("abc")]
    assert len(set(fractions)) == 3
    assert all(0 <= fraction < 1 for fraction in fractions)
    assert hash_fraction("a") == 0.25379361057584854
