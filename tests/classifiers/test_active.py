"""A few active classes in the place of all."""

import math

import pytest
import torch

from hetxl.classifiers.active import Active, among, gather_rows, labels_of, with_drawn
from hetxl.functional import LabelLists, Targets


def test_the_labels_of_every_form_of_targets():
    ids = torch.tensor([[4, -100], [1, 4]])
    assert labels_of(Targets(ids=ids)).tolist() == [1, 4]
    lists = LabelLists(torch.tensor([0, 0, 1]), torch.tensor([5, 2, 5]), None, 2)
    assert labels_of(Targets(lists=lists)).tolist() == [2, 5]
    dense = torch.tensor([[0.0, 1, 0], [0.5, 0, 0]])
    assert labels_of(Targets(dense=dense)).tolist() == [0, 1]
    assert labels_of(Targets(dense=dense[0])).tolist() == [1]  # of one example without a batch


def test_what_was_drawn_stands_for_the_classes_that_are_no_labels():
    labels, drawn = torch.tensor([2, 7]), torch.tensor([9, 2, 1, 9])
    log_q = torch.tensor([0.1, 0.4, 0.2, 0.1]).log()
    active = with_drawn(labels, drawn, log_q, 4)
    assert active.classes.tolist() == [1, 2, 7, 9]
    torch.testing.assert_close(active.offsets, torch.tensor([math.log(1 / 0.8), 0.0, 0.0, math.log(2 / 0.4)]))


def test_only_labels_when_nothing_else_was_drawn():
    labels = torch.tensor([0, 3])
    for drawn in (torch.tensor([3, 3]), torch.tensor([], dtype=torch.int64)):
        active = with_drawn(labels, drawn, torch.zeros(len(drawn)), 2)
        assert active.classes.tolist() == [0, 3]
        assert active.offsets.tolist() == [0, 0]


def test_targets_among_active_classes():
    classes = torch.tensor([1, 4, 6])
    assert among(Targets(ids=torch.tensor([6, -100, 1])), classes).ids.tolist() == [2, -100, 0]
    lists = LabelLists(torch.tensor([0, 1]), torch.tensor([4, 6]), torch.tensor([0.5, 1.0]), 2)
    found = among(Targets(lists=lists), classes).lists
    assert (found.classes.tolist(), found.values.tolist(), found.batch) == ([1, 2], [0.5, 1.0], 2)
    dense = torch.arange(14.0).view(2, 7)
    assert torch.equal(among(Targets(dense=dense), classes).dense, dense[:, [1, 4, 6]])


@pytest.mark.parametrize("shape", [(9,), (9, 4)])
def test_sparse_gradients_are_the_dense_ones(shape):
    table, index = torch.randn(shape, requires_grad=True), torch.tensor([1, 5, 8])
    weights, found = torch.randn(3, *shape[1:]), []
    for sparse in (False, True):
        table.grad = None
        rows = gather_rows(table, index, sparse)
        assert torch.equal(rows, table[index])
        (rows * weights).sum().backward()
        assert table.grad.is_sparse == sparse
        found.append(table.grad.to_dense())
    assert torch.equal(*found)


def test_active_is_a_pair():
    classes, offsets = Active(torch.tensor([1]), torch.tensor([0.0]))
    assert (classes.tolist(), offsets.tolist()) == ([1], [0.0])
