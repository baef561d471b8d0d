import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl.evaluation import band_accuracy, class_bands
from support.records import with_confidence


def test_thirds_of_the_training_examples():
    # 90 examples: 30 and 60 are the borders. The second class starts below 30 and the third below 60.
    assert class_bands(np.array([20, 20, 25, 15, 10])).tolist() == [0, 1, 0, 2, 2]
    assert class_bands(np.array([30, 30, 30])).tolist() == [0, 1, 2]


def test_one_class_can_fill_more_than_a_band():
    assert class_bands(np.array([1, 98, 1])).tolist() == [2, 0, 2]


def test_classes_without_training_examples_are_in_the_tail():
    assert class_bands(np.array([0, 5, 0])).tolist() == [2, 0, 2]
    assert class_bands(np.zeros(2)).tolist() == [2, 2]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_the_head_is_the_fewest_classes_with_a_third(counts):
    counts = np.array(counts)
    bands = class_bands(counts)
    total = counts.sum()
    if not total:
        return
    for band, share in ((0, 1), (1, 2)):
        inside = counts[bands <= band]
        assert 3 * inside.sum() >= share * total
        if (bands == band).any():
            least = counts[bands == band].min()
            assert 3 * (inside.sum() - least) < share * total
            assert least >= counts[bands > band].max(initial=0)


def test_accuracy_by_band():
    records = with_confidence(np.full(5, 0.75), [True, True, False, True, False])
    records = dataclasses.replace(records, label=np.array([0, 0, 0, 1, 1]))
    found = band_accuracy(records, np.array([30, 30, 30]))
    assert found == {"head": pytest.approx(2 / 3), "middle": 0.5, "tail": None}


def test_lists_of_labels_are_in_no_band():
    records = dataclasses.replace(with_confidence([0.75], [True]), label=np.array([-1]))
    assert band_accuracy(records, np.array([1])) == {"head": None, "middle": None, "tail": None}


def test_counts_must_fit():
    with pytest.raises(ValueError, match="class_counts has 1 classes, and a record the class id 1"):
        band_accuracy(with_confidence([0.75], [False]), np.array([3]))
    with pytest.raises(ValueError, match="class_counts must be K counts of at least 0"):
        class_bands(np.array([3, -1]))
    with pytest.raises(ValueError, match=r"found shape \[1, 2\]"):
        class_bands(np.array([[3, 1]]))
