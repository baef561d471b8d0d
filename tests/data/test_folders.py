"""Pictures in folders and manifests: classes, splits, and what is left out."""

import csv
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hetxl.data.assembly import Plan
from hetxl.data.folders import find_images, load_images, read_folder, read_manifest

NAMES = ["<script>", "a, b", "c\nd", "ünïcode"]


def picture(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path


def fill(root, names=NAMES, count=10):
    for name in names:
        for number in range(count):
            picture(root / name / f"{number}.png")
    return root


def classes_of(dataset):
    """(class of the label, folder of the picture) of all rows."""
    return [
        (dataset.class_names[int(split.labels.ids[row])], os.path.basename(os.path.dirname(split.show(row).image)))
        for split in dataset.splits.values()
        for row in range(len(split))
    ]


def test_class_folders(tmp_path):
    dataset = load_images(fill(tmp_path), image_size=4)
    assert dataset.class_names == NAMES
    assert [len(split) for split in dataset.splits.values()] == [32, 4, 4]
    assert (dataset.input.kind, dataset.input.shape) == ("image", (3, 4, 4))
    found = classes_of(dataset)
    assert len(found) == 40
    assert all(label == folder for label, folder in found)
    fetched = dataset.splits["test"].fetch(np.array([3, 0]))
    assert (fetched.inputs.shape, fetched.rows.tolist()) == ((2, 3, 4, 4), [3, 0])


def test_split_folders(tmp_path):
    for split, count in (("train", 3), ("val", 2), ("Test", 1)):
        fill(tmp_path / split, count=count)
    (tmp_path / "devkit").mkdir()
    dataset = load_images(tmp_path)
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 12, "validation": 8, "test": 4}
    assert all(label == folder for label, folder in classes_of(dataset))
    assert dataset.notes == ("left out folders that are no split: 1",)


def test_classes_may_be_called_like_splits(tmp_path):
    assert load_images(fill(tmp_path / "a", ["train", "plane", "test"])).class_names == ["plane", "test", "train"]
    assert load_images(fill(tmp_path / "b", ["train", "test"])).class_names == ["test", "train"]


def test_two_folders_for_one_split(tmp_path):
    for split in ("train", "val", "valid"):
        fill(tmp_path / split)
    with pytest.raises(ValueError, match="folders 'val' and 'valid' both are the validation split; rename one"):
        load_images(tmp_path)


def test_what_is_left_out_is_counted(tmp_path):
    fill(tmp_path, ["cat", "dog"])
    picture(tmp_path / "cat" / "deeper" / "x.JPG")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "cat" / ".hidden.png").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README").write_text("x")
    (tmp_path / "cat" / "loop").symlink_to(tmp_path / "cat")
    (tmp_path / "dog" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "dog" / "itself.png").symlink_to(tmp_path / "dog" / "itself.png")
    (tmp_path / "empty").mkdir()
    parts, notes = read_folder(tmp_path)
    assert len(parts[""][0]) == 21
    assert notes == [
        "left out files outside class folders: 1",
        "left out files that are no pictures: 1",
        "left out hidden files: 2",
        "left out links that lead back to a folder above: 1",
        "left out links to nothing and special files: 2",
        "class folders without pictures: 1 ('empty')",
    ]
    assert load_images(tmp_path).class_names == ["cat", "dog"]


def test_links_to_other_folders_are_followed(tmp_path):
    fill(tmp_path / "real", ["cat", "dog"])
    (tmp_path / "data").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "real" / name)
    assert len(read_folder(tmp_path / "data")[0][""][0]) == 20


def test_names_that_are_no_text(tmp_path):
    name = os.fsencode(tmp_path) + b"/bad\xff"
    os.mkdir(name)
    for number in range(10):
        Image.new("RGB", (8, 8)).save(os.fsdecode(name + b"/%d.png" % number))
    fill(tmp_path, ["good"])
    dataset = load_images(tmp_path)
    assert dataset.class_names == ["bad\\udcff", "good"]
    json.dumps(dataset.class_names).encode()
    assert all(not split.fetch(np.arange(len(split))).broken for split in dataset.splits.values())


def test_the_order_does_not_depend_on_the_disk(tmp_path):
    for name in ("b", "a"):
        for number in ("2", "10", "1"):
            picture(tmp_path / name / f"{number}.png")
    paths = list(read_folder(tmp_path)[0][""][0])
    assert paths == sorted(paths)


def test_folders_without_pictures(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match=r"has no pictures: looked for .*/CLASS/… and .*/train/CLASS/…"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="has no pictures; looked for"):
        find_images(tmp_path)


def test_other_folders_for_splits_and_a_trained_runs_classes(tmp_path):
    fill(tmp_path / "a", ["cat", "dog"])
    fill(tmp_path / "b", ["dog"], 3)
    dataset = load_images(tmp_path / "a", test=tmp_path / "b")
    assert dataset.splits["test"].labels.ids.tolist() == [1, 1, 1]
    whole = load_images(tmp_path / "b", Plan(classes=["ant", "cat", "dog"], whole=True))
    assert whole.splits["test"].labels.ids.tolist() == [2, 2, 2]
    fill(tmp_path / "c" / "train", ["cat", "dog"])
    fill(tmp_path / "c" / "test", ["cat", "dog"])
    with pytest.raises(ValueError, match=r"test=.* was given, and .* has test rows of its own"):
        load_images(tmp_path / "c", test=tmp_path / "b")
    with pytest.raises(ValueError, match="holds 'test', 'train' rows, and none for validation"):
        load_images(tmp_path / "a", validation=tmp_path / "c")


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
def test_manifests(tmp_path, suffix):
    rows = []
    for number, name in enumerate(NAMES * 3):
        picture(tmp_path / "files" / f"{number}, x.png")
        split = ("train", "val", "test")[number // 4]
        rows.append({"image": f"files/{number}, x.png", "class": name, "split": split})
    dataset = load_images(write(tmp_path / f"data{suffix}", rows))
    assert dataset.class_names == NAMES
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 4, "validation": 4, "test": 4}
    assert dataset.splits["test"].show(1).image == str(tmp_path / "files" / "9, x.png")
    assert dataset.splits["test"].labels.ids.tolist() == [0, 1, 2, 3]
    assert not dataset.splits["test"].fetch(np.arange(4)).broken


def test_manifests_with_several_labels(tmp_path):
    picture(tmp_path / "a.png")
    for suffix, labels in ((".csv", "x|y"), (".jsonl", ["x", "y"])):
        path = write(tmp_path / f"m{suffix}", [{"path": "a.png", "labels": labels}] * 20)
        dataset = load_images(path)
        assert dataset.multi_label
        assert dataset.class_names == ["x", "y"]
        assert dataset.splits["test"].labels.offsets.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"path": "a.png", "name": "x"}, ValueError, "must have a column label or"),
        ({"where": "a.png", "label": "x"}, ValueError, "must have a column path or image or file"),
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
def test_bad_manifests(tmp_path, row, error, message):
    picture(tmp_path / "a.png")
    with pytest.raises(error, match=message):
        read_manifest(write(tmp_path / "m.csv", [row]))


def test_a_manifest_without_rows(tmp_path):
    (tmp_path / "m.csv").write_text("path,label\n")
    with pytest.raises(ValueError, match=r"m.csv has no rows"):
        read_manifest(tmp_path / "m.csv")


def test_pictures_without_labels(tmp_path):
    fill(tmp_path / "a", ["x", "y"], 2)
    picture(tmp_path / "a" / "top.png")
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
