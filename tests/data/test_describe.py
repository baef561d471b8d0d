"""A description: its counts against plain ones, its table and its plot."""

import io
import json
import time

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from hetxl.data.arrays import ArraySplit
from hetxl.data.dataset import Dataset, InputSpec
from hetxl.data.describe import describe
from hetxl.data.images import ImageSplit, Paths
from hetxl.data.labels import Labels
from hetxl.data.stored import open_arrays


def dataset_of(folder, names, notes=(), **labels):
    """Random features with given labels: ids, or lists of ids."""
    splits = {}
    for number, (split, rows) in enumerate(labels.items()):
        np.save(folder / f"{split}.npy", np.random.default_rng(number).normal(size=(len(rows), 3)))
        if rows and isinstance(rows[0], list):
            ids = np.array([label for row in rows for label in row], dtype=np.int64)
            found = Labels(ids, np.concatenate(([0], np.cumsum([len(row) for row in rows]))))
        else:
            found = Labels(np.array(rows, dtype=np.int64))
        splits[split] = ArraySplit(open_arrays(folder / f"{split}.npy")[""], found)
    return Dataset("data", InputSpec("features", (3,)), names, splits, notes=notes)


def shown(description):
    console = Console(width=100, file=io.StringIO())
    console.print(description.table())
    return console.file.getvalue()


TRAIN = [0] * 60 + [1] * 7 + [2] * 3 + [3]
NAMES = ["[red]big", "<script>", "c\nd", "e", "none"]


def test_counts(tmp_path):
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
    assert description["input"] == {"kind": "features", "shape": [3], "vocabulary": 0}
    assert description["notes"] == ["a note"]
    assert description["duplicates"]["looked_at"] == {"train": 71}


def test_table(tmp_path):
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


def test_plot(tmp_path):
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


def test_pictures(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (5, 5)).save(tmp_path / name)
    split = ImageSplit(Paths([str(tmp_path / "a.png"), str(tmp_path / "b.png")]), Labels(np.array([0, 1])))
    description = describe(Dataset("pictures", InputSpec("image", (3, 224, 224)), ["a", "b"], {"train": split}))
    assert description.duplicates.within == {"train": 1}
    assert "image 3 × 224 × 224" in shown(description)


def test_many_rows_take_seconds(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((50_000, 384), dtype=np.float32))
    split = ArraySplit(open_arrays(tmp_path / "a.npy")[""], Labels(np.arange(50_000) % 1000))
    dataset = Dataset("many", InputSpec("features", (384,)), [str(number) for number in range(1000)], {"train": split})
    before = time.perf_counter()
    assert describe(dataset).duplicates.within == {"train": 49_999}
    assert time.perf_counter() - before < 5
