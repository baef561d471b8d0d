"""Batches: how they are cut among processes and parts, and read by workers."""

import numpy as np
import pytest
import torch

from hetxl.functional import LabelLists
from hetxl_train.data.dataset import Unreadable
from hetxl_train.data.image_files import Paths
from hetxl_train.data.images import ImageSplit
from hetxl_train.data.labels import Labels
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.loaders import Order, Parts, batches, reader, to_device
from support.training import write_images


@pytest.fixture
def images(tmp_path):
    paths = sorted(map(str, write_images(tmp_path).rglob("*.png")))
    return ImageSplit(Paths(paths), Labels(np.arange(len(paths)) % 3), transform=ImageTransform(16))


def test_one_process_sees_the_parts_of_two():
    for accumulate in (1, 2, 3):
        alone = Parts(24, 2 * accumulate)
        both = [Parts(24, accumulate, rank, 2) for rank in range(2)]
        for step in (0, 5):
            ours = {alone.part(number): alone.places(step, number) for number in range(2 * accumulate)}
            theirs = {
                rank_parts.part(number): rank_parts.places(step, number)
                for rank_parts in both
                for number in range(accumulate)
            }
            assert ours == theirs


def test_the_parts_of_a_step_make_its_batch():
    ranges = [Parts(12, 2, rank, 3).places(4, number) for number in range(2) for rank in range(3)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(48, 60))


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match="batch_size must be a multiple of accumulate × processes = 2 × 3, found 8"):
        Parts(8, 2, 0, 3)


def test_batches_follow_the_order_from_any_step(images):
    order, parts = Order(len(images), 0), Parts(4, 2)
    whole = list(batches(images, order, parts, 0, 5))
    assert len(whole) == 10
    rows = np.concatenate([fetched.rows for fetched, _ in whole])
    np.testing.assert_array_equal(rows, order.of(0, 20)[0])
    for fetched, targets in whole:
        assert torch.equal(targets, torch.from_numpy(fetched.rows % 3))
    later = list(batches(images, order, parts, 3, 5))
    assert len(later) == 4
    for (actual, _), (expected, _) in zip(later, whole[6:], strict=True):
        assert torch.equal(actual.inputs, expected.inputs)


def test_workers_read_the_same_batches_and_leave_the_generator_alone(images):
    order, parts = Order(len(images), 0), Parts(6, 2)
    before = torch.get_rng_state()
    alone = list(batches(images, order, parts, 1, 6))
    read = list(batches(images, order, parts, 1, 6, workers=2))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(alone) == len(read) == 10
    for (actual, targets), (expected, others) in zip(alone, read, strict=True):
        assert torch.equal(actual.inputs, expected.inputs)
        np.testing.assert_array_equal(actual.rows, expected.rows)
        assert torch.equal(targets, others)


def test_pinned_batches_have_the_same_values(images, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    vectors = load_synthetic(rows=40, classes=3, features=2).splits["train"]
    for split in (images, vectors):
        pinned.clear()
        order, parts = Order(len(split), 0), Parts(6, 2)
        for (actual, targets), (expected, others) in zip(
            batches(split, order, parts, 0, 3, pin=True), batches(split, order, parts, 0, 3), strict=True
        ):
            assert torch.equal(actual.inputs, expected.inputs)
            assert torch.equal(targets, others)
        assert len(pinned) == 6


def test_each_epoch_augments_differently(images):
    order = Order(len(images), 0)
    (first, _), (second, _) = batches(images, order, Parts(len(images), 1), 0, 2)
    first_inputs, second_inputs = first.inputs[np.argsort(first.rows)], second.inputs[np.argsort(second.rows)]
    assert not torch.equal(first_inputs, second_inputs)


def test_targets_are_of_those_that_could_be_read(images):
    broken = images.images.name(4)
    with open(broken, "w") as file:
        file.write("not an image")
    for workers in (0, 1):
        ((fetched, targets),) = batches(images, Order(12, 0), Parts(12, 1), 0, 1, workers)
        assert len(targets) == len(fetched.rows) == len(fetched.inputs) == 11
        assert 4 not in fetched.rows
        assert fetched.unreadable == (Unreadable(broken, "not an image"),)
        assert torch.equal(targets, torch.from_numpy(fetched.rows % 3))


def test_targets_move_with_all_their_parts():
    meta = torch.device("meta")
    assert to_device(torch.arange(3), meta).device == meta
    lists = LabelLists(torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([0.5, 1.0]), 2)
    moved = to_device(lists, torch.device("cpu"))
    assert (moved.batch, moved.values.tolist()) == (2, [0.5, 1.0])
    plain = to_device(LabelLists(torch.tensor([0]), torch.tensor([2]), None, 2), torch.device("cpu"))
    assert (plain.values, plain.classes.tolist()) == (None, [2])


def test_workers_read_in_order_and_leave_the_generator_alone(tmp_path):
    paths = sorted(map(str, write_images(tmp_path).rglob("*.png")))
    split = ImageSplit(Paths(paths), Labels(np.zeros(len(paths), dtype=np.int64)), transform=ImageTransform(16))
    requests = [np.arange(start, min(start + 5, len(paths))) for start in range(0, len(paths), 5)]
    read = reader(split, 2)
    before = torch.get_rng_state()
    batches_read = list(read(iter(requests)))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(batches_read) == len(requests)
    for fetched, rows in zip(batches_read, requests, strict=True):
        np.testing.assert_array_equal(fetched.rows, rows)
        assert torch.equal(fetched.inputs, split.fetch(rows).inputs)
    assert list(read([])) == []


def test_this_process_reads_what_is_quick_to_read(tmp_path):
    paths = [str(next(write_images(tmp_path, each=1).rglob("*.png")))]
    images = ImageSplit(Paths(paths), Labels(np.zeros(1, dtype=np.int64)))
    vectors = load_synthetic(rows=40, classes=3, features=2).splits["test"]
    for split, workers in ((images, 0), (vectors, 4)):
        assert isinstance(reader(split, workers)([np.arange(1)]), map)
