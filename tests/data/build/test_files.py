"""Files that are whole or not there, and their checksums."""

import hashlib
import json

import numpy as np
import pytest

from hetxl.data.build.files import sha256_of, sync, sync_tree, write_array, write_arrays, write_json


def test_checksums(tmp_path):
    content = np.random.default_rng(0).bytes(3 * 2**20 + 5)
    (tmp_path / "a").write_bytes(content)
    told = []
    assert sha256_of(tmp_path / "a", told.append) == hashlib.sha256(content).hexdigest()
    assert sum(told) == len(content)
    (tmp_path / "empty").write_bytes(b"")
    assert sha256_of(tmp_path / "empty") == hashlib.sha256().hexdigest()


def test_what_is_written_is_read(tmp_path):
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
    assert [found.name for found in tmp_path.iterdir()] == ["some.swaps"]
