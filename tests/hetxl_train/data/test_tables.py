"""Tables and label files: the same labels from every kind of file, and columns found by name and type."""

import csv
import json
import os

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetxl_train.data import arrow_tables, cache, label_files, open_dataset, open_inputs, vectors
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.label_files import labels_from_array, names_from_array, read_labels, read_names
from hetxl_train.data.mapped_arrays import open_arrays
from hetxl_train.data.read import _tables_in_memory, read_data
from hetxl_train.data.tables import Columns, find_column, find_roles, open_table, read_table

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
    table = open_table(tmp_path / "a.csv")
    assert list(table.kinds) == ["label", "path"]
    assert list(table.rows(["path"])) == [["a b.png"], ["c, d.png"], [" e.png"]]


def test_a_csv_of_one_column_needs_no_header(tmp_path):
    (tmp_path / "a.csv").write_text("cat\n\ndog\ncat\n")
    assert plain(read_labels(tmp_path / "a.csv")) == ["cat", "dog", "cat"]
    (tmp_path / "b.csv").write_text("Label\ncat\n")
    assert plain(read_labels(tmp_path / "b.csv")) == ["cat"]


def test_table_columns_and_rows_are_read(tmp_path):
    table = open_table(write(tmp_path / "a.csv", "label", ["x", "y"]))
    assert list(table.kinds) == ["id", "label"]
    assert list(table.rows(["label", "id"])) == [["x", "0"], ["y", "1"]]
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert open_table(tmp_path / "empty.csv").kinds == open_table(tmp_path / "empty.jsonl").kinds == {}
    assert find_column(["Id", " Label "], ["class", "label"]) == " Label "
    assert find_column(["Id"], ["label"]) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", b"id,label\n1,a,b\n", "a.csv, line 2: 3 fields where the header has 2"),
        ("a.csv", b"id,name\n1,a\n", "must have a column of labels .label, labels.*'id' .text., 'name'"),
        ("a.csv", b"label\n\xff\xfe\n", "is not UTF-8 text"),
        ("a.csv", b'label\n"' + b"x" * 200_000 + b'"\n', "is not a readable CSV file"),
        ("a.txt", b"\xff\n", "is not UTF-8 text"),
        ("a.txt", b"a\n\nb\n", "has no label in row 2"),
        ("a.jsonl", b'{"label": 1}\n{', "a.jsonl, line 2 is not valid JSON"),
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


def test_label_arrays_are_read_as_names_ids_or_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(label_files, "CHUNK", 2)
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


def features_of(path, directory=None):
    return open_table(path).vectors("features", directory)


@pytest.fixture
def copies(monkeypatch):
    """Columns of any size are copied into the cache."""
    monkeypatch.setattr(vectors, "HELD", -1)
    monkeypatch.setattr(arrow_tables, "HELD", -1)


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64()), pa.list_(pa.float32(), 4)])
def test_large_columns_of_features_are_copied_with_a_notice(tmp_path, monkeypatch, copies, capfd, kind):
    monkeypatch.setattr(arrow_tables, "BATCH", 7)
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist(), kind, row_group_size=10)
    mapped = features_of(path, tmp_path / "cache")
    assert isinstance(mapped.array, np.memmap)
    np.testing.assert_array_equal(mapped.array, MATRIX)
    names = sorted(file.suffix for file in (tmp_path / "cache").iterdir())
    assert names == [".npy", ".sha256"]  # nothing half-written
    assert f"Copying column 'features' of {path} (0.0 GB) to {tmp_path / 'cache'} once" in capfd.readouterr().err
    assert str(mapped) == f"column 'features' of {path}"  # errors do not name the copy


def test_small_columns_of_features_stay_in_memory(tmp_path, capfd):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    np.testing.assert_array_equal(features_of(path, tmp_path / "cache").array, MATRIX)
    assert not (tmp_path / "cache").exists()
    assert capfd.readouterr().err == ""


def test_half_precision_stays_half_on_disk(tmp_path, copies):
    path = write_features(tmp_path / "a.parquet", list(MATRIX.astype(np.float16)), pa.list_(pa.float16()))
    mapped = features_of(path, tmp_path)
    assert mapped.dtype == np.float16
    np.testing.assert_array_equal(mapped.gather(np.array([3])), MATRIX[[3]].astype(np.float16).astype(np.float32))


def test_copies_are_reused_until_the_file_changes(tmp_path, copies):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    first = features_of(path, tmp_path / "cache").path
    stamp = first.stat().st_mtime_ns
    assert features_of(path, tmp_path / "cache").path.stat().st_mtime_ns == stamp
    write_features(path, (2 * MATRIX).tolist())
    os.utime(path, (1, 1))
    np.testing.assert_array_equal(features_of(path, tmp_path / "cache").array, 2 * MATRIX)


@pytest.mark.parametrize("change", [lambda content: content[:-8], lambda content: content[:-8] + bytes(8)])
def test_damaged_copies_are_rewritten(tmp_path, copies, change):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    cached = features_of(path, tmp_path / "cache").path
    stamp = cached.stat()
    cached.write_bytes(change(cached.read_bytes()))
    os.utime(cached, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    np.testing.assert_array_equal(features_of(path, tmp_path / "cache").array, MATRIX)


def test_a_copy_made_twice_at_once_stays_readable(tmp_path, copies):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    first = features_of(path, tmp_path / "cache")
    first.path.with_name(f"{first.path.name}.sha256").unlink()  # as another process saw it that began earlier
    features_of(path, tmp_path / "cache")
    np.testing.assert_array_equal(first.gather(np.arange(3)), MATRIX[:3])


def test_damaged_copies_of_texts_are_rewritten(tmp_path, copies):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two", "three"]}), path)
    assert open_table(path).texts("text", tmp_path / "cache").take([2]) == ["three"]
    (copy,) = (tmp_path / "cache").rglob("*.arrow")
    copy.write_bytes(copy.read_bytes().replace(b"three", b"other"))
    assert open_table(path).texts("text", tmp_path / "cache").take([2]) == ["three"]


def test_cache_directory_of_the_environment(tmp_path, monkeypatch, copies):
    monkeypatch.setenv("HETXL_CACHE", str(tmp_path / "here"))
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    assert features_of(path).path.parent == tmp_path / "here"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cache directory cannot be created .* set HETXL_CACHE"):
        features_of(path, tmp_path / "file" / "cache")


def test_copies_beyond_the_disk_or_the_limit_raise(tmp_path, monkeypatch, copies):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    with monkeypatch.context() as patch:
        usage = cache.shutil.disk_usage(tmp_path)
        patch.setattr(cache.shutil, "disk_usage", lambda folder: usage._replace(free=10))
        with pytest.raises(OSError, match=r"takes 0.0 GB, but .* has 0.0 GB free; set HETXL_CACHE"):
            features_of(path, tmp_path / "cache")
    monkeypatch.setenv("HETXL_CACHE_LIMIT", "1e-9")
    with pytest.raises(OSError, match=r"column 'features' of .*a.parquet takes .* above the limit of 0 GB"):
        features_of(path, tmp_path / "cache")
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
        features_of(path, tmp_path / "cache")


def test_lists_of_different_lengths_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "BATCH", 1)
    path = write_features(tmp_path / "a.parquet", [[1.0, 2.0], [3.0]])
    with pytest.raises(ValueError, match="has 2 numbers in row 0 and 1 in row 1; all rows must have the same length"):
        features_of(path, tmp_path)


def test_parquet_ids_need_complete_integers(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tables, "BATCH", 2)
    columns = {"a": pa.array([5, 0, 7], pa.uint8()), "gap": [1, None, 2], "text": ["x", "y", "z"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    table = open_table(tmp_path / "a.parquet")
    assert list(table.rows(["text", "a"])) == [("x", 5), ("y", 0), ("z", 7)]
    assert table.integers("a").tolist() == [5, 0, 7]
    assert table.integers("gap") is None
    assert table.integers("text") is None


def test_damaged_parquet_files_raise(tmp_path):
    path = write_features(tmp_path / "a.parquet", MATRIX.tolist())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.parquet is not a readable parquet file .*truncated or damaged"):
        read_table(open_table(path))
    with pytest.raises(FileNotFoundError, match=r"b.parquet is not a file"):
        read_table(open_table(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match=r"c.parquet has no rows"):
        features_of(write_features(tmp_path / "c.parquet", [], pa.list_(pa.float32())), tmp_path)


def roles_of(**columns):
    return find_roles(next(iter(_tables_in_memory(pa.table(columns)).values())), Columns())


VECTORS, NUMBERS, WORDS, FILES = MATRIX[:3].tolist(), [0, 1, 0], ["a", "b", "a"], ["x.png", "y.JPG", "z.png"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"embedding": VECTORS, "category": WORDS}, ("embedding", "features", "category")),
        ({"Vector": VECTORS, "target": NUMBERS}, ("Vector", "features", "target")),
        ({"image_path": FILES, "class": WORDS}, ("image_path", "image", "class")),
        ({"file": FILES, "y": NUMBERS}, ("file", "image", "y")),
        ({"image": [b"1", b"2", b"3"], "label": NUMBERS}, ("image", "image", "label")),
        ({"text": ["a b", "c", "d"], "label": NUMBERS}, ("text", "text", "label")),
        ({"minilm": VECTORS, "animal": WORDS}, ("minilm", "features", "animal")),  # by type
        ({"where": FILES, "kind": NUMBERS}, ("where", "image", "kind")),
        ({"photo": [b"1", b"2", b"3"], "kind": NUMBERS}, ("photo", "image", "kind")),
        ({"utterance": WORDS, "intent": NUMBERS}, ("utterance", "text", "intent")),
        ({"text": WORDS, "embedding": VECTORS, "label": WORDS}, ("embedding", "features", "label")),
    ],
)
def test_columns_are_found_by_name_and_type(columns, expected):
    assert roles_of(**columns)[:3] == expected


def test_ambiguous_columns_raise_and_are_listed():
    listed = r"its columns: 'a' \(vector\), 'b' \(vector\), 'label' \(integer\)"
    with pytest.raises(ValueError, match=rf"--features-column or --text-column; {listed}"):
        roles_of(a=VECTORS, b=VECTORS, label=NUMBERS)
    with pytest.raises(ValueError, match=r"must have a column of labels .* name it with --label-column; its columns"):
        roles_of(embedding=VECTORS, a=WORDS, b=NUMBERS)


def test_columns_that_are_named_are_used(tmp_path):
    columns = {"a": VECTORS * 10, "b": (2 * MATRIX[:3]).tolist() * 10, "u": WORDS * 10, "v": NUMBERS * 10}
    columns["part"] = ["train", "val", "test"] * 10
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    chosen = Columns("b", "u", "part")
    dataset = open_dataset(tmp_path / "a.parquet", columns=chosen)
    assert dataset.class_names == ["a", "b"]
    np.testing.assert_array_equal(dataset.splits["test"].fetch(np.array([0])).inputs, 2 * MATRIX[[2]])
    with pytest.raises(ValueError, match=r"has no column 'emb' \(--features-column\); its columns: 'a' \(vector\), "):
        open_dataset(tmp_path / "a.parquet", columns=Columns("emb"))
    np.savez(tmp_path / "a.npz", mine=MATRIX, kinds=np.arange(30) % 3)
    assert open_dataset(tmp_path / "a.npz", columns=Columns("mine", "kinds")).num_classes == 3


def test_tables_without_labels_are_predicted_and_errors_name_the_table(tmp_path):
    pq.write_table(pa.table({"embedding": MATRIX.tolist()}), tmp_path / "a.parquet")
    split = open_inputs(tmp_path / "a.parquet", InputSpec("features", (4,)))
    np.testing.assert_array_equal(split.fetch(np.array([3])).inputs, MATRIX[[3]])
    with pytest.raises(ValueError, match=r"a.parquet must have a column of labels"):
        open_dataset(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column 'embedding' of .*a.parquet has shape \[30, 4\], but the model takes"):
        open_inputs(tmp_path / "a.parquet", InputSpec("features", (5,)))


def table_forms(folder):
    """The same table in memory and in files of every kind."""
    rows = [{"vector": MATRIX[row].tolist(), "category": f"c{row % 3}"} for row in range(30)]
    table = pa.Table.from_pylist(rows)
    data = datasets.Dataset(table)
    pq.write_table(table.slice(0, 20), folder / "part-0.parquet")
    pq.write_table(table.slice(20), folder / "part-1.parquet")
    with pa.OSFile(str(folder / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(folder / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["vector", "category"], *([str(r["vector"]), r["category"]] for r in rows)])
    (folder / "parquet").mkdir()
    for name in ("part-0.parquet", "part-1.parquet"):
        (folder / name).rename(folder / "parquet" / name)
    data.save_to_disk(str(folder / "saved"))
    remote = fsspec.filesystem("memory")
    remote.pipe("/tables/a.jsonl", (folder / "a.jsonl").read_bytes())
    remote.put(str(folder / "parquet" / "part-0.parquet"), "/tables/a.parquet")
    files = [folder / name for name in ("file.arrow", "stream.arrow", "a.jsonl", "a.csv", "parquet", "saved")]
    return [table.to_pandas(), data, table, *files, f"hf:{folder / 'parquet'}", "memory://tables/a.jsonl"]


def test_every_form_of_a_table_gives_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    for data in table_forms(tmp_path):
        dataset = open_dataset(data, cache=tmp_path / "cache", whole=True)
        assert dataset.class_names == ["c0", "c1", "c2"], data
        split = dataset.splits.get("test") or dataset.splits["train"]
        np.testing.assert_array_equal(split.fetch(np.arange(30)).inputs, MATRIX)
        assert split.labels.ids.tolist() == [0, 1, 2] * 10
    assert len(read_data("memory://tables/a.parquet").by_split[""].inputs) == 20


def test_datasets_in_memory_by_split_keep_their_class_names():
    kinds = {"x": datasets.List(datasets.Value("float32")), "y": datasets.ClassLabel(names=["b", "a"])}
    features = datasets.Features(kinds)
    part = datasets.Dataset.from_dict({"x": VECTORS, "y": NUMBERS}, features=features)
    data = datasets.DatasetDict(train=part, validation=part, test=part, unsupervised=part)
    dataset = open_dataset(data)
    assert dataset.class_names == ["b", "a"]
    assert list(dataset.splits) == ["train", "validation", "test"]
    assert dataset.splits["test"].labels.ids.tolist() == NUMBERS
    with pytest.raises(ValueError, match="must have a split train, validation or test, found 'fold'"):
        open_dataset({"fold": part})
    with pytest.raises(TypeError, match=r"data must be a path, a pandas DataFrame.* found list"):
        open_dataset([1, 2])


def test_text_tables_with_uneven_or_wrong_vectors_raise(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"embedding": [0.5, 1], "label": 0}\n{"embedding": [0.5], "label": 1}\n')
    with pytest.raises(ValueError, match="'embedding' has 2 numbers in row 0 and 1 in row 1"):
        read_data(path)
    path.write_text('{"embedding": [0.5, 1], "label": 0}\n{"embedding": "x", "label": 1}\n')
    with pytest.raises(ValueError, match="column 'embedding' must hold lists of numbers, found 'x' in row 1"):
        read_data(path)


@pytest.mark.parametrize("write", [pa.ipc.new_file, pa.ipc.new_stream])
def test_mapped_table_that_is_cut_off_while_it_is_in_use_is_an_error(tmp_path, write):
    table = pa.table({"text": ["one", "two", "three"] * 4000})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, write(sink, table.schema) as writer:
        writer.write_table(table)
    texts = open_table(tmp_path / "a.arrow").texts("text")
    assert texts.take([1]) == ["two"]
    os.truncate(tmp_path / "a.arrow", 100)  # reading the missing pages would end the process by SIGBUS
    with pytest.raises(OSError, match=r"a\.arrow was changed while it was in use"):
        texts.take([11_999])
