"""Parquet: embeddings as a mapped array in the cache, and what is wrong with a column."""

import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetxl.data import parquet as module
from hetxl.data.parquet import parquet_columns, parquet_features, parquet_ids, parquet_rows

MATRIX = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)


def write(path, values, kind=None, **options):
    pq.write_table(pa.table({"features": pa.array(values, kind), "n": list(range(len(values)))}), path, **options)
    return path


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64()), pa.list_(pa.float32(), 4)])
def test_features_are_mapped(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "ROWS_AT_A_TIME", 7)
    path = write(tmp_path / "a.parquet", MATRIX.tolist(), kind, row_group_size=10)
    found = parquet_features(path, "features", tmp_path / "cache")
    assert isinstance(found.array, np.memmap)
    np.testing.assert_array_equal(found.array, MATRIX)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".npy"]  # nothing half-written


def test_half_precision_stays_half_on_disk(tmp_path):
    path = write(tmp_path / "a.parquet", list(MATRIX.astype(np.float16)), pa.list_(pa.float16()))
    found = parquet_features(path, "features", tmp_path)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found.gather(np.array([3])), MATRIX[[3]].astype(np.float16).astype(np.float32))


def test_the_cache_is_used_while_the_file_is_the_same(tmp_path):
    path = write(tmp_path / "a.parquet", MATRIX.tolist())
    first = parquet_features(path, "features", tmp_path / "cache").path
    stamp = first.stat().st_mtime_ns
    assert parquet_features(path, "features", tmp_path / "cache").path.stat().st_mtime_ns == stamp
    write(path, (2 * MATRIX).tolist())
    os.utime(path, (1, 1))
    np.testing.assert_array_equal(parquet_features(path, "features", tmp_path / "cache").array, 2 * MATRIX)


def test_a_damaged_cache_is_written_again(tmp_path):
    path = write(tmp_path / "a.parquet", MATRIX.tolist())
    cached = parquet_features(path, "features", tmp_path / "cache").path
    cached.write_bytes(cached.read_bytes()[:-8])
    np.testing.assert_array_equal(parquet_features(path, "features", tmp_path / "cache").array, MATRIX)


def test_the_cache_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path / "here"))
    assert parquet_features(write(tmp_path / "a.parquet", MATRIX.tolist()), "features").path.parent == tmp_path / "here"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cache folder cannot be made .* set HETXL_CACHE"):
        parquet_features(tmp_path / "a.parquet", "features", tmp_path / "file" / "cache")


def test_a_disk_without_room(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", MATRIX.tolist())
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage._replace(free=10))
    with pytest.raises(OSError, match=r"has 0.0 GB free, and 0.0 GB are needed; set HETXL_CACHE"):
        parquet_features(path, "features", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([[1.0, 2.0], [3.0]], ValueError, "has 2 numbers in row 0 and 1 in row 1"),
        ([[1.0], None], ValueError, "has nothing in row 1"),
        ([1.0, 2.0], ValueError, "must hold lists of numbers, found double"),
        ([[1, 2]], TypeError, "must hold floating-point numbers, found int64"),
    ],
)
def test_columns_that_are_no_features(tmp_path, values, error, message):
    path = write(tmp_path / "a.parquet", values)
    with pytest.raises(error, match=f"a.parquet: column 'features' {message}"):
        parquet_features(path, "features", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_widths_that_change_between_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_A_TIME", 1)
    path = write(tmp_path / "a.parquet", [[1.0, 2.0], [3.0]])
    with pytest.raises(ValueError, match="has 2 numbers in row 0 and 1 in row 1; all rows must have as many"):
        parquet_features(path, "features", tmp_path)


def test_rows_and_columns(tmp_path):
    path = write(tmp_path / "a.parquet", [[1.0], [2.0]])
    assert parquet_columns(path) == ["features", "n"]
    assert list(parquet_rows(path, ["n"])) == [{"n": 0}, {"n": 1}]


def test_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_A_TIME", 2)
    table = {"a": pa.array([5, 0, 7], pa.uint8()), "gap": [1, None, 2], "text": ["x", "y", "z"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert parquet_ids(tmp_path / "a.parquet", "a").tolist() == [5, 0, 7]
    assert parquet_ids(tmp_path / "a.parquet", "gap") is None
    assert parquet_ids(tmp_path / "a.parquet", "text") is None


def test_files_that_are_none(tmp_path):
    path = write(tmp_path / "a.parquet", MATRIX.tolist())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.parquet is no readable parquet file .*cut off or damaged"):
        parquet_columns(path)
    with pytest.raises(FileNotFoundError, match=r"b.parquet is not a file"):
        parquet_columns(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"c.parquet has no rows"):
        parquet_features(write(tmp_path / "c.parquet", [], pa.list_(pa.float32())), "features", tmp_path)


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install pyarrow"):
        parquet_columns(tmp_path / "a.parquet")
