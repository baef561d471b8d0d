"""Files that are there whole or not at all."""

import math
import os
import stat

import pytest

from hetxl.data.build.files import sync
from hetxl.training.files import read_json, write_bytes, write_json


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


def test_json_is_json(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"nll": math.nan})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1', b"\xff\xfe", b"nothing"])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_syncing_a_directory(tmp_path):
    sync(tmp_path)
    sync(tmp_path / "missing")
