"""Tables and label files: the same labels from every kind of file."""

import csv
import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetxl_train.data import manifests as module
from hetxl_train.data.manifests import (
    find_column,
    labels_from_array,
    names_from_array,
    parquet_columns,
    parquet_features,
    parquet_ids,
    parquet_rows,
    read_labels,
    read_names,
    table_columns,
    table_rows,
)
from hetxl_train.data.mapped_arrays import open_arrays

NAMES = ["<script>", "a, b", "ünï", 'say "x"', "a, b"]


def write(path, column, values):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["id", column], *([number, value] for number, value in enumerate(values))])
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 0, column: value}) + "\n" for value in values))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"id": list(range(len(values))), column: values}), path)
    elif path.suffix == ".npy":
        np.save(path, np.array(values))
    else:
        path.write_text("\n".join(map(str, values)) + "\n", encoding="utf-8")
    return path


def plain(raw):
    """Labels as lists of names or ids."""
    values = [value if raw.names is None else raw.names[value] for value in raw.values.tolist()]
    if raw.offsets is None:
        return values
    return [values[start:stop] for start, stop in zip(raw.offsets[:-1], raw.offsets[1:], strict=True)]


@pytest.mark.parametrize("suffix", [".npy", ".txt", ".csv", ".jsonl", ".parquet"])
def test_names_are_read_from_every_format(tmp_path, suffix):
    assert plain(read_labels(write(tmp_path / f"labels{suffix}", "label", NAMES))) == NAMES


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_names_with_line_breaks(tmp_path, suffix):
    assert plain(read_labels(write(tmp_path / f"labels{suffix}", "Class", ["a\nb", "c\r\nd"]))) == ["a\nb", "c\r\nd"]


@pytest.mark.parametrize(
    ("suffix", "first"), [(".npy", 7), (".txt", "7"), (".csv", "7"), (".jsonl", "7"), (".parquet", 7)]
)
def test_ids_are_read_from_every_format(tmp_path, suffix, first):
    assert plain(read_labels(write(tmp_path / f"labels{suffix}", "y", [7, 3])))[0] == first


def test_label_lists_are_read_from_every_format(tmp_path):
    rows = [["a", "b"], [], ["c"]]
    for suffix in (".jsonl", ".parquet"):
        assert plain(read_labels(write(tmp_path / f"a{suffix}", "labels", rows))) == rows
    for suffix in (".txt", ".csv"):
        assert plain(read_labels(write(tmp_path / f"a{suffix}", "labels", ["a| b", "", "c"]))) == rows
    assert plain(read_labels(write(tmp_path / "b.jsonl", "labels", ["a|b"]))) == ["a|b"]  # a name there


def test_csv_labels_are_stripped(tmp_path):
    (tmp_path / "a.csv").write_text("id, label\n1, cat\n2,cat\n3, cat | dog\n")
    assert plain(read_labels(tmp_path / "a.csv")) == [["cat"], ["cat"], ["cat", "dog"]]


def test_csv_fields_are_stripped_on_the_left(tmp_path):
    (tmp_path / "a.csv").write_text('label, path\ncat, a b.png\ndog, "c, d.png"\neel," e.png"\n')
    assert table_columns(tmp_path / "a.csv") == ["label", "path"]
    assert list(table_rows(tmp_path / "a.csv", ["path"])) == [["a b.png"], ["c, d.png"], [" e.png"]]


def test_a_csv_of_one_column_needs_no_header(tmp_path):
    (tmp_path / "a.csv").write_text("cat\n\ndog\n")
    assert plain(read_labels(tmp_path / "a.csv")) == ["cat", "dog"]
    (tmp_path / "b.csv").write_text("Label\ncat\n")
    assert plain(read_labels(tmp_path / "b.csv")) == ["cat"]


def test_table_columns_and_rows_are_read(tmp_path):
    path = write(tmp_path / "a.csv", "label", ["x", "y"])
    assert table_columns(path) == ["id", "label"]
    assert list(table_rows(path, ["label", "id"])) == [["x", "0"], ["y", "1"]]
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert table_columns(tmp_path / "empty.csv") == table_columns(tmp_path / "empty.jsonl") == []
    assert find_column(["Id", " Label "], ["class", "label"]) == " Label "
    assert find_column(["Id"], ["label"]) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", b"id,label\n1,a,b\n", "a.csv, line 2: 3 fields where the header has 2"),
        ("a.csv", b"id,name\n1,a\n", "must have a column label or labels.*found 'id', 'name'"),
        ("a.csv", b"label\n\xff\xfe\n", "is not UTF-8 text"),
        ("a.csv", b'label\n"' + b"x" * 200_000 + b'"\n', "is not a readable CSV file"),
        ("a.txt", b"\xff\n", "is not UTF-8 text"),
        ("a.txt", b"a\n\nb\n", "has no label in row 2"),
        ("a.jsonl", b'{"label": 1}\n{', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 must be an object"),
        ("a.xls", b"", "labels must be a file that ends in .npy, .txt"),
    ],
)
def test_bad_label_files_raise(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_labels(tmp_path / name)


def test_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.txt is not a file"):
        read_labels(tmp_path / "no.txt")


def stored(tmp_path, **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return open_arrays(tmp_path / "a.npz")


def test_arrays_of_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    arrays = stored(tmp_path, y=np.array(["b", "a", "ü", "b"]), s=np.array([b"b", b"a"]), o=np.array([0, 3, 3, 4]))
    assert plain(labels_from_array(arrays["y"])) == ["b", "a", "ü", "b"]
    assert plain(labels_from_array(arrays["s"])) == ["b", "a"]
    assert plain(labels_from_array(arrays["y"], arrays["o"])) == [["b", "a", "ü"], [], ["b"]]
    arrays = stored(tmp_path, y=np.array([4, 2]))
    assert isinstance(labels_from_array(arrays["y"]).values, np.memmap)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.array([1.0, 2.0]), TypeError, r"array 'y' of .*whole numbers or names, found float64; convert with"),
        (np.array([True]), TypeError, "found bool"),
        (np.zeros((2, 3), int), ValueError, r"must have one dimension, found shape \[2, 3\]; .* label_offsets"),
        (np.array(["a", ""]), ValueError, "has no label in row 1"),
    ],
)
def test_other_arrays_are_not_labels(tmp_path, labels, error, message):
    with pytest.raises(error, match=message):
        labels_from_array(stored(tmp_path, y=labels)["y"])


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 3, 2, 3], [0, 4]])
def test_inconsistent_offsets_raise(tmp_path, offsets):
    arrays = stored(tmp_path, y=np.arange(3), o=np.array(offsets))
    with pytest.raises(ValueError, match=r"array 'o' of .* must rise from 0 to the number of labels, 3"):
        labels_from_array(arrays["y"], arrays["o"])
    arrays = stored(tmp_path, y=np.arange(3), o=np.array([0.0, 3.0]))
    with pytest.raises(TypeError, match="must be whole numbers"):
        labels_from_array(arrays["y"], arrays["o"])


def test_class_names_are_read(tmp_path):
    assert read_names(write(tmp_path / "a.txt", "", NAMES)) == NAMES
    assert read_names(write(tmp_path / "a.npy", "", NAMES)) == NAMES
    (tmp_path / "b.txt").write_text("a\n\nb\n")
    with pytest.raises(ValueError, match="line 2 is empty"):
        read_names(tmp_path / "b.txt")
    with pytest.raises(TypeError, match="must be a list of strings, found int64"):
        names_from_array(stored(tmp_path, y=np.arange(3))["y"])


MATRIX = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)


def write_features(path, values, kind=None, **options):
    pq.write_table(pa.table({"features": pa.array(values, kind), "n": list(range(len(values)))}), path, **options)
    return path


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64()), pa.list_(pa.float32(), 4)])
def test_features_are_mapped(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "PARQUET_BATCH", 7)
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist(), kind, row_group_size=10)
    mapped = parquet_features(path, "features", tmp_path / "cache")
    assert isinstance(mapped.array, np.memmap)
    np.testing.assert_array_equal(mapped.array, MATRIX)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".npy"]  # nothing half-written


def test_half_precision_stays_half_on_disk(tmp_path):
    path = write_features(tmp_path / "a.parquet", list(MATRIX.astype(np.float16)), pa.list_(pa.float16()))
    mapped = parquet_features(path, "features", tmp_path)
    assert mapped.dtype == np.float16
    np.testing.assert_array_equal(mapped.gather(np.array([3])), MATRIX[[3]].astype(np.float16).astype(np.float32))


def test_parquet_cache_is_reused_until_the_file_changes(tmp_path):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    first = parquet_features(path, "features", tmp_path / "cache").path
    stamp = first.stat().st_mtime_ns
    assert parquet_features(path, "features", tmp_path / "cache").path.stat().st_mtime_ns == stamp
    write_features(path, (2 * MATRIX).tolist())
    os.utime(path, (1, 1))
    np.testing.assert_array_equal(parquet_features(path, "features", tmp_path / "cache").array, 2 * MATRIX)


def test_damaged_parquet_cache_is_rewritten(tmp_path):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    cached = parquet_features(path, "features", tmp_path / "cache").path
    cached.write_bytes(cached.read_bytes()[:-8])
    np.testing.assert_array_equal(parquet_features(path, "features", tmp_path / "cache").array, MATRIX)


def test_cache_directory_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path / "here"))
    assert (
        parquet_features(write_features(tmp_path / "a.parquet", MATRIX.tolist()), "features").path.parent
        == tmp_path / "here"
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cache directory cannot be created .* set HETXL_CACHE"):
        parquet_features(tmp_path / "a.parquet", "features", tmp_path / "file" / "cache")


def test_full_disk_raises(tmp_path, monkeypatch):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage._replace(free=10))
    with pytest.raises(OSError, match=r"has 0.0 GB free, but 0.0 GB are needed; set HETXL_CACHE"):
        parquet_features(path, "features", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([[1.0, 2.0], [3.0]], ValueError, "has 2 numbers in row 0 and 1 in row 1"),
        ([[1.0], None], ValueError, "has no list in row 1"),
        ([1.0, 2.0], ValueError, "must hold lists of numbers, found double"),
        ([[1, 2]], TypeError, "must hold floating-point numbers, found int64"),
    ],
)
def test_other_columns_are_not_features(tmp_path, values, error, message):
    path = write_features(tmp_path / "a.parquet", values)
    with pytest.raises(error, match=f"a.parquet: column 'features' {message}"):
        parquet_features(path, "features", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_lists_of_different_lengths_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PARQUET_BATCH", 1)
    path = write_features(tmp_path / "a.parquet", [[1.0, 2.0], [3.0]])
    with pytest.raises(ValueError, match="has 2 numbers in row 0 and 1 in row 1; all rows must have the same length"):
        parquet_features(path, "features", tmp_path)


def test_parquet_rows_and_columns(tmp_path):
    path = write_features(tmp_path / "a.parquet", [[1.0], [2.0]])
    assert parquet_columns(path) == ["features", "n"]
    assert list(parquet_rows(path, ["n"])) == [{"n": 0}, {"n": 1}]


def test_parquet_ids_need_complete_integers(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PARQUET_BATCH", 2)
    table = {"a": pa.array([5, 0, 7], pa.uint8()), "gap": [1, None, 2], "text": ["x", "y", "z"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert parquet_ids(tmp_path / "a.parquet", "a").tolist() == [5, 0, 7]
    assert parquet_ids(tmp_path / "a.parquet", "gap") is None
    assert parquet_ids(tmp_path / "a.parquet", "text") is None


def test_damaged_parquet_files_raise(tmp_path):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.parquet is not a readable parquet file .*cut off or damaged"):
        parquet_columns(path)
    with pytest.raises(FileNotFoundError, match=r"b.parquet is not a file"):
        parquet_columns(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"c.parquet has no rows"):
        parquet_features(write_features(tmp_path / "c.parquet", [], pa.list_(pa.float32())), "features", tmp_path)


def test_missing_pyarrow_raises(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install pyarrow"):
        parquet_columns(tmp_path / "a.parquet")
