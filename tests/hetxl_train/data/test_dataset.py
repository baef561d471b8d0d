"""Datasets built from parts, drawn splits, and unreadable examples."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl_train.data.build_dataset import UNSPLIT, Plan, assemble, split_name, split_rows
from hetxl_train.data.dataset import Dataset, Fetched, InputSpec, Shown, Split, Unreadable, UnreadableExamples
from hetxl_train.data.labels import Labels, RawLabels


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


def test_data_without_splits_is_split():
    dataset = put({UNSPLIT: [0, 1] * 50}, Plan(seed=7), notes=["read"])
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 80, "validation": 10, "test": 10}
    assert dataset.notes == ("read", "validation and test: a tenth of the training rows each, drawn with seed 7")
    for part in dataset.splits.values():
        assert part.labels.ids.tolist() == (part.rows % 2).tolist()


def test_only_missing_splits_are_drawn():
    dataset = put({"train": [0, 1] * 50, "validation": [1, 0, 2]})
    assert {split: len(part) for split, part in dataset.splits.items()} == {"train": 90, "validation": 3, "test": 10}
    assert dataset.splits["validation"].rows is None
    assert dataset.splits["test"].inputs == "train"
    assert dataset.class_names == ["0", "1", "2"]


def test_complete_splits_stay():
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
        ({"train": [0, 1], UNSPLIT: [1]}, "data has train rows and rows without a split"),
        ({"train": [0, 1], "test": []}, "test.npy has no rows for the split 'test'"),
    ],
)
def test_data_without_usable_training_rows_raises(parts, message):
    with pytest.raises(ValueError, match=message):
        put(parts)


def test_training_rows_without_labels_raise():
    raw = RawLabels(np.empty(0, dtype=np.int64), "train.npy", offsets=np.zeros(5, dtype=np.int64))
    with pytest.raises(ValueError, match=r"train.npy has no label in any row"):
        assemble("data", InputSpec("features", (2,)), {"train": (None, raw)}, Rows, Plan(), ["a", "b"])


@given(
    st.lists(st.lists(st.integers(0, 20), max_size=3, unique=True), min_size=60, max_size=200),
    st.booleans(),
    st.sampled_from([("validation", "test"), ("test",), ("validation",)]),
    st.integers(0, 5),
)
def test_split_rows_are_disjoint_and_complete_with_every_class_in_train(rows, multi, held_out, seed):
    if multi:
        ids = np.array([label for row in rows for label in row], dtype=np.int64)
        labels = Labels(ids, np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64))
    else:
        labels = Labels(np.array([row[0] if row else 20 for row in rows], dtype=np.int64))
    parts = split_rows(labels, 21, held_out, seed)
    assert set(parts) == {"train", *held_out}
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(rows)))
    assert all((np.diff(part.astype(int)) > 0).all() for part in parts.values())
    total, train = labels.counts(21), labels.subset(parts["train"]).counts(21)
    assert (train[total >= 2] >= 1).all()


def test_split_rows_sizes_and_seeds():
    labels = Labels(np.zeros(1000, dtype=np.int64))
    parts = split_rows(labels, 1, seed=3)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 800, "validation": 100, "test": 100}
    assert parts["train"].dtype == np.uint32
    again, other = split_rows(labels, 1, seed=3), split_rows(labels, 1, seed=4)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)
    assert not np.array_equal(parts["test"], other["test"])


def test_split_rows_of_few_rows():
    parts = split_rows(Labels(np.zeros(3, dtype=np.int64)), 1)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 1, "validation": 1, "test": 1}
    with pytest.raises(ValueError, match="2 rows are too few to draw validation and test rows from"):
        split_rows(Labels(np.zeros(2, dtype=np.int64)), 1)
    with pytest.raises(ValueError, match="4 rows of 2 classes leave none for validation"):
        split_rows(Labels(np.array([0, 0, 1, 1])), 2, seed=1)  # which holds out both rows of one class


class Numbers(Split):
    def __init__(self, labels):
        self.labels = labels

    def fetch(self, rows, seeds=None):
        return Fetched(torch.from_numpy(np.asarray(rows, dtype=np.float32)[:, None]), rows)


def test_dataset_properties():
    split = Numbers(Labels(np.array([0, 1, 1])))
    dataset = Dataset("numbers", InputSpec("features", (1,)), ["a", "b"], {"train": split})
    assert (dataset.num_classes, dataset.multi_label, len(split)) == (2, False, 3)
    assert (split.workers, split.show(0), dataset.notes) == (False, Shown(), ())
    assert (Shown().text, Shown().image, Shown().pixels) == (None, None, None)
    fetched = split.fetch(np.array([2]))
    assert (fetched.inputs.tolist(), list(fetched.unreadable)) == ([[2.0]], [])


def test_one_multi_label_split_makes_the_dataset_multi_label():
    splits = {"train": Numbers(Labels(np.array([0]))), "test": Numbers(Labels(np.array([0]), np.array([0, 1, 1])))}
    assert Dataset("numbers", InputSpec("features", (1,)), ["a"], splits).multi_label
    assert len(splits["test"]) == 2


def test_without_removes_only_the_split():
    split = Numbers(Labels(np.array([0, 1])))
    dataset = Dataset("numbers", InputSpec("features", (1,)), ["a", "b"], {"train": split, "test": split}, 0.5, ("x",))
    blind = dataset.without("test")
    assert (set(blind.splits), set(dataset.splits)) == ({"train"}, {"train", "test"})
    assert (blind.class_names, blind.best_nll, blind.notes) == (["a", "b"], 0.5, ("x",))
    assert set(blind.without("validation").splits) == {"train"}


def fetched(good, bad, start=0):
    broken = tuple(Unreadable(f"{start + number}.jpg", "cut\noff") for number in range(bad))
    return Fetched(torch.zeros(good, 1), np.arange(good), broken)


def test_one_percent_unreadable_is_accepted(tmp_path):
    limit = UnreadableExamples(path=tmp_path / "broken.txt")
    for start in range(5):
        limit.add(fetched(99, 1, start))
    limit.finish()
    assert (limit.seen, limit.count, len(limit.examples)) == (500, 5, 5)
    assert (tmp_path / "broken.txt").read_text().splitlines()[4] == "4.jpg\tcut\\noff"


def test_more_unreadable_raises_with_a_list(tmp_path):
    limit = UnreadableExamples(path=tmp_path / "broken.txt")
    with pytest.raises(
        ValueError, match=r"30 of 120 examples could not be read, more than 1.0%; the full list is in"
    ) as error:
        limit.add(fetched(90, 30))
    lines = str(error.value).splitlines()
    assert (lines[1], lines[20], lines[21:]) == ("  0.jpg: cut\\noff", "  19.jpg: cut\\noff", ["  and 10 more"])
    assert len((tmp_path / "broken.txt").read_text().splitlines()) == 30


def test_share_counts_after_the_minimum_or_at_the_end():
    limit = UnreadableExamples()
    limit.add(fetched(3, 2))
    with pytest.raises(ValueError, match="2 of 5 examples could not be read"):
        limit.finish()


def test_unreadable_file_is_listed_once():
    limit = UnreadableExamples(share=0.5)
    limit.add(fetched(99, 1))
    limit.add(fetched(99, 1))
    assert (limit.count, len(limit.examples)) == (2, 1)


def test_no_unreadable_examples_write_no_file(tmp_path):
    limit = UnreadableExamples(path=tmp_path / "broken.txt")
    limit.finish()
    assert not (tmp_path / "broken.txt").exists()


def test_invalid_share_raises():
    with pytest.raises(ValueError, match="share must be from 0 to 1, found 2"):
        UnreadableExamples(share=2)
