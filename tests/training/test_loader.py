"""Batches: how they are cut among processes and parts, and read by workers."""

import numpy as np
import pytest
import torch

from hetxl.data.dataset import Broken
from hetxl.data.images import ImageSplit, Paths
from hetxl.data.labels import Labels
from hetxl.functional import LabelLists
from hetxl.training.loader import Parts, batches, to_device
from hetxl.training.order import Order
from support.training import write_pictures


@pytest.fixture
def pictures(tmp_path):
    paths = sorted(map(str, write_pictures(tmp_path).rglob("*.png")))
    return ImageSplit(Paths(paths), Labels(np.arange(len(paths)) % 3), size=16)


def test_one_process_sees_the_parts_of_two():
    for accumulate in (1, 2, 3):
        alone = Parts(24, 2 * accumulate)
        both = [Parts(24, accumulate, rank, 2) for rank in range(2)]
        for step in (0, 5):
            ours = {alone.part(number): alone.places(step, number) for number in range(2 * accumulate)}
            theirs = {one.part(number): one.places(step, number) for one in both for number in range(accumulate)}
            assert ours == theirs


def test_the_parts_of_a_step_make_its_batch():
    places = [Parts(12, 2, rank, 3).places(4, number) for number in range(2) for rank in range(3)]
    assert [place for start, stop in places for place in range(start, stop)] == list(range(48, 60))


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match="batch_size must be a multiple of accumulate × processes = 2 × 3, found 8"):
        Parts(8, 2, 0, 3)


def test_batches_follow_the_order_from_any_step(pictures):
    order, parts = Order(len(pictures), 0), Parts(4, 2)
    whole = list(batches(pictures, order, parts, 0, 5))
    assert len(whole) == 10
    rows = np.concatenate([fetched.rows for fetched, _ in whole])
    np.testing.assert_array_equal(rows, order.of(0, 20)[0])
    for fetched, targets in whole:
        assert torch.equal(targets, torch.from_numpy(fetched.rows % 3))
    later = list(batches(pictures, order, parts, 3, 5))
    assert len(later) == 4
    for (one, _), (two, _) in zip(later, whole[6:], strict=True):
        assert torch.equal(one.inputs, two.inputs)


def test_workers_read_the_same_batches_and_leave_the_generator_alone(pictures):
    order, parts = Order(len(pictures), 0), Parts(6, 2)
    before = torch.get_rng_state()
    alone = list(batches(pictures, order, parts, 1, 6))
    read = list(batches(pictures, order, parts, 1, 6, workers=2))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(alone) == len(read) == 10
    for (one, targets), (two, others) in zip(alone, read, strict=True):
        assert torch.equal(one.inputs, two.inputs)
        np.testing.assert_array_equal(one.rows, two.rows)
        assert torch.equal(targets, others)


def test_an_epoch_augments_anew(pictures):
    order = Order(len(pictures), 0)
    (first, _), (second, _) = batches(pictures, order, Parts(len(pictures), 1), 0, 2)
    one, two = first.inputs[np.argsort(first.rows)], second.inputs[np.argsort(second.rows)]
    assert not torch.equal(one, two)


def test_targets_are_of_those_that_could_be_read(pictures):
    broken = pictures.path(4)
    with open(broken, "w") as file:
        file.write("no picture")
    for workers in (0, 1):
        ((fetched, targets),) = batches(pictures, Order(12, 0), Parts(12, 1), 0, 1, workers)
        assert len(targets) == len(fetched.rows) == len(fetched.inputs) == 11
        assert 4 not in fetched.rows
        assert fetched.broken == (Broken(broken, "not an image"),)
        assert torch.equal(targets, torch.from_numpy(fetched.rows % 3))


def test_targets_move_with_all_their_parts():
    meta = torch.device("meta")
    assert to_device(torch.arange(3), meta).device == meta
    lists = LabelLists(torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([0.5, 1.0]), 2)
    moved = to_device(lists, torch.device("cpu"))
    assert (moved.batch, moved.values.tolist()) == (2, [0.5, 1.0])
    plain = to_device(LabelLists(torch.tensor([0]), torch.tensor([2]), None, 2), torch.device("cpu"))
    assert (plain.values, plain.classes.tolist()) == (None, [2])
