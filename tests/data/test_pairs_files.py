import csv
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from hetxl.data.pairs import open_pairs
from hetxl.data.pairs_files import read_pairs
from support.pairs import picture_folder, vectors_file


def test_a_folder_of_pictures_and_captions(tmp_path):
    root = picture_folder(tmp_path / "shapes")
    (root / "red-small-0.txt").unlink()
    (root / "red-small-1.txt").write_text("  \n")
    pairs = read_pairs(root, image_size=16)
    assert pairs.name == "shapes"
    assert pairs.image.shape == (3, 16, 16)
    assert sum(len(split) for split in pairs.splits.values()) == 22
    assert "left out pictures without a caption: 2" in pairs.notes[0]
    for split in pairs.splits.values():
        for row in range(len(split)):
            colour, size, number = split.images.show(row).image.rsplit("/", 1)[1].split(".")[0].split("-")
            assert split.caption(row) == f"a {size} {colour} square number {number}"
    assert pairs.splits["train"].images.fetch(np.array([0])).inputs.shape == (1, 3, 16, 16)


def test_folders_of_splits(tmp_path):
    for name, each in (("train", 3), ("val", 1), ("test", 2)):
        picture_folder(tmp_path / "shapes" / name, each=each)
    pairs = read_pairs(tmp_path / "shapes")
    assert {name: len(split) for name, split in pairs.splits.items()} == {"train": 18, "validation": 6, "test": 12}
    picture_folder(tmp_path / "shapes", each=1)
    with pytest.raises(ValueError, match="has pictures beside its folders of splits"):
        read_pairs(tmp_path / "shapes")


def test_a_folder_without_captions(tmp_path):
    root = picture_folder(tmp_path / "shapes", each=1)
    for path in root.glob("*.txt"):
        path.unlink()
    with pytest.raises(ValueError, match=r"6 pictures and no caption for any; put NAME\.txt beside each"):
        read_pairs(root)
    (root / "blue-large-0.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"blue-large-0\.txt is not UTF-8 text"):
        read_pairs(root)


def write_manifest(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_manifest(tmp_path, suffix):
    root = picture_folder(tmp_path / "shapes", each=2)
    rows = [
        {
            "image": f"shapes/{path.name}",
            "Caption": f"{path.stem},  quoted",
            "split": "val" if path.stem.endswith("1") else "train",
            "category": path.stem.split("-")[0] + " " * int(path.stem.endswith("1")),
        }
        for path in sorted(root.glob("*.png"))
    ]
    pairs = read_pairs(write_manifest(tmp_path / f"pairs{suffix}", rows))
    assert {name: len(split) for name, split in pairs.splits.items()} == {"train": 5, "validation": 6, "test": 1}
    split = pairs.splits["validation"]
    assert split.caption(0) == "blue-large-1, quoted"
    assert split.images.show(0).image.endswith("blue-large-1.png")
    assert split.categories.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Caption": ""}, r"row 1 \(counted from 1\) must have a caption, found ''"),
        ({"split": "other"}, r"row 1 \(counted from 1\) has the split 'other'"),
        ({"image": ""}, r"row 1 \(counted from 1\) must have a path"),
    ],
)
def test_bad_rows_of_a_manifest(tmp_path, change, message):
    root = picture_folder(tmp_path / "shapes", each=1)
    rows = [{"image": f"shapes/{path.name}", "Caption": "x", "split": "train"} for path in root.glob("*.png")]
    rows[0] |= change
    with pytest.raises(ValueError, match=message):
        read_pairs(write_manifest(tmp_path / "pairs.csv", rows))


def test_manifests_that_are_none(tmp_path):
    path = write_manifest(tmp_path / "a.csv", [{"image": "x.png", "other": 1}])
    with pytest.raises(ValueError, match=r"a\.csv must have a column caption or captions .*found 'image', 'other'"):
        read_pairs(path)
    path = write_manifest(tmp_path / "b.csv", [{"caption": "x"}])
    with pytest.raises(ValueError, match=r"b\.csv must have a column path or image"):
        read_pairs(path)
    path = write_manifest(tmp_path / "c.csv", [{"image": "gone.png", "caption": "x"}])
    with pytest.raises(FileNotFoundError, match="names files that do not exist"):
        read_pairs(path)
    (tmp_path / "d.doc").write_text("x")
    with pytest.raises(ValueError, match=r"d\.doc is no kind of pairs that is known"):
        read_pairs(tmp_path / "d.doc")


def test_vectors(tmp_path):
    split = np.array(["train"] * 60 + ["test"] * 20)
    pairs = open_pairs(vectors_file(tmp_path / "x.npz", split=split))
    assert pairs.image.shape == pairs.text.shape == (6,)
    assert len(pairs.splits["test"]) == 20
    assert pairs.splits["test"].caption(0) is None
    content = dict(np.load(tmp_path / "x.npz"))
    test = pairs.splits["test"]
    assert np.array_equal(test.texts.take(test.sources), content["texts"][60:])
    save_file({name: content[name] for name in ("images", "texts")}, tmp_path / "x.safetensors")
    assert open_pairs(tmp_path / "x.safetensors").text.shape == (6,)


def test_vectors_of_images_with_captions(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz", captions=True))
    assert pairs.text is None
    assert pairs.splits["train"].caption(0).startswith("number ")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"images": np.zeros((4, 2), np.float32)},
            r"must have the keys images and texts \(or captions\), found 'images'",
        ),
        (
            {"images": np.zeros((4, 2), np.float32), "texts": np.zeros((3, 2), np.float32)},
            "array 'texts' of .* has 3 rows, and 'images' has 4",
        ),
        (
            {"images": np.zeros((4, 2), np.int64), "texts": np.zeros((4, 2), np.float32)},
            r"array 'images' of .* must hold floating-point vectors \[n, D\], found int64",
        ),
        ({"images": np.full((4, 2), np.nan), "texts": np.zeros((4, 2))}, "NaN or infinite"),
        ({"images": np.zeros((4, 2)), "captions": np.arange(4)}, "array 'captions' of .* must be a list of strings"),
        ({"images": np.zeros((0, 2)), "texts": np.zeros((0, 2))}, "array 'images' of .* has no rows"),
    ],
)
def test_bad_arrays(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises((TypeError, ValueError), match=message):
        read_pairs(tmp_path / "x.npz")
