"""Tables and label files: the same labels from every kind of file."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetxl.data import tables as module
from hetxl.data.stored import open_arrays
from hetxl.data.tables import (
    find_column,
    labels_from_array,
    names_from_array,
    read_labels,
    read_names,
    table_columns,
    table_rows,
)

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
def test_names(tmp_path, suffix):
    assert plain(read_labels(write(tmp_path / f"labels{suffix}", "label", NAMES))) == NAMES


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_names_with_line_breaks(tmp_path, suffix):
    assert plain(read_labels(write(tmp_path / f"labels{suffix}", "Class", ["a\nb", "c\r\nd"]))) == ["a\nb", "c\r\nd"]


@pytest.mark.parametrize(
    ("suffix", "first"), [(".npy", 7), (".txt", "7"), (".csv", "7"), (".jsonl", "7"), (".parquet", 7)]
)
def test_ids(tmp_path, suffix, first):
    assert plain(read_labels(write(tmp_path / f"labels{suffix}", "y", [7, 3])))[0] == first


def test_lists(tmp_path):
    rows = [["a", "b"], [], ["c"]]
    for suffix in (".jsonl", ".parquet"):
        assert plain(read_labels(write(tmp_path / f"a{suffix}", "labels", rows))) == rows
    for suffix in (".txt", ".csv"):
        assert plain(read_labels(write(tmp_path / f"a{suffix}", "labels", ["a| b", "", "c"]))) == rows
    assert plain(read_labels(write(tmp_path / "b.jsonl", "labels", ["a|b"]))) == ["a|b"]  # a name there


def test_spaces_around_the_labels_of_a_csv_are_none_of_theirs(tmp_path):
    (tmp_path / "a.csv").write_text("id, label\n1, cat\n2,cat\n3, cat | dog\n")
    assert plain(read_labels(tmp_path / "a.csv")) == [["cat"], ["cat"], ["cat", "dog"]]


def test_spaces_before_the_fields_of_a_csv_are_none_of_theirs(tmp_path):
    (tmp_path / "a.csv").write_text('label, path\ncat, a b.png\ndog, "c, d.png"\neel," e.png"\n')
    assert table_columns(tmp_path / "a.csv") == ["label", "path"]
    assert list(table_rows(tmp_path / "a.csv", ["path"])) == [["a b.png"], ["c, d.png"], [" e.png"]]


def test_a_csv_of_one_column_needs_no_header(tmp_path):
    (tmp_path / "a.csv").write_text("cat\n\ndog\n")
    assert plain(read_labels(tmp_path / "a.csv")) == ["cat", "dog"]
    (tmp_path / "b.csv").write_text("Label\ncat\n")
    assert plain(read_labels(tmp_path / "b.csv")) == ["cat"]


def test_tables(tmp_path):
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
        ("a.csv", b"id,name\n1,a\n", "must have a column label or labels.*found id, name"),
        ("a.csv", b"label\n\xff\xfe\n", "is not UTF-8 text"),
        ("a.csv", b'label\n"' + b"x" * 200_000 + b'"\n', "is no readable CSV file"),
        ("a.txt", b"\xff\n", "is not UTF-8 text"),
        ("a.txt", b"a\n\nb\n", "has no label in row 2"),
        ("a.jsonl", b'{"label": 1}\n{', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 must be an object"),
        ("a.xls", b"", "labels must be a file that ends in .npy, .txt"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_labels(tmp_path / name)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.txt is not a file"):
        read_labels(tmp_path / "no.txt")


def stored(tmp_path, **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return open_arrays(tmp_path / "a.npz")


def test_arrays_of_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    found = stored(tmp_path, y=np.array(["b", "a", "ü", "b"]), s=np.array([b"b", b"a"]), o=np.array([0, 3, 3, 4]))
    assert plain(labels_from_array(found["y"])) == ["b", "a", "ü", "b"]
    assert plain(labels_from_array(found["s"])) == ["b", "a"]
    assert plain(labels_from_array(found["y"], found["o"])) == [["b", "a", "ü"], [], ["b"]]
    found = stored(tmp_path, y=np.array([4, 2]))
    assert isinstance(labels_from_array(found["y"]).values, np.memmap)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.array([1.0, 2.0]), TypeError, r"array 'y' of .*whole numbers or names, found float64; convert with"),
        (np.array([True]), TypeError, "found bool"),
        (np.zeros((2, 3), int), ValueError, r"must have one dimension, found shape \[2, 3\]; .* label_offsets"),
        (np.array(["a", ""]), ValueError, "has no label in row 1"),
    ],
)
def test_arrays_that_are_no_labels(tmp_path, labels, error, message):
    with pytest.raises(error, match=message):
        labels_from_array(stored(tmp_path, y=labels)["y"])


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 3, 2, 3], [0, 4]])
def test_offsets_that_do_not_fit(tmp_path, offsets):
    found = stored(tmp_path, y=np.arange(3), o=np.array(offsets))
    with pytest.raises(ValueError, match=r"array 'o' of .* must rise from 0 to the number of labels, 3"):
        labels_from_array(found["y"], found["o"])
    found = stored(tmp_path, y=np.arange(3), o=np.array([0.0, 3.0]))
    with pytest.raises(TypeError, match="must be whole numbers"):
        labels_from_array(found["y"], found["o"])


def test_class_names(tmp_path):
    assert read_names(write(tmp_path / "a.txt", "", NAMES)) == NAMES
    assert read_names(write(tmp_path / "a.npy", "", NAMES)) == NAMES
    (tmp_path / "b.txt").write_text("a\n\nb\n")
    with pytest.raises(ValueError, match="line 2 is empty"):
        read_names(tmp_path / "b.txt")
    with pytest.raises(TypeError, match="must be a list of strings, found int64"):
        names_from_array(stored(tmp_path, y=np.arange(3))["y"])
