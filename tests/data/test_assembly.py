"""Parts put together: which splits come out, and what cannot be trained on."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hetxl.data.assembly import UNSPLIT, Plan, assemble, split_name
from hetxl.data.classes import RawLabels
from hetxl.data.dataset import Fetched, InputSpec, Split


class Rows(Split):
    """Says which rows of which inputs it has."""

    def __init__(self, inputs, labels, rows):
        self.inputs, self.labels, self.rows = inputs, labels, rows

    def fetch(self, rows, seeds=None):
        return Fetched(torch.from_numpy(np.asarray(rows)), rows)


def put(parts, plan=None, **options):
    raw = {
        split: (split, RawLabels(np.array(values, dtype=np.int64), f"{split}.npy")) for split, values in parts.items()
    }
    return assemble("data", InputSpec("features", (2,)), raw, Rows, plan or Plan(), **options)


def test_names_of_splits():
    assert [split_name(Path("t.csv"), name, 1) for name in (" Train", "dev", "test")] == ["train", "validation", "test"]
    with pytest.raises(ValueError, match=r"t.csv, row 3 \(counted from 1\) has the split None; use train, validation"):
        split_name(Path("t.csv"), None, 3)


def test_data_without_splits_is_parted():
    dataset = put({UNSPLIT: [0, 1] * 50}, Plan(seed=7), notes=["read"])
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 80, "validation": 10, "test": 10}
    assert dataset.notes == ("read", "validation and test: a tenth of the training rows each, drawn with seed 7")
    for part in dataset.splits.values():
        assert part.labels.ids.tolist() == (part.rows % 2).tolist()


def test_only_missing_splits_are_made():
    dataset = put({"train": [0, 1] * 50, "validation": [1, 0, 2]})
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 90, "validation": 3, "test": 10}
    assert dataset.splits["validation"].rows is None
    assert dataset.splits["test"].inputs == "train"
    assert dataset.class_names == ["0", "1", "2"]


def test_given_splits_stay():
    dataset = put({"test": [1], "train": [0, 1], "validation": [0]})
    assert list(dataset.splits) == ["train", "validation", "test"]
    assert dataset.notes == ()


def test_data_for_a_trained_run():
    dataset = put({UNSPLIT: [1, 1]}, Plan(classes=["a", "b"], whole=True))
    assert (list(dataset.splits), dataset.class_names) == (["test"], ["a", "b"])
    assert list(put({"test": [1]}, Plan(classes=["a", "b"])).splits) == ["test"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": [0, 0, 0], "test": [0]}, "train.npy has a single class, '0'; a classifier needs two or more"),
        ({"test": [0, 1]}, "data has no training rows, found 'test'"),
        ({"train": [0, 1], UNSPLIT: [1]}, "data has rows without a split beside its train rows"),
        ({"train": [0, 1], "test": []}, "test.npy has no rows for the split 'test'"),
    ],
)
def test_what_cannot_be_trained_on(parts, message):
    with pytest.raises(ValueError, match=message):
        put(parts)


def test_lists_without_any_label():
    raw = RawLabels(np.empty(0, dtype=np.int64), "train.npy", offsets=np.zeros(5, dtype=np.int64))
    with pytest.raises(ValueError, match=r"train.npy has no label in any row"):
        assemble("data", InputSpec("features", (2,)), {"train": (None, raw)}, Rows, Plan(), ["a", "b"])
