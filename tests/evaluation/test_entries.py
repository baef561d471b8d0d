import pytest
import torch

from hetxl.evaluation.entries import label_entries
from hetxl.functional import LabelLists


def test_class_ids():
    entries = label_entries(torch.tensor([3, -100, 0]), 3, 4, "softmax")
    assert entries.ids.tolist() == [3, -100, 0]
    assert entries.examples.tolist() == [0, 2]
    assert entries.classes.tolist() == [3, 0]
    assert entries.values.tolist() == [1, 1]


def test_lists_in_any_order_and_with_repeats_are_those_of_the_dense_matrix():
    lists = LabelLists(
        torch.tensor([2, 0, 2, 0, 2]), torch.tensor([1, 3, 0, 3, 1]), torch.tensor([0.25, 0.75, 1, 0.75, 0.5]), 3
    )
    entries = label_entries(lists, 3, 4, "sigmoid")
    assert entries.ids.tolist() == [-1, -1, -1]
    assert entries.examples.tolist() == [0, 2, 2]
    dense = torch.zeros(3, 4, dtype=torch.float64)
    dense[entries.examples, entries.classes] = entries.values
    assert torch.equal(dense, lists.dense(4, torch.float64))


def test_only_likely_labels_are_sure():
    lists = LabelLists(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0.5, 0.4]), 1)
    assert label_entries(lists, 1, 4, "sigmoid").sure.classes.tolist() == [1]


def test_a_part_counts_from_its_own_start():
    lists = LabelLists.from_lists([[1, 2], [], [0], [3]])
    part = label_entries(lists, 4, 4, "sigmoid").of(1, 3)
    assert part.ids.tolist() == [-1, -1]
    assert part.examples.tolist() == [1]
    assert part.classes.tolist() == [0]


@pytest.mark.parametrize(
    ("targets", "link", "error", "words"),
    [
        (torch.tensor([4]), "softmax", ValueError, "the class id 4; allowed are 0 to 3"),
        (LabelLists.from_lists([[0]]), "softmax", TypeError, 'for link="sigmoid"'),
        (torch.rand(1, 4), "sigmoid", TypeError, r"LabelLists\.from_sparse"),
        (torch.tensor([1, 2]), "softmax", ValueError, "found shape"),
    ],
)
def test_bad_targets(targets, link, error, words):
    with pytest.raises(error, match=words):
        label_entries(targets, 1, 4, link)
