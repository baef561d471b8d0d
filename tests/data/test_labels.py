"""Labels of a split against plain lists."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.data.labels import Labels
from hetxl.functional import LabelLists

K = 9
single = st.lists(st.integers(0, K - 1), min_size=1, max_size=30)
multi = st.lists(st.lists(st.integers(0, K - 1), max_size=5), min_size=1, max_size=30)
picks = st.lists(st.integers(0, 10_000), max_size=12)


def of_lists(rows):
    values = np.array([label for row in rows for label in row], dtype=np.int64)
    return Labels(values, np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64))


def to_lists(lists):
    return [lists.classes[lists.examples == row].tolist() for row in range(lists.batch)]


@given(single, picks)
def test_one_label_each(ids, picked):
    labels = Labels(np.array(ids, dtype=np.int32))
    rows = np.array([pick % len(ids) for pick in picked], dtype=np.int64)
    expected = [ids[row] for row in rows]
    assert not labels.multi
    assert len(labels) == len(ids)
    assert labels.take(rows).dtype == torch.int64
    assert labels.take(rows).tolist() == expected
    assert labels.subset(rows).ids.tolist() == expected
    assert labels.counts(K).tolist() == [ids.count(number) for number in range(K)]


@given(multi, picks)
def test_lists(lists, picked):
    labels = of_lists(lists)
    rows = np.array([pick % len(lists) for pick in picked], dtype=np.uint32)
    expected = [lists[row] for row in rows]
    assert labels.multi
    assert len(labels) == len(lists)
    taken = labels.take(rows)
    assert isinstance(taken, LabelLists)
    assert to_lists(taken) == expected
    subset = labels.subset(rows)
    assert len(subset) == len(rows)
    assert to_lists(subset.take(np.arange(len(rows)))) == expected
    flat = [label for row in lists for label in row]
    assert labels.counts(K).tolist() == [flat.count(number) for number in range(K)]


def test_rows_without_a_label_count_for_no_class():
    assert Labels(np.array([-100, 1, -100])).counts(3).tolist() == [0, 1, 0]


def test_ids_on_disk(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(10))
    labels = Labels(np.load(tmp_path / "ids.npy", mmap_mode="r"))
    assert labels.take(np.array([9, 0])).tolist() == [9, 0]
    assert labels.counts(10).tolist() == [1] * 10
