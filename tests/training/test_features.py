"""Features of a frozen backbone: those that it computes, read from a file."""

import os

import numpy as np
import pytest
import torch

from hetxl.data import open_dataset
from hetxl.training.features import FeatureFile, cached_features, feature_batches
from hetxl.training.model import build_model
from support.training import QUIET, small, write_pictures

CPU = torch.device("cpu")


def opened(root, **options):
    config = small(data=str(root), backbone="cnn", width=8, depth=1, features=6, image_size=16, frozen=True, **options)
    dataset = open_dataset(str(root), image_size=16)
    return config, dataset, build_model(config, dataset.input, dataset.num_classes, "softmax")


def test_cached_features_are_the_computed_ones(tmp_path):
    config, dataset, model = opened(write_pictures(tmp_path / "pictures", each=20))
    view, splits = cached_features(tmp_path / "cache", model, dataset, config, QUIET)
    assert view.head is model.head
    assert set(splits) == set(dataset.splits)
    for name, split in splits.items():
        source = dataset.splits[name]
        rows = np.arange(len(source))
        fetched = split.fetch(rows[::-1])
        np.testing.assert_array_equal(fetched.rows, rows[::-1])
        with torch.no_grad():
            expected = model.backbone(source.fetch(rows).inputs)
            torch.testing.assert_close(view.backbone(fetched.inputs).flip(0), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(split.labels.ids, source.labels.ids)
        assert split.show(0) == source.show(0)
        assert fetched.inputs.dtype == torch.float32
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        f"{name}{part}.npy" for name in splits for part in ("", "_rows")
    }


def test_the_second_time_they_are_read(tmp_path):
    config, dataset, model = opened(write_pictures(tmp_path / "pictures"), workers=0)
    cached_features(tmp_path / "cache", model, dataset, config, QUIET)
    marked = np.load(tmp_path / "cache" / "train.npy") * 0 + 7
    np.save(tmp_path / "cache" / "train.npy", marked)
    _, splits = cached_features(tmp_path / "cache", model, dataset, config, QUIET)
    assert (splits["train"].fetch(np.arange(2)).inputs == 7).all()


def test_broken_pictures_are_left_out(tmp_path):
    config, dataset, model = opened(write_pictures(tmp_path / "pictures"), workers=0)
    train = dataset.splits["train"]
    with open(train.path(1), "w") as file:
        file.write("no picture")
    _, splits = cached_features(tmp_path / "cache", model, dataset, config, QUIET)
    found = splits["train"]
    assert isinstance(found, FeatureFile)
    others = np.delete(np.arange(len(train)), 1)
    assert len(found) == len(others) == len(found.array)
    np.testing.assert_array_equal(found.rows, others)
    np.testing.assert_array_equal(found.labels.ids, train.labels.ids[others])
    assert found.show(1) == train.show(2)
    with torch.no_grad():
        expected = model.backbone(train.fetch(others).inputs)
    torch.testing.assert_close(found.fetch(np.arange(len(others))).inputs, expected, rtol=1e-4, atol=1e-5)


def test_too_many_broken_pictures_end_it(tmp_path):
    config, dataset, model = opened(write_pictures(tmp_path / "pictures", each=80, size=8), workers=0)
    train = dataset.splits["train"]
    for row in range(20):
        with open(train.path(row), "w") as file:
            file.write("no picture")
    with pytest.raises(ValueError, match=r"20 of \d+ examples could not be read, more than 1.0%"):
        cached_features(tmp_path / "cache", model, dataset, config, QUIET)
    assert os.listdir(tmp_path / "cache") == ["train_broken.txt"]


def test_none_can_be_read(tmp_path):
    config, dataset, model = opened(write_pictures(tmp_path / "pictures", each=4), workers=0)
    for row in range(len(dataset.splits["train"])):
        with open(dataset.splits["train"].path(row), "w") as file:
            file.write("no picture")
    with pytest.raises(ValueError, match=r"none of the \d train examples could be read: .*: not an image"):
        cached_features(tmp_path / "cache", model, dataset, config, QUIET)
    assert os.listdir(tmp_path / "cache") == []


def test_batches_are_in_evaluation_mode_and_leave_the_mode_as_it_was(tmp_path):
    config, dataset, _ = opened(write_pictures(tmp_path / "pictures", each=45, size=8), workers=0)
    config = small(backbone="timm:test_resnet", pretrained=False, image_size=16)
    backbone = build_model(config, dataset.input, 2, "softmax").backbone.train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    split = dataset.splits["train"]
    found = list(feature_batches(backbone, split, np.arange(len(split)), 0, CPU))
    assert len(found) == 2  # batches of 64
    assert not found[0][0].requires_grad
    assert backbone.training
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in found]), np.arange(len(split)))
    with_workers = list(feature_batches(backbone, split, np.arange(len(split)), 2, CPU))
    for (one, _), (two, _) in zip(found, with_workers, strict=True):
        assert torch.equal(one, two)
