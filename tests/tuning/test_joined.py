import dataclasses

import numpy as np
import pytest
import torch

from hetxl.data.dataset import Broken, Fetched, Shown, Split
from hetxl.data.labels import Labels
from hetxl.data.synthetic import load_synthetic
from hetxl.tuning.joined import Joined, with_validation_joined


class Numbers(Split):
    """Row i is the number first + i; some cannot be read."""

    def __init__(self, first: int, count: int, broken: tuple[int, ...] = (), lists: bool = False):
        self.first, self.broken = first, broken
        ids = np.arange(first, first + count)
        self.labels = Labels(np.repeat(ids, 2), 2 * np.arange(count + 1)) if lists else Labels(ids)

    def fetch(self, rows, seeds=None):
        read = np.array([row for row in rows if row not in self.broken], dtype=np.int64)
        bad = [Broken(str(row), "broken") for row in rows if row in self.broken]
        return Fetched(torch.from_numpy(self.first + read).float().unsqueeze(1), read, bad)

    def show(self, row):
        return Shown(text=str(self.first + row))


def test_rows_come_from_where_they_are_in_the_order_asked():
    joined = Joined(Numbers(0, 5), Numbers(100, 4))
    rows = np.array([8, 0, 5, 3, 5, 0])
    found = joined.fetch(rows, np.arange(6))
    assert found.rows.tolist() == rows.tolist()
    assert found.inputs.flatten().tolist() == [103, 0, 100, 3, 100, 0]
    assert joined.labels.take(found.rows).tolist() == [103, 0, 100, 3, 100, 0]
    assert len(joined) == 9
    assert (joined.show(4).text, joined.show(5).text) == ("4", "100")


@pytest.mark.parametrize("rows", [[0, 2], [6, 7]])
def test_rows_of_one_split_alone(rows):
    joined = Joined(Numbers(0, 5), Numbers(100, 4))
    found = joined.fetch(np.array(rows))
    assert found.rows.tolist() == rows
    assert found.inputs.flatten().tolist() == [row if row < 5 else 95 + row for row in rows]


def test_rows_that_cannot_be_read_are_left_out():
    joined = Joined(Numbers(0, 5, broken=(3,)), Numbers(100, 4, broken=(0,)))
    found = joined.fetch(np.array([5, 4, 3, 8, 3, 1]))
    assert found.rows.tolist() == [4, 8, 1]
    assert found.inputs.flatten().tolist() == [4, 103, 1]
    assert len(found.broken) == 3


def test_lists_of_labels():
    joined = Joined(Numbers(0, 2, lists=True), Numbers(7, 2, lists=True))
    assert joined.labels.take(np.array([3, 0])).classes.tolist() == [8, 8, 0, 0]
    with pytest.raises(ValueError, match="both"):
        Joined(Numbers(0, 2), Numbers(7, 2, lists=True))


def test_a_dataset_without_its_validation_split():
    dataset = load_synthetic(rows=200, classes=6, features=4)
    joined = with_validation_joined(dataset)
    assert set(joined.splits) == {"train", "test"}
    assert len(joined.splits["train"]) == len(dataset.splits["train"]) + len(dataset.splits["validation"])
    blind = dataclasses.replace(dataset, splits={"train": dataset.splits["train"]})
    with pytest.raises(ValueError, match="no validation split"):
        with_validation_joined(blind)
    assert set(with_validation_joined(
        dataclasses.replace(dataset, splits={k: v for k, v in dataset.splits.items() if k != "test"})
    ).splits) == {"train"}  # fmt: skip
