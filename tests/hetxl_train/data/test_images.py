"""Images: every mode decoded to the right colours, unreadable files, directories and manifests."""

import csv
import json
import os
import pickle
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from hetxl_train.data import open_dataset
from hetxl_train.data.image_files import Paths, read_image
from hetxl_train.data.image_folders import read_directory
from hetxl_train.data.images import ImageSplit
from hetxl_train.data.labels import Labels
from hetxl_train.data.read import read_data
from hetxl_train.data.transforms import ImageTransform

RED, SIZE = (200, 30, 40), (48, 32)


def split_of(*paths):
    labels = Labels(np.zeros(len(paths), dtype=np.int64))
    return ImageSplit(Paths(map(str, paths)), labels, transform=ImageTransform(16))


def claim_size(source, target, width, height):
    """A PNG that says it is larger than it is."""
    text = source.read_bytes()
    header = b"IHDR" + struct.pack(">II", width, height) + text[24:29]
    target.write_bytes(text[:12] + header + struct.pack(">I", zlib.crc32(header)) + text[33:])


def colour(path):
    """The mean colour of an image as read."""
    return np.asarray(read_image(str(path))).reshape(-1, 3).mean(axis=0)


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        ("rgb.jpg", Image.new("RGB", SIZE, RED), RED),
        ("rgb.png", Image.new("RGB", SIZE, RED), RED),
        ("rgb.webp", Image.new("RGB", SIZE, RED), RED),
        ("rgb.gif", Image.new("RGB", SIZE, RED), RED),
        ("rgb.tiff", Image.new("RGB", SIZE, RED), RED),
        ("palette.png", Image.new("RGB", SIZE, RED).convert("P", palette=Image.Palette.ADAPTIVE), RED),
        ("clear.png", Image.new("RGBA", SIZE, (*RED, 0)), (255, 255, 255)),
        ("half.png", Image.new("RGBA", SIZE, (0, 0, 0, 128)), (127, 127, 127)),
        ("greyalpha.png", Image.new("LA", SIZE, (0, 0)), (255, 255, 255)),
        ("grey.png", Image.new("L", SIZE, 77), (77, 77, 77)),
        ("bits.png", Image.new("1", SIZE, 1), (255, 255, 255)),
        ("cmyk.jpg", Image.new("CMYK", SIZE, (0, 255, 255, 0)), (255, 0, 0)),
        ("16bit.png", Image.fromarray(np.full(SIZE, 0x8080, np.uint16)), (128, 128, 128)),
        ("32bit.tiff", Image.fromarray(np.full(SIZE, 0x8080, np.int32)), (128, 128, 128)),
        ("float.tiff", Image.fromarray(np.full(SIZE, 0.5, np.float32)), (128, 128, 128)),
    ],
)
def test_images_of_every_mode_become_rgb(tmp_path, name, image, expected):
    image.save(tmp_path / name)
    np.testing.assert_allclose(colour(tmp_path / name), expected, atol=4)


def test_transparency_of_a_palette(tmp_path):
    image = Image.new("P", SIZE, 0)
    image.putpalette([0, 0, 0] * 256)
    image.save(tmp_path / "a.png", transparency=0)
    np.testing.assert_array_equal(colour(tmp_path / "a.png"), (255, 255, 255))


def test_exif_orientation_is_applied(tmp_path):
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:10] = 255  # bright at the top of the sensor
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: the top becomes the right
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    pixels = np.asarray(read_image(str(tmp_path / "a.png")))
    assert pixels.shape == (60, 40, 3)
    assert (pixels[:, -10:] == 255).all()
    assert (pixels[:, :-10] == 0).all()


def test_images_depend_only_on_the_seed(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(tmp_path / name)
    split = split_of(tmp_path / "a.png", tmp_path / "b.png")
    both = split.fetch(np.array([0, 1]), np.array([5, 6])).inputs
    assert (both.shape, both.dtype) == ((2, 3, 16, 16), torch.float32)
    assert torch.equal(split.fetch(np.array([1, 0]), np.array([6, 5])).inputs.flip(0), both)
    assert not torch.equal(split.fetch(np.array([0]), np.array([7])).inputs, both[:1])
    copy = pickle.loads(pickle.dumps(split))
    assert torch.equal(copy.fetch(np.array([0, 1]), np.array([5, 6])).inputs, both)


def test_unreadable_files_are_left_out_and_listed(tmp_path):
    Image.new("RGB", SIZE, RED).save(tmp_path / "good.png")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:1000])
    Image.fromarray(noise).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:3000])
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "script.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"
    )  # would start a program
    claim_size(tmp_path / "good.png", tmp_path / "huge.png", 20_000, 20_000)
    Image.new("1", (9_500, 9_500)).save(tmp_path / "large.png", compress_level=1)  # Pillow only warns of it
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    names = ["cut.jpg", "good.png", "cut.png", "text.jpg", "empty.jpg", "script.jpg", "huge.png", "large.png"]
    names += ["folder.jpg", "pipe.jpg", "gone.jpg"]
    fetched = split_of(*(tmp_path / name for name in names)).fetch(np.arange(len(names)))
    assert fetched.rows.tolist() == [1, 7]
    assert fetched.inputs.shape == (2, 3, 16, 16)
    reasons = {os.path.basename(broken.path): broken.reason for broken in fetched.unreadable}
    assert "truncated" in reasons.pop("cut.jpg")
    assert reasons.pop("cut.png")
    assert reasons == {
        "text.jpg": "not an image",
        "empty.jpg": "empty file",
        "script.jpg": "not an image",
        "huge.png": "more than 178,956,970 pixels",
        "folder.jpg": "not a file",
        "pipe.jpg": "not a file",
        "gone.jpg": "no such file or directory",
    }


def test_randomly_damaged_files_never_raise(tmp_path):
    rng = np.random.default_rng(0)
    paths = []
    for suffix in ("png", "jpg", "gif", "tiff", "webp", "bmp"):
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(tmp_path / f"a.{suffix}")
        whole = np.frombuffer((tmp_path / f"a.{suffix}").read_bytes(), dtype=np.uint8)
        for number in range(40):
            damaged = whole.copy()
            damaged[rng.integers(0, min(200, len(whole)), 4)] = rng.integers(0, 256, 4)
            paths.append(tmp_path / f"{number}.{suffix}")
            paths[-1].write_bytes(damaged.tobytes())
    fetched = split_of(*paths).fetch(np.arange(len(paths)))
    assert len(fetched.rows) + len(fetched.unreadable) == len(paths)
    assert fetched.unreadable
    assert torch.isfinite(fetched.inputs).all()


def test_fetch_without_readable_files(tmp_path):
    fetched = split_of(tmp_path / "gone.jpg").fetch(np.array([0]))
    assert (fetched.inputs.shape, fetched.rows.shape) == ((0, 3, 16, 16), (0,))


def test_show_and_rows(tmp_path):
    split = ImageSplit(Paths(["a", "b", "c"]), Labels(np.array([0])), np.array([2], dtype=np.uint32))
    assert (split.show(0).image, split.workers, len(split)) == ("c", True, 1)


def test_paths_behave_like_a_list():
    names = ["a/b.jpg", "", "ü\n.png", "bad\udcff.gif"]
    paths = Paths(names)
    assert (list(paths), len(paths)) == (names, 4)
    assert list(Paths([])) == []
    with pytest.raises(IndexError, match="text 4 of 4"):
        paths[4]
    assert len(pickle.dumps(Paths(["some/file.jpg"] * 1000))) < 1000 * 24


NAMES = ["<script>", "a, b", "c\nd", "ünïcode"]


def save_image(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path


def fill(root, names=NAMES, count=10):
    for name in names:
        for number in range(count):
            save_image(root / name / f"{number}.png")
    return root


def classes_of(dataset):
    """(class of the label, directory of the image) of all rows."""
    return [
        (dataset.class_names[int(split.labels.ids[row])], os.path.basename(os.path.dirname(split.show(row).image)))
        for split in dataset.splits.values()
        for row in range(len(split))
    ]


def test_class_directories_are_read(tmp_path):
    dataset = open_dataset(fill(tmp_path), transform=ImageTransform(4))
    assert dataset.class_names == NAMES
    assert [len(split) for split in dataset.splits.values()] == [32, 4, 4]
    assert (dataset.input.kind, dataset.input.shape) == ("image", (3, 4, 4))
    rows = classes_of(dataset)
    assert len(rows) == 40
    assert all(label == folder for label, folder in rows)
    fetched = dataset.splits["test"].fetch(np.array([3, 0]))
    assert (fetched.inputs.shape, fetched.rows.tolist()) == ((2, 3, 4, 4), [3, 0])


def test_split_directories_are_read(tmp_path):
    for split, count in (("train", 3), ("val", 2), ("Test", 1)):
        fill(tmp_path / split, count=count)
    (tmp_path / "devkit").mkdir()
    dataset = open_dataset(tmp_path)
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 12, "validation": 8, "test": 4}
    assert all(label == folder for label, folder in classes_of(dataset))
    assert dataset.notes == ("left out directories that are not a split: 1",)


def test_classes_may_be_named_like_splits(tmp_path):
    assert open_dataset(fill(tmp_path / "a", ["train", "plane", "test"])).class_names == ["plane", "test", "train"]
    assert open_dataset(fill(tmp_path / "b", ["train", "test"])).class_names == ["test", "train"]


def test_two_directories_for_one_split_raise(tmp_path):
    for split in ("train", "val", "valid"):
        fill(tmp_path / split)
    with pytest.raises(ValueError, match="directories 'val' and 'valid' are both the validation split; rename one"):
        open_dataset(tmp_path)


def test_left_out_files_are_counted(tmp_path):
    fill(tmp_path, ["cat", "dog"])
    save_image(tmp_path / "cat" / "deeper" / "x.JPG")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "cat" / ".hidden.png").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README").write_text("x")
    (tmp_path / "cat" / "loop").symlink_to(tmp_path / "cat")
    (tmp_path / "dog" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "dog" / "itself.png").symlink_to(tmp_path / "dog" / "itself.png")
    (tmp_path / "empty").mkdir()
    parts, notes = read_directory(tmp_path)
    assert len(parts[""][0]) == 21
    assert notes == [
        "left out broken links and special files: 2",
        "left out files outside class directories: 1",
        "left out files that are not images: 1",
        "left out hidden files: 2",
        "left out links that lead back to a parent directory: 1",
        "class directories without images: 1 ('empty')",
    ]
    assert open_dataset(tmp_path).class_names == ["cat", "dog"]


def test_links_to_other_directories_are_followed(tmp_path):
    fill(tmp_path / "real", ["cat", "dog"])
    (tmp_path / "data").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "real" / name)
    assert len(read_directory(tmp_path / "data")[0][""][0]) == 20


def test_class_names_with_undecodable_bytes(tmp_path):
    name = os.fsencode(tmp_path) + b"/bad\xff"
    os.mkdir(name)
    for number in range(10):
        Image.new("RGB", (8, 8)).save(os.fsdecode(name + b"/%d.png" % number))
    fill(tmp_path, ["good"])
    dataset = open_dataset(tmp_path)
    assert dataset.class_names == ["bad\\udcff", "good"]
    json.dumps(dataset.class_names).encode()
    assert all(not split.fetch(np.arange(len(split))).unreadable for split in dataset.splits.values())


def test_order_does_not_depend_on_the_disk(tmp_path):
    for name in ("b", "a"):
        for number in ("2", "10", "1"):
            save_image(tmp_path / name / f"{number}.png")
    paths = list(read_directory(tmp_path)[0][""][0])
    assert paths == sorted(paths)


def test_directories_without_images_raise(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match=r"has no images: looked for .*/CLASS/… and .*/train/CLASS/…"):
        open_dataset(tmp_path)
    with pytest.raises(ValueError, match="has no images; looked for"):
        read_data(tmp_path, labelled=False)


def test_other_directories_for_splits_and_classes_of_a_run(tmp_path):
    fill(tmp_path / "a", ["cat", "dog"])
    fill(tmp_path / "b", ["dog"], 3)
    dataset = open_dataset(tmp_path / "a", test=tmp_path / "b")
    assert dataset.splits["test"].labels.ids.tolist() == [1, 1, 1]
    whole = open_dataset(tmp_path / "b", classes=["ant", "cat", "dog"], whole=True)
    assert whole.splits["test"].labels.ids.tolist() == [2, 2, 2]
    fill(tmp_path / "c" / "train", ["cat", "dog"])
    fill(tmp_path / "c" / "test", ["cat", "dog"])
    with pytest.raises(ValueError, match=r"test=.* was passed, but .* already has test rows"):
        open_dataset(tmp_path / "c", test=tmp_path / "b")
    with pytest.raises(ValueError, match="holds 'test', 'train' rows, but none for validation"):
        open_dataset(tmp_path / "a", validation=tmp_path / "c")


def write(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_manifests_are_read(tmp_path, suffix):
    rows = []
    for number, name in enumerate(NAMES * 3):
        save_image(tmp_path / "files" / f"{number}, x.png")
        split = ("train", "val", "test")[number // 4]
        rows.append({"image": f"files/{number}, x.png", "class": name, "split": split})
    dataset = open_dataset(write(tmp_path / f"data{suffix}", rows))
    assert dataset.class_names == NAMES
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 4, "validation": 4, "test": 4}
    assert dataset.splits["test"].show(1).image == str(tmp_path / "files" / "9, x.png")
    assert dataset.splits["test"].labels.ids.tolist() == [0, 1, 2, 3]
    assert not dataset.splits["test"].fetch(np.arange(4)).unreadable


def test_manifests_with_several_labels(tmp_path):
    save_image(tmp_path / "a.png")
    for suffix, labels in ((".csv", "x|y"), (".jsonl", ["x", "y"])):
        path = write(tmp_path / f"m{suffix}", [{"path": "a.png", "labels": labels}] * 20)
        dataset = open_dataset(path)
        assert dataset.multi_label
        assert dataset.class_names == ["x", "y"]
        assert dataset.splits["test"].labels.offsets.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"path": "a.png", "id": "1", "x": "y"}, ValueError, "must have a column of labels .*'id' \\(text\\)"),
        ({"label": "x"}, ValueError, "must have a column of inputs: .* its columns: 'label'"),
        ({"path": "", "label": "x"}, ValueError, r"m.csv, row 1 \(counted from 1\) must have a path, found ''"),
        ({"path": "a.png", "label": ""}, ValueError, "m.csv has no label in row 1"),
        ({"path": "a.png", "label": "x", "split": "tset"}, ValueError, "has the split 'tset'; use train"),
        (
            {"path": "no.png", "label": "x"},
            FileNotFoundError,
            "names files that do not exist, first .*no.png; paths are",
        ),
    ],
)
def test_invalid_manifests_raise(tmp_path, row, error, message):
    save_image(tmp_path / "a.png")
    with pytest.raises(error, match=message):
        read_data(write(tmp_path / "m.csv", [row]))


def test_a_manifest_without_rows(tmp_path):
    (tmp_path / "m.csv").write_text("path,label\n")
    with pytest.raises(ValueError, match=r"m.csv has no rows"):
        read_data(tmp_path / "m.csv")


def find_images(path):
    return read_data(path, labelled=False).by_split[""].inputs


def test_images_without_labels_are_found_at_any_depth(tmp_path):
    fill(tmp_path / "a", ["x", "y"], 2)
    save_image(tmp_path / "a" / "top.png")
    assert [os.path.relpath(path, tmp_path / "a") for path in find_images(tmp_path / "a")] == [
        "top.png",
        "x/0.png",
        "x/1.png",
        "y/0.png",
        "y/1.png",
    ]
    assert list(find_images(tmp_path / "a" / "top.png")) == [str(tmp_path / "a" / "top.png")]
    path = write(tmp_path / "m.jsonl", [{"file": "a/top.png"}])
    assert list(find_images(path)) == [str(tmp_path / "a" / "top.png")]
