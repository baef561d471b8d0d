"""A description: its counts against plain ones, its table and its plot."""

import dataclasses
import io
import json
import time

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from hetxl_train.data import open_dataset
from hetxl_train.data.arrays import ArraySplit
from hetxl_train.data.dataset import Dataset, InputSpec
from hetxl_train.data.describe import describe, find_duplicates
from hetxl_train.data.fingerprint import changes, fingerprint
from hetxl_train.data.image_files import Paths
from hetxl_train.data.images import ImageSplit
from hetxl_train.data.labels import Labels
from hetxl_train.data.mapped_arrays import open_arrays
from hetxl_train.data.synthetic import FeatureSplit, load_synthetic


def dataset_of(folder, names, notes=(), **labels):
    """Random features with given labels: ids, or lists of ids."""
    splits = {}
    for number, (split, rows) in enumerate(labels.items()):
        np.save(folder / f"{split}.npy", np.random.default_rng(number).normal(size=(len(rows), 3)))
        if rows and isinstance(rows[0], list):
            ids = np.array([label for row in rows for label in row], dtype=np.int64)
            labels = Labels(ids, np.concatenate(([0], np.cumsum([len(row) for row in rows]))))
        else:
            labels = Labels(np.array(rows, dtype=np.int64))
        splits[split] = ArraySplit(open_arrays(folder / f"{split}.npy")[""], labels)
    return Dataset("data", InputSpec("features", (3,)), names, splits, notes=notes)


def shown(description):
    console = Console(width=100, file=io.StringIO())
    console.print(description.table())
    return console.file.getvalue()


TRAIN = [0] * 60 + [1] * 7 + [2] * 3 + [3]
NAMES = ["[red]big", "<script>", "c\nd", "e", "none"]


def test_describe_counts_rows_and_classes(tmp_path):
    description = describe(dataset_of(tmp_path, NAMES, ["a note"], train=TRAIN, test=[0, 0, 3]))
    assert description.rows == {"train": 71, "test": 3}
    assert description.examples_per_class == {"min": 0, "median": 3.0, "max": 60}
    assert description.rare == {"empty": 1, "single": 1, "under_5": 2, "under_10": 3}
    assert description.top_class == {"name": "[red]big", "share": 60 / 71}
    assert description.frequencies == [[0, 1], [1, 1], [2, 0], [5, 1], [10, 1], [20, 0], [50, 0], [100, 1]]
    assert description.missing == {"train": 1, "test": 3}
    assert description.labels_per_row is None
    assert description.duplicates.within == {"train": 0, "test": 0}


def test_as_dict_is_json(tmp_path):
    description = describe(dataset_of(tmp_path, NAMES, ("a note",), train=TRAIN)).as_dict()
    assert json.loads(json.dumps(description)) == description
    assert description["classes"] == 5
    assert description["input"] == {"kind": "features", "shape": [3], "vocabulary": 0, "image": None}
    assert description["notes"] == ["a note"]
    assert description["duplicates"]["looked_at"] == {"train": 71}


def test_table_has_all_counts(tmp_path):
    dataset = dataset_of(tmp_path, NAMES, ["left out [bold]x[/bold]\x1b[2J"], train=TRAIN, test=[0, 0, 3])
    copied = open_arrays(tmp_path / "train.npy")[""]
    dataset.splits["test"] = ArraySplit(copied, Labels(np.array([0, 0, 3])))
    text = shown(describe(dataset))
    assert "train 71, test 3" in text
    assert "[red]big, 84.5% of the rows" in text
    assert "1 with one example, 2 below 5, 3 below 10, 1 with none" in text
    assert "1 not in train, 3 not in test" in text
    assert "3 test rows that are also in train (all rows looked at)" in text
    assert "left out [bold]x[/bold]\\x1b[2J" in text


def test_frequency_plot_is_ascii(tmp_path):
    lines = describe(dataset_of(tmp_path, NAMES, train=TRAIN)).plot(width=10).splitlines()
    assert lines[0].split() == ["examples", "classes"]
    assert [line.split() for line in lines[1:4]] == [["0", "##########", "1"], ["1", "##########", "1"], ["2", "0"]]
    assert lines[4].split() == ["3-5", "##########", "1"]
    assert lines[-1].split() == ["51-100", "##########", "1"]
    assert all(line.isascii() for line in lines)


def test_several_labels_in_a_row(tmp_path):
    description = describe(dataset_of(tmp_path, NAMES, train=[[0, 1], [], [0]], test=[[2]]))
    assert description.labels_per_row == {"min": 0, "mean": 1.0, "max": 2, "without": 1}
    assert description.top_class["share"] == 2 / 3
    assert "0 to 2, mean 1.00, 1 rows without" in shown(description)


def test_data_that_is_only_evaluated_or_predicted(tmp_path):
    assert describe(dataset_of(tmp_path, NAMES, test=[1, 1])).examples_per_class["max"] == 2
    unlabelled = describe(dataset_of(tmp_path, NAMES, test=[-100, -100]))
    assert unlabelled.rare["empty"] == 5
    assert unlabelled.plot()
    with pytest.raises(ValueError, match="has no splits to describe"):
        describe(dataset_of(tmp_path, NAMES))


def test_duplicate_images_are_counted(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (5, 5)).save(tmp_path / name)
    split = ImageSplit(Paths([str(tmp_path / "a.png"), str(tmp_path / "b.png")]), Labels(np.array([0, 1])))
    description = describe(Dataset("images", InputSpec("image", (3, 224, 224)), ["a", "b"], {"train": split}))
    assert description.duplicates.within == {"train": 1}
    assert "image 3 × 224 × 224" in shown(description)


def test_many_rows_take_seconds(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((50_000, 384), dtype=np.float32))
    split = ArraySplit(open_arrays(tmp_path / "a.npy")[""], Labels(np.arange(50_000) % 1000))
    dataset = Dataset("many", InputSpec("features", (384,)), [str(number) for number in range(1000)], {"train": split})
    before = time.perf_counter()
    assert describe(dataset).duplicates.within == {"train": 49_999}
    assert time.perf_counter() - before < 5


def no_labels(count):
    return Labels(np.zeros(count, dtype=np.int64))


def splits_of(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return {name: ArraySplit(stored, no_labels(len(stored))) for name, stored in open_arrays(folder / "a.npz").items()}


def test_duplicate_rows_are_counted(tmp_path):
    base = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    almost = np.nextafter(base[:1], np.float32(9))
    splits = splits_of(
        tmp_path,
        train=np.concatenate((base, base[:2], base[:1])),
        validation=np.concatenate((base[5:6], almost)),
        test=np.concatenate((base[3:6], base[3:4])),
    )
    duplicates = find_duplicates(splits, images=False)
    assert duplicates.looked_at == {"train": 13, "validation": 2, "test": 4}
    assert duplicates.within == {"train": 3, "validation": 0, "test": 1}
    assert duplicates.across == {"validation in train": 1, "test in train": 4, "test in validation": 1}


def test_images_without_files_are_compared_by_pixels(tmp_path):
    pixels = np.random.default_rng(0).random((6, 1, 4, 4), dtype=np.float32)
    splits = splits_of(tmp_path, train=np.concatenate((pixels, pixels[:1])), test=pixels[2:3])
    duplicates = find_duplicates(splits, images=True)
    assert duplicates.within == {"train": 1, "test": 0}
    assert duplicates.across == {"test in train": 1}


def test_only_a_sample_of_many_rows_is_searched(tmp_path):
    splits = splits_of(tmp_path, train=np.zeros((1000, 2)), test=np.ones((30, 2)), validation=np.ones((10, 2)))
    duplicates = find_duplicates(splits, images=False, limit=100)
    assert duplicates.looked_at == {"train": 60, "test": 30, "validation": 10}
    assert duplicates.within == {"train": 59, "test": 29, "validation": 9}


def test_duplicate_files_are_counted(tmp_path):
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
    duplicates = find_duplicates(splits, images=True)
    assert duplicates.within == {"train": 0, "test": 0}
    assert duplicates.across == {"test in train": 1}


RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(6000, 4)).astype("f4"), RNG.integers(0, 5, 6000)


def written(path, rows=6000, **arrays):
    np.savez(path, features=FEATURES[:rows], labels=LABELS[:rows], **arrays)
    return fingerprint(open_dataset(str(path)))


def test_equal_data_has_equal_fingerprints(tmp_path):
    first = written(tmp_path / "one.npz")
    assert first == written(tmp_path / "two.npz")
    assert set(first) == {"train", "validation", "test"}
    assert changes(first, first, tuple(first)) is None


def test_added_rows_change_the_fingerprint(tmp_path):
    then, now = (written(tmp_path / f"{rows}.npz", rows) for rows in (5000, 5010))
    assert changes(then, now, ("test",)) == "test had 500 rows and has 501"
    assert changes(then, now, ("train", "test")) == (
        "train had 4,000 rows and has 4,008, test had 500 rows and has 501"
    )


def test_reordered_rows_change_the_fingerprint(tmp_path):
    then = written(tmp_path / "one.npz")
    np.savez(tmp_path / "two.npz", features=FEATURES[::-1], labels=LABELS[::-1])
    now = fingerprint(open_dataset(str(tmp_path / "two.npz")))
    assert changes(then, now, ("validation", "test")) == (
        "the labels of validation have changed, the labels of test have changed"
    )


def test_splits_missing_in_one_fingerprint_are_skipped(tmp_path):
    complete = written(tmp_path / "one.npz")
    blind = {name: split for name, split in complete.items() if name != "test"}
    assert changes(blind, complete, ("validation", "test")) is None


@pytest.mark.parametrize("other", [[[0], [1, 2], []], [[0, 1], [2], []], [[0], [1], [2]]])
def test_fingerprint_of_multi_label_data(other):
    dataset = load_synthetic(rows=100, classes=3, features=4)

    def of(lists):
        labels = Labels(np.asarray([label for row in lists for label in row]), np.cumsum([0, *map(len, lists)]))
        split = FeatureSplit(dataset.splits["train"].features[: len(lists)], labels)
        return fingerprint(dataclasses.replace(dataset, splits={"train": split}))

    first = [[0], [1, 2], []]
    assert (of(first) == of(other)) == (first == other)


def rows_of_labels(*labels):
    ids = np.concatenate([np.full(count, label) for label, count in enumerate(labels)])
    return FeatureSplit(torch.zeros(len(ids), 1), Labels(ids.astype(np.int64)))


@pytest.mark.parametrize(
    ("train", "validation", "different"),
    [
        ((500, 500), (50, 50), False),
        ((500, 500), (60, 40), False),  # by chance
        ((500, 500), (95, 5), True),
        ((5000, 5000), (520, 480), False),  # beyond chance or not, two percent are nothing
        ((500, 500, *[1] * 50), (50, 50, *[0] * 50), False),  # rare classes
    ],
)
def test_splits_of_different_labels_get_a_note(train, validation, different):
    splits = {"train": rows_of_labels(*train), "validation": rows_of_labels(*validation)}
    names = [str(number) for number in range(len(train))]
    notes = describe(Dataset("rows", InputSpec("features", (1,)), names, splits)).notes
    assert [note.split(":")[0] for note in notes] == (
        ["the label distributions of validation and train differ"] if different else []
    )


def test_a_test_split_drawn_beside_other_validation_rows_gets_a_note(tmp_path):
    for name in ("noisy", "clean"):
        np.savez(tmp_path / f"{name}.npz", features=np.ones((60, 2), "float32"), labels=np.arange(60) % 2)
    both = {"validation": tmp_path / "clean.npz"}
    notes = open_dataset(tmp_path / "noisy.npz", **both).notes
    assert any("clean.npz, but test rows from" in note and "give --test as well" in note for note in notes)
    notes = open_dataset(tmp_path / "noisy.npz", **both, test=tmp_path / "clean.npz").notes
    assert not any("give --test" in note for note in notes)
    assert not any("give --test" in note for note in open_dataset(tmp_path / "noisy.npz").notes)
