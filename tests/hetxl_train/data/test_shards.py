"""Tar shards, and images in tables and arrays: the same pixels as from a directory of files."""

import io
import json
import pickle
import tarfile

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hetxl_train.data import arrow_tables, open_dataset, open_inputs, shards
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.pairs import open_pairs
from hetxl_train.data.shards import expand, index_shards, read_shards
from hetxl_train.data.tables import AUTO, Columns
from hetxl_train.data.transforms import ImageTransform

COUNT, SMALL = 12, ImageTransform(16)
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 20, 24, 3), dtype=np.uint8)
NAMES = [f"class{row % 3}" for row in range(COUNT)]


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


FILES = [png(pixels) for pixels in PIXELS]


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_shard(path, rows=range(COUNT), **members):
    """A shard of images, and of what functions of a row return: `cls=lambda row: …`."""
    members = members or {"cls": lambda row: NAMES[row]}
    with tarfile.open(path, "w") as archive:
        for row in rows:
            add(archive, f"./some/{row:04d}.png", FILES[row])
            for extension, content in members.items():
                add(archive, f"./some/{row:04d}.{extension}", str(content(row)).encode())
    return path


def image_folder(folder):
    for row in range(COUNT):
        (folder / NAMES[row]).mkdir(parents=True, exist_ok=True)
        (folder / NAMES[row] / f"{row:04d}.png").write_bytes(FILES[row])
    return folder


def image_forms(folder):
    """The same images in every form."""
    rows = [{"image": {"bytes": FILES[row], "path": None}, "label": NAMES[row]} for row in range(COUNT)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "struct.parquet", row_group_size=5)
    plain = [{"photo": FILES[row], "animal": NAMES[row]} for row in range(COUNT)]
    pq.write_table(pa.Table.from_pylist(plain), folder / "binary.parquet")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=sorted(set(NAMES)))})
    data = datasets.Dataset.from_list(rows, features=features)
    data.to_parquet(str(folder / "hub.parquet"))
    data.save_to_disk(str(folder / "saved"))
    np.savez(folder / "a.npz", images=PIXELS, labels=NAMES)
    np.savez(folder / "b.npz", images=PIXELS.transpose(0, 3, 1, 2), labels=NAMES)
    for number, part in enumerate(np.array_split(np.arange(COUNT), 3)):
        write_shard(folder / f"shard-{number:02d}.tar", part)
    fsspec.filesystem("memory").put(str(folder / "shard-*.tar"), "/shards/")
    (folder / "files").mkdir()
    for row in range(COUNT):
        (folder / "files" / f"{row}.png").write_bytes(FILES[row])
    table = "".join(f"files/{row}.png,{NAMES[row]}\n" for row in range(COUNT))
    (folder / "a.csv").write_text("image_path,category\n" + table)
    names = ("struct.parquet", "binary.parquet", "hub.parquet", "saved", "a.npz", "b.npz", "a.csv")
    paths = [folder / name for name in (*names, "shard-{00..02}.tar", "shard-*.tar")]
    return [*paths, data, "memory://shards/shard-{00..02}.tar", "memory://shards/*.tar"]


@pytest.mark.parametrize("copied", [False, True])
def test_every_form_of_images_gives_the_same_pixels(tmp_path, monkeypatch, copied):
    if copied:
        monkeypatch.setattr(arrow_tables, "HELD", -1)
    folder = open_dataset(image_folder(tmp_path / "folder"), whole=True, transform=SMALL)
    order = np.argsort([int(folder.splits["test"].name(row)[-8:-4]) for row in range(COUNT)])
    seeds = np.arange(COUNT)
    plain, cropped = (folder.splits["test"].fetch(order, s).inputs.numpy() for s in (None, seeds))
    for data in image_forms(tmp_path):
        dataset = open_dataset(data, whole=True, transform=SMALL, cache=tmp_path / "cache")
        split = dataset.splits["test"]
        assert [dataset.class_names[label] for label in split.labels.ids] == NAMES, data
        np.testing.assert_array_equal(split.fetch(np.arange(COUNT)).inputs, plain, err_msg=str(data))
        mixed = np.random.default_rng(1).permutation(COUNT)
        again = pickle.loads(pickle.dumps(split)).fetch(mixed, seeds[mixed])  # as in a worker
        np.testing.assert_array_equal(again.inputs, cropped[mixed], err_msg=str(data))
        shown = split.show(3)
        assert any(value is not None for value in (shown.image, shown.encoded, shown.pixels))
        inputs = open_inputs(data, InputSpec("image", (3, 16, 16)), cache=tmp_path / "cache")
        np.testing.assert_array_equal(inputs.fetch(np.array([5])).inputs, plain[[5]])


def test_image_arrays_keep_their_size_and_channels(tmp_path):
    np.save(tmp_path / "grey.npy", PIXELS[..., 0])
    np.save(tmp_path / "grey_labels.npy", np.arange(COUNT) % 3)
    dataset = open_dataset(tmp_path / "grey.npy", whole=True)
    assert dataset.input.shape == (1, 24, 24)
    np.savez(tmp_path / "a.npz", image=PIXELS, label=NAMES)
    assert open_dataset(tmp_path / "a.npz", whole=True).input.shape == (3, 24, 24)
    np.savez(tmp_path / "a.npz", image=np.zeros((4, 8, 8, 5), np.uint8), label=np.arange(4))
    with pytest.raises(ValueError, match=r"with 1, 3 or 4 channels, found \[4, 8, 8, 5\]"):
        open_dataset(tmp_path / "a.npz")


def test_shards_belong_to_the_split_that_their_names_say(tmp_path):
    for name, part in (("train-0", range(6)), ("train-1", range(6, 8)), ("my_val", [8, 9]), ("test-000", [10, 11])):
        write_shard(tmp_path / f"{name}.tar", part)
    dataset = open_dataset(tmp_path, cache=tmp_path / "cache", transform=SMALL)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 8, "validation": 2, "test": 2}
    (tmp_path / "cache").rename(tmp_path / "old")
    other = write_shard(tmp_path / "old" / "x.tar", [3, 4])
    assert len(open_dataset(tmp_path / "train-{0,1}.tar", test=other, cache=tmp_path / "c").splits["test"]) == 2


def test_labels_are_read_from_every_member(tmp_path):
    def labels_of(columns=AUTO, **members):
        write_shard(tmp_path / "a.tar", **members)
        raw = read_shards([str(tmp_path / "a.tar")], columns, cache=tmp_path / "cache").by_split[""].labels
        values = [raw.names[value] for value in raw.values]
        return values[:3] if raw.offsets is None else np.split(values, raw.offsets[1:-1])[0].tolist()

    assert labels_of(cls=lambda row: row % 3) == ["0", "1", "2"]
    assert labels_of(json=lambda row: json.dumps({"class": NAMES[row], "n": row})) == NAMES[:3]
    assert labels_of(Columns(label="n"), json=lambda row: json.dumps({"class": "x", "n": row})) == ["0", "1", "2"]
    assert labels_of(json=lambda row: json.dumps({"labels": ["a", "b"]})) == ["a", "b"]
    assert labels_of(txt=lambda row: f" {NAMES[row]}\n") == NAMES[:3]
    assert labels_of(cls=lambda row: 7, txt=lambda row: "a caption") == ["7", "7", "7"]
    with pytest.raises(ValueError, match=r"a.tar/\./some/0000.png has no label: looked for KEY.cls"):
        labels_of(json=lambda row: json.dumps({"n": row}))


def test_the_index_is_kept_until_a_shard_changes(tmp_path, monkeypatch):
    path = str(write_shard(tmp_path / "a.tar"))
    first = index_shards([path], cache=tmp_path)[0]
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_index", None)  # it is not read again
        again = index_shards([path], cache=tmp_path)[0]
    assert again.starts.tolist() == first.starts.tolist()
    assert list(again.labels) == list(first.labels) == [json.dumps(name) for name in NAMES]
    write_shard(path, range(5))
    assert len(index_shards([path], cache=tmp_path)[0].starts) == 5
    for index in (tmp_path / "shards").iterdir():
        index.write_bytes(index.read_bytes()[:50])  # damaged: written again
    assert len(index_shards([path], cache=tmp_path)[0].starts) == 5


def test_unreadable_images_and_left_out_samples_are_reported(tmp_path):
    path = write_shard(tmp_path / "a.tar", range(3))
    with tarfile.open(path, "a") as archive:
        add(archive, "bad.png", b"no image")
        add(archive, "bad.cls", b"class0")
        add(archive, "alone.cls", b"class0")
    dataset = open_dataset(path, whole=True, transform=SMALL, cache=tmp_path)
    assert "left out samples of shards without an image: 1" in dataset.notes
    fetched = dataset.splits["test"].fetch(np.arange(4))
    assert fetched.rows.tolist() == [0, 1, 2]
    assert fetched.unreadable == ((f"{path}/bad.png", "not an image"),)


def test_bad_shards_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no.tar is not a file"):
        open_dataset(tmp_path / "no.tar", cache=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no-\*.tar matches no file"):
        open_dataset(tmp_path / "no-*.tar", cache=tmp_path)
    (tmp_path / "a.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(ValueError, match=r"a.tar is not a readable tar file"):
        open_dataset(tmp_path / "a.tar", cache=tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a.tar.gz is compressed.* unpack it to .tar"):
        open_dataset(tmp_path / "a.tar.gz", cache=tmp_path)
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        add(archive, "a.cls", b"1")
    with pytest.raises(ValueError, match=r"b.tar has no images"):
        open_dataset(tmp_path / "b.tar", cache=tmp_path)


def test_braces_are_expanded():
    assert expand("s3://b/a-{08..10}.tar") == [f"s3://b/a-{number}.tar" for number in ("08", "09", "10")]
    assert expand("{train,val}-{0..1}.tar") == ["train-0.tar", "train-1.tar", "val-0.tar", "val-1.tar"]
    assert expand("plain.tar") == ["plain.tar"]


def test_shards_of_captions_are_pairs(tmp_path):
    write_shard(tmp_path / "train-0.tar", range(8), txt=lambda row: f"caption {row}")
    write_shard(tmp_path / "val-0.tar", [8, 9], json=lambda row: json.dumps({"caption": f"caption {row}"}))
    write_shard(tmp_path / "test-0.tar", [10, 11], txt=lambda row: f"caption {row}")
    pairs = open_pairs(f"{tmp_path}/{{train,val,test}}-0.tar", transform=ImageTransform(16), cache=tmp_path)
    assert {name: split.captions() for name, split in pairs.splits.items()} == {
        "train": [f"caption {row}" for row in range(8)],
        "validation": ["caption 8", "caption 9"],
        "test": ["caption 10", "caption 11"],
    }
    assert pairs.splits["test"].images.fetch(np.array([1])).inputs.shape == (1, 3, 16, 16)
    write_shard(tmp_path / "c.tar", range(2), cls=lambda row: row)
    with pytest.raises(ValueError, match=r"c.tar/\./some/0000.png has no caption: looked for KEY.txt"):
        open_pairs(tmp_path / "c.tar", cache=tmp_path)


def test_shard_that_changes_while_it_is_in_use_is_an_error_that_names_it(tmp_path):
    write_shard(tmp_path / "a.tar", range(8), cls=lambda row: row % 2)
    split = open_dataset(tmp_path / "a.tar", cache=tmp_path).splits["train"]
    split.fetch(np.arange(2))
    write_shard(tmp_path / "a.tar", range(1, 8), cls=lambda row: row % 2)
    with pytest.raises(OSError, match=r"a\.tar was changed while it was in use"):
        split.fetch(np.arange(2))
