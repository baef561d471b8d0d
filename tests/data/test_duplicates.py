"""Equal inputs are found, within splits and between them."""

import numpy as np
from PIL import Image

from hetxl.data.arrays import ArraySplit
from hetxl.data.duplicates import find_duplicates
from hetxl.data.images import ImageSplit, Paths
from hetxl.data.labels import Labels
from hetxl.data.stored import open_arrays


def no_labels(count):
    return Labels(np.zeros(count, dtype=np.int64))


def splits_of(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return {name: ArraySplit(stored, no_labels(len(stored))) for name, stored in open_arrays(folder / "a.npz").items()}


def test_rows(tmp_path):
    base = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    almost = np.nextafter(base[:1], np.float32(9))
    splits = splits_of(
        tmp_path,
        train=np.concatenate((base, base[:2], base[:1])),
        validation=np.concatenate((base[5:6], almost)),
        test=np.concatenate((base[3:6], base[3:4])),
    )
    found = find_duplicates(splits, images=False)
    assert found.looked_at == {"train": 13, "validation": 2, "test": 4}
    assert found.within == {"train": 3, "validation": 0, "test": 1}
    assert found.across == {"validation in train": 1, "test in train": 4, "test in validation": 1}


def test_pictures_without_files_are_compared_as_they_are_read(tmp_path):
    pixels = np.random.default_rng(0).random((6, 1, 4, 4), dtype=np.float32)
    splits = splits_of(tmp_path, train=np.concatenate((pixels, pixels[:1])), test=pixels[2:3])
    found = find_duplicates(splits, images=True)
    assert found.within == {"train": 1, "test": 0}
    assert found.across == {"test in train": 1}


def test_more_rows_than_are_looked_at(tmp_path):
    splits = splits_of(tmp_path, train=np.zeros((1000, 2)), test=np.ones((30, 2)), validation=np.ones((10, 2)))
    found = find_duplicates(splits, images=False, limit=100)
    assert found.looked_at == {"train": 60, "test": 30, "validation": 10}
    assert found.within == {"train": 59, "test": 29, "validation": 9}


def test_files(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(tmp_path / f"{name}.bmp")  # of one size
    (tmp_path / "copy.bmp").write_bytes((tmp_path / "a.bmp").read_bytes())
    (tmp_path / "other.bmp").write_bytes(b"x")

    def split(*names):
        return ImageSplit(Paths(str(tmp_path / name) for name in names), no_labels(len(names)))

    splits = {
        "train": split("a.bmp", "b.bmp", "other.bmp", "gone.bmp"),
        "test": split("copy.bmp", "c.bmp", "gone2.bmp"),
    }
    found = find_duplicates(splits, images=True)
    assert found.within == {"train": 0, "test": 0}
    assert found.across == {"test in train": 1}
