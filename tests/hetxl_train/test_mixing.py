"""Mixup and cutmix: shares of images and labels, seeds, and runs that were killed."""

import numpy as np
import pytest
import torch

from hetxl.functional import LabelLists
from hetxl_train.mixing import mixed
from hetxl_train.runs import load_run
from hetxl_train.training import train
from support.training import QUIET, small, write_images

IDS = torch.tensor([0, 2, 1, -100])
ONE_HOT = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]])


def test_mixup_mixes_images_and_labels_by_the_same_share():
    images = torch.rand(4, 3, 5, 5)
    out, targets = mixed(images, IDS, 3, np.random.default_rng(0), mixup=0.4)
    share = np.random.default_rng(0).beta(0.4, 0.4)
    torch.testing.assert_close(out, share * images + (1 - share) * images.flip(0), check_dtype=False)
    torch.testing.assert_close(targets, share * ONE_HOT + (1 - share) * ONE_HOT.flip(0), check_dtype=False)


@pytest.mark.parametrize("seed", range(5))
def test_cutmix_weighs_labels_by_area(seed):
    images = torch.stack([torch.full((1, 12, 10), float(number)) for number in range(4)])
    out, targets = mixed(images, IDS, 3, np.random.default_rng(seed), cutmix=1.0)
    own = (out == images).flatten(1).float().mean(1)  # [B]
    assert torch.equal(own, own[:1].expand(4))
    torch.testing.assert_close(targets, own[0] * ONE_HOT + (1 - own[0]) * ONE_HOT.flip(0))
    assert torch.equal(images[:, 0, 0, 0], torch.arange(4.0))  # the batch itself is left as it was


def test_lists_of_labels_are_mixed_too():
    lists = LabelLists.from_lists([[0, 2], [1]])
    _, targets = mixed(torch.rand(2, 3, 4, 4), lists, 3, np.random.default_rng(1), mixup=1.0)
    share = np.random.default_rng(1).beta(1, 1)
    torch.testing.assert_close(
        targets, torch.tensor([[share, 1 - share, share], [1 - share, share, 1 - share]]), check_dtype=False
    )


def test_both_take_turns():
    rng = np.random.default_rng(0)
    images = torch.zeros(2, 1, 8, 8)
    images[1] = 1
    outs = [mixed(images, torch.tensor([0, 1]), 2, rng, mixup=1.0, cutmix=1.0)[0] for _ in range(100)]
    cut = np.mean([bool(((out == 0) | (out == 1)).all()) for out in outs])
    assert 0.35 < cut < 0.65


AUGMENTED = {
    "backbone": "cnn", "width": 8, "depth": 1, "features": 6, "image_size": 16, "batch_size": 4, "steps": 4,
    "rand_augment": "rand-m9-mstd0.5", "random_erasing": 0.5, "mixup": 0.2, "cutmix": 1.0, "checkpoint_every": 2,
}  # fmt: skip


@pytest.mark.parametrize("options", [{"link": "softmax"}, {"link": "sigmoid", "optimizer": "lamb"}])
def test_augmented_runs_resume_to_the_bit(tmp_path, options):
    images = write_images(tmp_path / "images", each=12)
    first = train(small(tmp_path / "a", data=str(images), workers=1, **AUGMENTED, **options), console=QUIET)
    again = train(small(tmp_path / "b", data=str(images), workers=0, **AUGMENTED, **options), console=QUIET)
    for name in ("model.safetensors", "result.json"):
        (again.path / name).unlink()
    for file in (again.path / "checkpoints" / "step-00000004").iterdir():
        file.unlink()
    (again.path / "checkpoints" / "step-00000004").rmdir()
    train(small(tmp_path / "b", data=str(images), workers=0, **AUGMENTED, **options), console=QUIET)
    expected = load_run(first.path).model.state_dict()
    for name, value in load_run(again.path).model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_mixing_is_refused_where_it_has_no_meaning(tmp_path):
    with pytest.raises(ValueError, match="mixup is for images, but this data is features; leave it out"):
        train(small(tmp_path / "run", mixup=0.2), console=QUIET)
    with pytest.raises(ValueError, match="cutmix needs classifier = linear and temperature_method = train"):
        small(cutmix=1.0, classifier="sampled")
    with pytest.raises(ValueError, match="random_erasing has no effect with frozen"):
        small(frozen=True, random_erasing=0.2)
