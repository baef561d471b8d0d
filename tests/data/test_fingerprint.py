import dataclasses

import numpy as np
import pytest

from hetxl.data import open_dataset
from hetxl.data.fingerprint import changes, fingerprint
from hetxl.data.labels import Labels
from hetxl.data.synthetic import FeatureSplit, load_synthetic

RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(6000, 4)).astype("f4"), RNG.integers(0, 5, 6000)


def written(path, rows=6000, **arrays):
    np.savez(path, features=FEATURES[:rows], labels=LABELS[:rows], **arrays)
    return fingerprint(open_dataset(str(path)))


def test_the_same_data_has_the_same(tmp_path):
    first = written(tmp_path / "one.npz")
    assert first == written(tmp_path / "two.npz")
    assert set(first) == {"train", "validation", "test"}
    assert changes(first, first, tuple(first)) is None


def test_rows_that_were_added_draw_the_splits_anew(tmp_path):
    then, now = (written(tmp_path / f"{rows}.npz", rows) for rows in (5000, 5010))
    assert changes(then, now, ("test",)) == "test had 500 rows and has 501"
    assert changes(then, now, ("train", "test")) == (
        "train had 4,000 rows and has 4,008, test had 500 rows and has 501"
    )


def test_rows_in_another_order(tmp_path):
    then = written(tmp_path / "one.npz")
    np.savez(tmp_path / "two.npz", features=FEATURES[::-1], labels=LABELS[::-1])
    now = fingerprint(open_dataset(str(tmp_path / "two.npz")))
    assert changes(then, now, ("validation", "test")) == (
        "validation has other labels than it had, test has other labels than it had"
    )


def test_splits_that_only_one_of_them_has_are_no_change(tmp_path):
    found = written(tmp_path / "one.npz")
    blind = {name: split for name, split in found.items() if name != "test"}
    assert changes(blind, found, ("validation", "test")) is None


@pytest.mark.parametrize("other", [[[0], [1, 2], []], [[0, 1], [2], []], [[0], [1], [2]]])
def test_lists_of_labels(other):
    dataset = load_synthetic(rows=100, classes=3, features=4)

    def of(lists):
        labels = Labels(np.asarray([label for one in lists for label in one]), np.cumsum([0, *map(len, lists)]))
        split = FeatureSplit(dataset.splits["train"].features[: len(lists)], labels)
        return fingerprint(dataclasses.replace(dataset, splits={"train": split}))

    first = [[0], [1, 2], []]
    assert (of(first) == of(other)) == (first == other)
