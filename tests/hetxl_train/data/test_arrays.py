"""Embeddings from every form of file, memory-mapped, and the errors for damaged files."""

import json
import pickle
import struct
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from hetxl.functional import LabelLists
from hetxl_train.data import mapped_arrays as module
from hetxl_train.data import open_dataset
from hetxl_train.data.arrays import check_finite, is_array_directory, read_arrays
from hetxl_train.data.mapped_arrays import open_arrays, safetensors_metadata

N, D = 40, 5
FEATURES = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
LABELS = np.arange(N) % 4


def rows_of(dataset):
    """All rows of all splits as (features, class name), sorted."""
    rows = []
    for split in dataset.splits.values():
        every = np.arange(len(split))[::-1]  # any order
        inputs = split.fetch(every).inputs
        assert inputs.dtype == torch.float32
        names = [dataset.class_names[label] for label in split.labels.take(every)]
        rows += zip(map(tuple, inputs.tolist()), names, strict=True)
    return sorted(rows)


EXPECTED = sorted(zip(map(tuple, FEATURES.tolist()), map(str, LABELS.tolist()), strict=True))


def npz(folder):
    np.savez(folder / "data.npz", features=FEATURES, labels=LABELS)
    return folder / "data.npz"


def compressed(folder):
    np.savez_compressed(folder / "data.npz", x=FEATURES, y=LABELS)
    return folder / "data.npz"


def safetensors(folder):
    save_file({"embeddings": torch.from_numpy(FEATURES), "targets": torch.from_numpy(LABELS)}, folder / "d.safetensors")
    return folder / "d.safetensors"


def parquet(folder):
    pq.write_table(pa.table({"features": list(FEATURES), "label": LABELS}), folder / "data.parquet")
    return folder / "data.parquet"


def npy_beside(folder):
    np.save(folder / "data.npy", FEATURES)
    (folder / "data_labels.txt").write_text("\n".join(map(str, LABELS)))
    return folder / "data.npy"


def folder_of_npy(folder):
    np.save(folder / "features.npy", FEATURES)
    np.save(folder / "labels.npy", LABELS)
    return folder


def folder_by_split(folder):
    for name, part in (("train", slice(0, 30)), ("val", slice(30, 35)), ("test", slice(35, 40))):
        np.save(folder / f"{name}.npy", FEATURES[part])
        np.save(folder / f"{name}_labels.npy", LABELS[part])
    return folder


def folder_of_npz(folder):
    np.savez(folder / "train.npz", features=FEATURES[:30], labels=LABELS[:30])
    np.savez(folder / "test.npz", features=FEATURES[30:], labels=LABELS[30:])
    return folder


def npz_by_split(folder):
    np.savez(
        folder / "data.npz",
        train_features=FEATURES[:30],
        train_labels=LABELS[:30],
        val_features=FEATURES[30:],
        val_labels=LABELS[30:],
    )
    return folder / "data.npz"


FORMS = [npz, compressed, safetensors, parquet, npy_beside, folder_of_npy, folder_by_split, folder_of_npz, npz_by_split]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_the_same_rows(tmp_path, form):
    (tmp_path / "in").mkdir()
    dataset = open_dataset(form(tmp_path / "in"), cache=tmp_path / "cache")
    assert list(dataset.splits) == ["train", "validation", "test"]
    assert (dataset.input.kind, dataset.input.shape) == ("features", (D,))
    assert rows_of(dataset) == EXPECTED


def test_splits_of_the_data_keep_their_rows(tmp_path):
    dataset = open_dataset(folder_by_split(tmp_path))
    assert [len(split) for split in dataset.splits.values()] == [30, 5, 5]
    np.testing.assert_array_equal(dataset.splits["test"].fetch(np.array([4, 0])).inputs, FEATURES[[39, 35]])
    assert len(open_dataset(npz_by_split(tmp_path)).splits["validation"]) == 10


def with_splits(path, names, **columns):
    pq.write_table(pa.table({"features": list(FEATURES), **columns, "Split": names}), path)
    return path


SPLIT_COLUMN = ["test", "train", "Val ", "training"] * 10
PLACES = {"train": [1, 3], "validation": [2], "test": [0]}


@pytest.mark.parametrize("lists", [False, True])
def test_parquet_split_column(tmp_path, lists):
    labels = [[f"{row % 4}", f"{row % 3}"] if row % 5 else [] for row in range(N)] if lists else LABELS
    dataset = open_dataset(with_splits(tmp_path / "a.parquet", SPLIT_COLUMN, labels=labels), cache=tmp_path / "cache")
    assert dataset.notes == ()  # nothing was drawn
    for name, split in dataset.splits.items():
        rows = np.flatnonzero(np.isin(np.arange(N) % 4, PLACES[name]))
        every = np.arange(len(split))[::-1]
        np.testing.assert_array_equal(split.fetch(every).inputs, FEATURES[rows[::-1]])
        taken = split.labels.take(np.arange(len(rows)))
        if lists:
            names = [{dataset.class_names[c] for c in taken.classes[taken.examples == r]} for r in range(len(rows))]
            assert names == [set(labels[row]) for row in rows]
        else:
            assert taken.tolist() == LABELS[rows].tolist()
    assert len({split.array for split in dataset.splits.values()}) == 1  # one mapped array, read in place


def test_split_array_of_an_npz_file_assigns_rows(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, features=FEATURES, labels=LABELS, split=SPLIT_COLUMN)
    dataset = open_dataset(path)
    assert dataset.notes == ()
    for name, split in dataset.splits.items():
        rows = np.flatnonzero(np.isin(np.arange(N) % 4, PLACES[name]))
        np.testing.assert_array_equal(split.fetch(np.arange(len(split))).inputs, FEATURES[rows])
        assert split.labels.take(np.arange(len(rows))).tolist() == LABELS[rows].tolist()
    assert list(read_arrays(path, splits=False).by_split) == [""]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"split": ["train"] * 39}, r"'split' of .*a.npz must be 40 strings .* found <U5 of shape \[39\]"),
        (
            {"split": np.arange(N) % 3},
            r"must be 40 strings .*, found int64 .* separate keys for each split, such as train_features",
        ),
        ({"split": ["train"] * 39 + ["tset"]}, r"a.npz, row 40 .* has the split 'tset'"),
        (
            {"split": SPLIT_COLUMN, "val_features": FEATURES, "val_labels": LABELS},
            r"'split' of .* names rows as 'validation', but .*a.npz has others of that name",
        ),
    ],
)
def test_npz_split_array_errors(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", features=FEATURES, labels=LABELS, **arrays)
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path / "a.npz")


def test_splits_missing_in_a_column_are_drawn_from_training_rows(tmp_path):
    path = with_splits(tmp_path / "a.parquet", ["test"] * 10 + ["train"] * 30, labels=LABELS)
    dataset = open_dataset(path, cache=tmp_path / "cache")
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 27, "validation": 3, "test": 10}
    assert rows_of(dataset) == EXPECTED
    np.testing.assert_array_equal(dataset.splits["test"].fetch(np.arange(10)).inputs, FEATURES[:10])


def test_a_split_column_beside_other_files(tmp_path):
    cache, path = tmp_path / "cache", tmp_path / "a.parquet"
    with_splits(path, SPLIT_COLUMN, labels=LABELS)
    with pytest.raises(ValueError, match=r"test=.* was passed, but .*a.parquet already has test rows"):
        open_dataset(path, test=path, cache=cache)
    assert len(open_dataset(npz(tmp_path), test=path, cache=cache).splits["test"]) == 10
    (tmp_path / "f").mkdir()
    with_splits(tmp_path / "f" / "features.parquet", SPLIT_COLUMN, labels=LABELS)
    assert [len(split) for split in open_dataset(tmp_path / "f", cache=cache).splits.values()] == [20, 10, 10]
    np.savez(tmp_path / "f" / "test.npz", features=FEATURES, labels=LABELS)
    with pytest.raises(ValueError, match=r"test.npz has test rows, but so has another file of .*f"):
        open_dataset(tmp_path / "f", cache=cache)


@pytest.mark.parametrize("name", ["tset", None])
def test_unknown_split_name_raises(tmp_path, name):
    path = with_splits(tmp_path / "a.parquet", ["train"] * 39 + [name], labels=LABELS)
    with pytest.raises(
        ValueError, match=rf"a.parquet, row 40 .* has the split {name!r}; use train, validation or test"
    ):
        open_dataset(path, cache=tmp_path / "cache")


def test_other_files_for_labels_and_splits(tmp_path):
    np.save(tmp_path / "a.npy", FEATURES)
    np.save(tmp_path / "other.npy", LABELS)
    np.savez(tmp_path / "v.npz", features=FEATURES[:3], labels=LABELS[:3])
    dataset = open_dataset(tmp_path / "a.npy", labels=tmp_path / "other.npy", validation=tmp_path / "v.npz")
    assert [len(split) for split in dataset.splits.values()] == [36, 3, 4]
    (tmp_path / "f").mkdir()
    with pytest.raises(ValueError, match=r"test=.*v.npz was passed, but .* already has test rows"):
        open_dataset(folder_by_split(tmp_path / "f"), test=tmp_path / "v.npz")
    with pytest.raises(ValueError, match=r"labels=.* is only for .npy files"):
        open_dataset(tmp_path / "v.npz", labels=tmp_path / "other.npy")


def test_several_labels_in_a_row(tmp_path):
    offsets = np.arange(N + 1) * 2
    ids = np.stack((LABELS, LABELS + 1), axis=1).reshape(-1)
    np.savez(tmp_path / "a.npz", features=FEATURES, labels=ids, label_offsets=offsets)
    np.save(tmp_path / "x.npy", FEATURES)
    np.save(tmp_path / "labels.npy", ids)
    np.save(tmp_path / "label_offsets.npy", offsets)
    lists = [[f"{label}", f"{label + 1}"] for label in LABELS]
    pq.write_table(pa.table({"x": list(FEATURES), "labels": lists}), tmp_path / "b.parquet")
    for path in (tmp_path / "a.npz", tmp_path / "x.npy", tmp_path / "b.parquet"):
        dataset = open_dataset(path, cache=tmp_path / "cache")
        assert dataset.multi_label
        split = dataset.splits["test"]
        taken = split.labels.take(np.array([1]))
        assert isinstance(taken, LabelLists)
        row = int(np.flatnonzero((split.fetch(np.array([1])).inputs.numpy() == FEATURES).all(axis=1))[0])
        assert [dataset.class_names[label] for label in taken.classes] == lists[row]


def test_class_names_are_read_from_every_format(tmp_path):
    names = ["<script>", "a, b", "c\nd", "ü", "never"]
    np.savez(tmp_path / "a.npz", features=FEATURES, labels=LABELS, class_names=np.array(names))
    tensors = {"features": torch.from_numpy(FEATURES), "labels": torch.from_numpy(LABELS)}
    save_file(tensors, tmp_path / "a.safetensors", {"class_names": json.dumps(names)})
    for suffix in (".npz", ".safetensors"):
        assert open_dataset(tmp_path / f"a{suffix}").class_names == names
    (tmp_path / "f").mkdir()
    folder_of_npy(tmp_path / "f")
    (tmp_path / "f" / "class_names.txt").write_text("p\nq\nr\ns\n")
    assert open_dataset(tmp_path / "f").class_names == ["p", "q", "r", "s"]
    save_file(tensors, tmp_path / "b.safetensors", {"class_names": "a, b"})
    with pytest.raises(ValueError, match=r"class_names in the metadata of .* is not valid JSON"):
        open_dataset(tmp_path / "b.safetensors")
    np.savez(tmp_path / "c.npz", features=FEATURES, labels=LABELS, class_names=np.array(["a", "b", "c", "d"]))
    with pytest.raises(ValueError, match=r"class_names of .*c.npz differ from those of"):
        open_dataset(tmp_path / "a.npz", test=tmp_path / "c.npz")


def test_labels_are_mapped_to_the_classes_of_a_run(tmp_path):
    np.savez(tmp_path / "a.npz", features=FEATURES, labels=np.array(["cat", "dog"] * 20))
    dataset = open_dataset(tmp_path / "a.npz", classes=["ant", "cat", "dog"], whole=True)
    assert list(dataset.splits) == ["test"]
    assert dataset.splits["test"].labels.ids.tolist() == [1, 2] * 20
    with pytest.raises(ValueError, match="not among the 2 classes: 'dog'"):
        open_dataset(tmp_path / "a.npz", classes=["ant", "cat"])


def test_a_split_is_small_when_pickled_and_reads_the_same(tmp_path):
    np.savez(tmp_path / "a.npz", features=np.zeros((N, 5000), np.float32), labels=LABELS)
    split = open_dataset(tmp_path / "a.npz").splits["train"]
    text = pickle.dumps(split)
    assert len(text) < 5000
    assert torch.equal(pickle.loads(text).fetch(np.array([3])).inputs, split.fetch(np.array([3])).inputs)


def test_nan_and_infinite_values_raise(tmp_path):
    bad = FEATURES.copy()
    bad[7, 2], bad[30, 0], bad[31] = np.nan, np.inf, -np.inf
    np.savez(tmp_path / "a.npz", features=bad, labels=LABELS)
    with pytest.raises(ValueError, match=r"array 'features' of .*NaN or infinite .* in 3 of 40 rows, first in row 7 "):
        open_dataset(tmp_path / "a.npz")
    assert open_dataset(tmp_path / "a.npz", check=False).num_classes == 4
    np.save(tmp_path / "b.npy", np.array([[1e300]]))
    with pytest.raises(ValueError, match=r"\(as float32\) in 1 of 1 rows, first in row 0"):
        check_finite(open_arrays(tmp_path / "b.npy")[""])


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"features": FEATURES, "labels": LABELS[:-1]}, ValueError, "has 40 rows but .* has labels for 39"),
        (
            {"features": FEATURES[0], "labels": LABELS[:5]},
            ValueError,
            r"must hold features \[n, D\].* found float32 of shape \[5\]",
        ),
        ({"features": FEATURES[:0], "labels": LABELS[:0]}, ValueError, "array 'features' of .* has no rows"),
        ({"features": FEATURES[:, :0], "labels": LABELS}, ValueError, r"found float32 of shape \[40, 0\]"),
        ({"features": FEATURES.astype(int), "labels": LABELS}, TypeError, "must be floating-point, found int64"),
        ({"features": FEATURES}, ValueError, "has no labels: looked for label, labels"),
        (
            {"feats": FEATURES, "labels": LABELS},
            ValueError,
            "must have a key features or embeddings or x or .* found 'feats'",
        ),
        ({"features": FEATURES, "labels": LABELS - 1}, ValueError, "must not be negative"),
        (
            {"train_x": FEATURES, "train_y": LABELS, "test_x": FEATURES[:, 1:], "test_y": LABELS},
            ValueError,
            "array 'test_x' of .* has 4 features, .* has 5",
        ),
    ],
)
def test_invalid_arrays_raise(tmp_path, arrays, error, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(error, match=message):
        open_dataset(tmp_path / "a.npz")


def test_features_without_labels_can_be_read(tmp_path):
    np.save(tmp_path / "a.npy", FEATURES)
    assert read_arrays(tmp_path / "a.npy").by_split[""].labels is None


def test_array_directories_are_recognised(tmp_path):
    assert not is_array_directory(tmp_path)
    assert is_array_directory(folder_of_npz(tmp_path))


MATRIX = np.random.default_rng(0).normal(size=(50, 7))


def save(path, array, compressed=False):
    if path.suffix == ".npy":
        np.save(path, array)
        return ""
    if path.suffix == ".npz":
        (np.savez_compressed if compressed else np.savez)(path, other=np.arange(3), a=array)
        return "a"
    save_file({"other": torch.arange(3, dtype=torch.int8), "a": torch.from_numpy(array)}, path)
    return "a"


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_in_any_order_arrive_as_float32(tmp_path, suffix, dtype):
    array = MATRIX.astype(dtype)
    path = tmp_path / f"data{suffix}"
    name = save(path, array)
    mapped = open_arrays(path)[name]
    assert isinstance(mapped.array, np.memmap)
    rows = np.array([49, 0, 3, 3, 17])
    assert mapped.gather(rows).dtype == np.float32
    np.testing.assert_array_equal(mapped.gather(rows), array[rows].astype(np.float32))
    np.testing.assert_array_equal(mapped.block(10, 12), array[10:12].astype(np.float32))


def test_bfloat16_arrays_are_read(tmp_path):
    tensor = torch.from_numpy(MATRIX).bfloat16()
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    mapped = open_arrays(tmp_path / "x.safetensors")["x"]
    assert mapped.is_float
    rows = np.array([5, 1])
    np.testing.assert_array_equal(mapped.gather(rows), tensor.float().numpy()[rows])


def test_fortran_order_and_big_endian(tmp_path):
    for name, array in (("f", np.asfortranarray(MATRIX)), ("b", MATRIX.astype(">f4"))):
        np.save(tmp_path / f"{name}.npy", array)
        mapped = open_arrays(tmp_path / f"{name}.npy")[""]
        np.testing.assert_array_equal(mapped.gather(np.array([2, 1])), array[[2, 1]].astype(np.float32))


def test_compressed_is_loaded_when_small_and_refused_when_large(tmp_path, monkeypatch):
    path = tmp_path / "data.npz"
    save(path, np.asfortranarray(MATRIX), compressed=True)
    np.testing.assert_array_equal(open_arrays(path)["a"].array, MATRIX)
    monkeypatch.setattr(module, "COMPRESSED_LIMIT", 100)
    with pytest.raises(ValueError, match=r"compressed arrays, which cannot be mapped .* numpy\.savez"):
        open_arrays(path)


def test_blocks_cover_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 7 * 8 * 16)
    np.save(tmp_path / "a.npy", MATRIX)
    blocks = list(open_arrays(tmp_path / "a.npy")[""].blocks())
    assert [start for start, _ in blocks] == [0, 16, 32, 48]
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), MATRIX.astype(np.float32))


def test_pickle_holds_the_location_not_the_numbers(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((10_000, 10)))
    mapped = open_arrays(tmp_path / "a.npy")[""]
    assert mapped.array.shape == (10_000, 10)
    text = pickle.dumps(mapped)
    assert len(text) < 2000
    assert pickle.loads(text).gather(np.array([9_999])).shape == (1, 10)


def test_float64_beyond_float32_becomes_infinite_without_a_warning(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1e300]]))
    assert np.isinf(open_arrays(tmp_path / "a.npy")[""].block(0, 1)).all()


def test_safetensors_metadata_is_read(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", {"class_names": "[]"})
    assert safetensors_metadata(tmp_path / "x.safetensors") == {"class_names": "[]"}


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 5, 60, -8])
def test_truncated_files_raise(tmp_path, suffix, keep):
    path = tmp_path / f"data{suffix}"
    save(path, MATRIX)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"data\\{suffix}.*(cut off|write it again)"):
        open_arrays(path)


def test_npz_member_shorter_than_its_header_raises(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4))
    text = (tmp_path / "a.npy").read_bytes().replace(b"(4,)", b"(9,)")
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
            archive.writestr("a.npy", text)
        with pytest.raises(ValueError, match=r"array 'a' of .*cut off"):
            open_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "invalid shape"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}, "not a readable .safetensors file"),
        ({"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}, "cut off"),
        ({"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}, "type F8_E4M3; store it as"),
        ({"dtype": "F32"}, "not a readable .safetensors file"),
        (7, "not a readable .safetensors file"),
    ],
)
def test_inconsistent_safetensors_headers_raise(tmp_path, entry, message):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=message):
        open_arrays(tmp_path / "x.safetensors")


def test_pickles_are_never_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1], [2, 3]], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array(["a", None], dtype=object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(ValueError, match=r"holds Python objects .a pickle., which are never loaded"):
            open_arrays(tmp_path / name)


def test_other_files_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.npy is not a file"):
        open_arrays(tmp_path / "no.npy")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"must end in .npy, .npz or .safetensors, found '.txt'"):
        open_arrays(tmp_path / "a.txt")
    np.save(tmp_path / "a.npy", np.zeros(3, dtype=[("x", "f4"), ("y", "i4")]))
    with pytest.raises(ValueError, match="structured array; save one plain array for each of x, y"):
        open_arrays(tmp_path / "a.npy")
