"""What a dataset says of itself, and what a split must do."""

import numpy as np
import pytest
import torch

from hetxl.data.dataset import Dataset, Fetched, InputSpec, Shown, Split
from hetxl.data.labels import Labels


class Numbers(Split):
    def __init__(self, labels):
        self.labels = labels

    def fetch(self, rows, seeds=None):
        return Fetched(torch.from_numpy(np.asarray(rows, dtype=np.float32)[:, None]), rows)


def test_sizes_come_from_names_and_labels():
    split = Numbers(Labels(np.array([0, 1, 1])))
    dataset = Dataset("numbers", InputSpec("features", (1,)), ["a", "b"], {"train": split})
    assert (dataset.num_classes, dataset.multi_label, len(split)) == (2, False, 3)
    assert (split.workers, split.show(0), dataset.notes) == (False, Shown(), ())
    assert (Shown().text, Shown().image, Shown().pixels) == (None, None, None)
    fetched = split.fetch(np.array([2]))
    assert (fetched.inputs.tolist(), list(fetched.broken)) == ([[2.0]], [])


def test_one_split_with_lists_is_enough():
    splits = {"train": Numbers(Labels(np.array([0]))), "test": Numbers(Labels(np.array([0]), np.array([0, 1, 1])))}
    assert Dataset("numbers", InputSpec("features", (1,)), ["a"], splits).multi_label
    assert len(splits["test"]) == 2


def test_without_a_split_nothing_else_changes():
    split = Numbers(Labels(np.array([0, 1])))
    dataset = Dataset("numbers", InputSpec("features", (1,)), ["a", "b"], {"train": split, "test": split}, 0.5, ("x",))
    blind = dataset.without("test")
    assert (set(blind.splits), set(dataset.splits)) == ({"train"}, {"train", "test"})
    assert (blind.class_names, blind.best_nll, blind.notes) == (["a", "b"], 0.5, ("x",))
    assert set(blind.without("validation").splits) == {"train"}


def test_a_split_must_read():
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Split,), {})()
