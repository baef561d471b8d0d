"""Splits made of rows that have none: disjoint, complete, reproducible, every class in train."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl.data.labels import Labels
from hetxl.data.splitting import split_rows


@given(
    st.lists(st.lists(st.integers(0, 20), max_size=3, unique=True), min_size=60, max_size=200),
    st.booleans(),
    st.sampled_from([("validation", "test"), ("test",), ("validation",)]),
    st.integers(0, 5),
)
def test_disjoint_and_complete_with_every_class_in_train(rows, multi, wanted, seed):
    if multi:
        ids = np.array([label for row in rows for label in row], dtype=np.int64)
        labels = Labels(ids, np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64))
    else:
        labels = Labels(np.array([row[0] if row else 20 for row in rows], dtype=np.int64))
    parts = split_rows(labels, 21, wanted, seed)
    assert set(parts) == {"train", *wanted}
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(rows)))
    assert all((np.diff(part.astype(int)) > 0).all() for part in parts.values())
    total, train = labels.counts(21), labels.subset(parts["train"]).counts(21)
    assert (train[total >= 2] >= 1).all()


def test_sizes_seeds_and_memory():
    labels = Labels(np.zeros(1000, dtype=np.int64))
    parts = split_rows(labels, 1, seed=3)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 800, "validation": 100, "test": 100}
    assert parts["train"].dtype == np.uint32
    again, other = split_rows(labels, 1, seed=3), split_rows(labels, 1, seed=4)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)
    assert not np.array_equal(parts["test"], other["test"])


def test_only_what_is_missing_is_taken():
    parts = split_rows(Labels(np.zeros(1000, dtype=np.int64)), 1, ["test"])
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 900, "test": 100}


def test_few_rows():
    parts = split_rows(Labels(np.zeros(3, dtype=np.int64)), 1)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 1, "validation": 1, "test": 1}
    with pytest.raises(ValueError, match="2 rows are too few to take validation and test rows from"):
        split_rows(Labels(np.zeros(2, dtype=np.int64)), 1)
    with pytest.raises(ValueError, match="4 rows of 2 classes leave none for validation"):
        split_rows(Labels(np.array([0, 0, 1, 1])), 2, seed=1)  # which holds out both rows of one class
