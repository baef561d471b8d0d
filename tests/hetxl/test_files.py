"""Files that are whole or not there, and their checksums."""

import errno
import hashlib
import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from hetxl._files import (
    read_json,
    sha256_of,
    sync,
    sync_tree,
    whole_file,
    write_array,
    write_arrays,
    write_bytes,
    write_json,
    write_whole,
)


def test_sha256_of_equals_hashlib(tmp_path):
    content = np.random.default_rng(0).bytes(3 * 2**20 + 5)
    (tmp_path / "a").write_bytes(content)
    sizes = []
    assert sha256_of(tmp_path / "a", sizes.append) == hashlib.sha256(content).hexdigest()
    assert sum(sizes) == len(content)
    (tmp_path / "empty").write_bytes(b"")
    assert sha256_of(tmp_path / "empty") == hashlib.sha256().hexdigest()


def test_written_arrays_and_json_read_back(tmp_path):
    values = np.arange(6, dtype=np.int16).reshape(2, 3)
    write_array(tmp_path / "deep" / "a.npy", values)
    np.testing.assert_array_equal(np.load(tmp_path / "deep" / "a.npy"), values)
    write_json(tmp_path / "a.json", {"ü": [1, "漢"]})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"ü": [1, "漢"]}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.json", "a.npy", "deep"]


def test_the_same_values_are_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_array(tmp_path / f"{name}.npy", np.arange(5.0))
        write_json(tmp_path / f"{name}.json", {"x": 1.5})
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_array(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        write_array(tmp_path / "a.npy", np.array([object()]))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.arange(3))
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "b.json", float("nan"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
    with pytest.raises(ValueError, match=r"path must end in .npy, found .*a.bin"):
        write_array(tmp_path / "a.bin", np.arange(3))


def test_flushing_takes_what_there_is(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    sync_tree(tmp_path)
    sync(tmp_path / "missing")
    assert (tmp_path / "a" / "file").read_text() == "x"


def test_arrays_by_name_are_written_whole_under_any_name(tmp_path):
    path = tmp_path / "some.swaps"
    write_arrays(path, {"rows": np.arange(3), "rate": 0.5, "kind": "near"})
    with np.load(path, allow_pickle=False) as file:
        assert file["rows"].tolist() == [0, 1, 2]
        assert (float(file["rate"]), str(file["kind"])) == (0.5, "near")
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.swaps"]


def test_bytes_and_their_folder(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write_bytes(path, b"one")
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(TypeError):
        write_bytes(path, "text")  # pyright: ignore[reportArgumentType]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(OSError, match="Is a directory"):
        write_bytes(tmp_path, b"new")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "content", [{"ü": [1, 2.5, None, True]}, [], "a\nb", "caf\udce9.png", 1e-300, {"deep": {"er": ["世界"]}}]
)
def test_json_reads_back(tmp_path, content):
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == content
    (tmp_path / "a.json").read_bytes().decode("utf-8")


def test_nan_is_not_written_as_json(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"nll": math.nan})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1', b"\xff\xfe", b"nothing"])
def test_invalid_json_names_the_file(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_syncing_a_directory(tmp_path):
    sync(tmp_path)
    sync(tmp_path / "missing")


def test_files_of_a_refused_write_leave_the_old_ones(tmp_path):
    path = tmp_path / "head.onnx"
    path.write_text("old")

    def write():
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise ValueError("differs")

    with pytest.raises(ValueError, match="differs"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_belong_together_appear_together(tmp_path):
    path = tmp_path / "new" / "head.onnx"
    with whole_file(path) as temporary:
        temporary.write_text("model")
        Path(f"{temporary}.data").write_text("weights")
        assert not path.exists()
    assert path.read_text() == "model"
    assert sorted(file.name for file in path.parent.iterdir()) == ["head.onnx", "head.onnx.data"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1e999}', "not a finite number"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("\udcff", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[1]", "must hold a JSON object, found a list"),
        ("3", "must hold a JSON object, found 3"),
    ],
)
def test_json_of_any_other_kind_is_an_error_that_names_the_file(text, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as raised:
        read_json(path, dict)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 400


def test_error_of_a_full_disk_names_the_file(tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device; free some space.*a\.json") as raised:
        write_whole(tmp_path / "run" / "a.json", full)
    assert raised.value.errno == errno.ENOSPC
    assert list((tmp_path / "run").iterdir()) == []
