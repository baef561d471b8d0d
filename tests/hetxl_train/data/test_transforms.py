"""Images as models take them: timm's own transforms are the oracle; random crops and augmentation by seed alone."""

import pickle
import random

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from hetxl_train.data.preprocessing import backbone_transform, transform_from_processor, transform_of
from hetxl_train.data.transforms import GREY, Augmentation, ImageTransform, Preprocessing, random_box
from support.training import small

RED = (200, 30, 40)
PLAIN = Preprocessing((0, 0, 0), (1, 1, 1))


def photo(width, height, seed=0):
    """Smooth enough to be resized, and different everywhere."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(300, 200), (91, 257), (64, 64), (640, 100)])
@pytest.mark.parametrize(
    "model", ["vit_tiny_patch16_224", "resnetv2_50x1_bit.goog_in21k", "convnext_atto", "test_resnet"]
)
def test_evaluation_is_timms_own_transform(model, size):
    configuration = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(model).to_dict())
    transform = backbone_transform(f"timm:{model}")
    theirs = create_transform(**configuration, is_training=False)(photo(*size))
    assert transform.shape == tuple(theirs.shape)
    np.testing.assert_allclose(transform(photo(*size)), theirs.numpy(), atol=1e-6)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("crop", [1.0, 0.9])
@pytest.mark.parametrize("size", [(50, 31), (31, 50), (7, 40)])
def test_transform_matches_every_crop_mode_of_timm(mode, crop, size):
    configuration = {"input_size": (3, 24, 24), "crop_mode": mode, "crop_pct": crop, "interpolation": "bicubic"}
    theirs = create_transform(**configuration, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))(photo(*size))
    resize = "shorter" if mode == "center" else mode
    ours = ImageTransform(24, Preprocessing((0.5, 0.4, 0.3), (0.1, 0.2, 0.3), "bicubic", crop, resize))(photo(*size))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


def test_very_long_images_are_cropped_before_they_are_resized():
    long = photo(2000, 20)
    ours = ImageTransform(16, PLAIN)(long)
    theirs = create_transform((3, 16, 16), crop_pct=0.875, mean=(0, 0, 0), std=(1, 1, 1))(long)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=0.02)
    ImageTransform(16, PLAIN)(Image.new("RGB", (100_000, 1)))  # resized first it would have 32 million pixels


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"size": {"height": 32, "width": 32}, "resample": 2}, (32, "bilinear", 1.0, "squash")),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224}, "do_center_crop": True, "resample": 3},
            (224, "bicubic", 0.875, "shorter"),
        ),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3}, (224, "bicubic", 0.875, "shorter")),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875, "resample": 3}, (384, "bicubic", 1.0, "squash")),
        ({"size": 64, "resample": 0}, (64, "nearest", 1.0, "squash")),
    ],
)  # fmt: skip
def test_image_processors_of_transformers(values, expected):
    transform = transform_from_processor({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.3], **values})
    preprocessing = transform.preprocessing
    assert (transform.size, preprocessing.interpolation, preprocessing.crop, preprocessing.resize) == expected
    assert (preprocessing.mean, preprocessing.std) == ((0.5, 0.4, 0.3), (0.1, 0.2, 0.3))


def test_a_processor_saved_with_a_model_gives_its_pixels(tmp_path):
    from transformers import ViTImageProcessorPil

    processor = ViTImageProcessorPil(size={"height": 20, "width": 20}, image_mean=[0.3] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path)
    theirs = processor(photo(50, 31), return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(backbone_transform(f"hf:{tmp_path}")(photo(50, 31)), theirs, atol=1e-5)
    assert backbone_transform("hf:vit") == ImageTransform()  # a model type has no processor of its own


def test_options_override_the_backbone():
    options = {"image_mean": "0.1,0.2,0.3", "interpolation": "nearest", "crop": 0.5, "image_size": 40}
    transform = transform_of(small(backbone="timm:test_vit", resize="squash", **options))
    assert transform == ImageTransform(
        40, Preprocessing((0.1, 0.2, 0.3), (0.5, 0.5, 0.5), "nearest", crop=0.5, resize="squash")
    )
    assert transform_of(small(backbone="cnn")) == ImageTransform()
    with pytest.raises(ValueError, match=r"image_mean must be three numbers, as in 0.5,0.5,0.5, found '0.5'"):
        transform_of(small(image_mean="0.5"))
    with pytest.raises(ValueError, match=r"interpolation.*'cubic'"):
        transform_of(small(interpolation="cubic"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": (1, 0, 1)}, "mean and std must be three numbers, or one"),
        ({"mean": (1,)}, "mean and std"),
        ({"crop": 1.5}, "crop must be above 0 and at most 1, found 1.5"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**options)
    with pytest.raises(ValueError, match="image_size must be at least 1, found 0"):
        ImageTransform(0)


def test_random_boxes_lie_inside_and_have_the_drawn_shares():
    rng = np.random.default_rng(0)
    areas, ratios = [], []
    for _ in range(500):
        left, top, right, bottom = random_box(250, 200, rng)
        assert 0 <= left < right <= 250
        assert 0 <= top < bottom <= 200
        areas.append((right - left) * (bottom - top) / 50_000)
        ratios.append((right - left) / (bottom - top))
    assert 0.07 < min(areas) < 0.12
    assert 0.9 < max(areas) <= 1
    assert 0.74 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.35


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 2)])
@pytest.mark.parametrize("seed", [None, 3, -1])
def test_crops_of_odd_sizes_lie_inside_the_image(size, seed):
    pixels = ImageTransform(16, PLAIN)(Image.new("RGB", size, RED), seed)
    np.testing.assert_allclose(pixels, np.broadcast_to((np.array(RED) / 255)[:, None, None], (3, 16, 16)), rtol=1e-6)
    left, top, right, bottom = random_box(*size, np.random.default_rng(0))
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]


def test_half_of_the_crops_are_flipped():
    ramp = Image.fromarray(np.tile(np.linspace(0, 255, 32).astype(np.uint8)[None, :, None], (32, 1, 3)))
    crops = [ImageTransform(16, PLAIN)(ramp, seed) for seed in range(200)]
    flipped = np.mean([crop[0, 8, 0] > crop[0, 8, -1] for crop in crops])
    assert 0.4 < flipped < 0.6


def test_greyscale_images_keep_their_edges():
    columns = np.linspace(0, 255, 48).astype(np.uint8)
    transform = ImageTransform(32, GREY)
    grey = transform(Image.fromarray(np.tile(columns, (32, 1))).convert("RGB"))
    assert grey.shape == transform.shape == (1, 32, 32)
    np.testing.assert_allclose(grey[0, 5], columns[8:40] / 127.5 - 1, atol=1e-6)  # the square in the middle
    red = transform(Image.new("RGB", (48, 32), (255, 0, 0)), seed=3)
    np.testing.assert_allclose(red, 0.299 * 2 - 1, atol=0.01)  # as bright as red is


AUGMENTED = ImageTransform(32, PLAIN, Augmentation("rand-m9-mstd0.5-inc1", 0.5))


def test_augmentation_depends_on_the_seed_alone():
    pixels = [AUGMENTED(photo(60, 40), seed) for seed in range(8)]
    random.random()
    torch.rand(1)
    states = random.getstate(), torch.get_rng_state()
    copy = pickle.loads(pickle.dumps(AUGMENTED))
    for seed in reversed(range(8)):
        np.testing.assert_array_equal(copy(photo(60, 40), seed), pixels[seed])
    assert random.getstate() == states[0]  # draws outside are not disturbed
    assert torch.equal(torch.get_rng_state(), states[1])


def test_augmentation_changes_training_images_alone():
    plain = ImageTransform(32, PLAIN)
    np.testing.assert_array_equal(AUGMENTED(photo(60, 40)), plain(photo(60, 40)))
    erased = ImageTransform(32, PLAIN, Augmentation(erasing=1.0))
    changed = erased(photo(60, 40), 5) != plain(photo(60, 40), 5)
    rows, columns = np.flatnonzero(changed[0].any(1)), np.flatnonzero(changed[0].any(0))
    assert changed[0][rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.9  # a rectangle
    assert 0.01 < changed.mean() < 0.5
    moved = ImageTransform(32, PLAIN, Augmentation("rand-m9-mstd0.5"))
    assert any((moved(photo(60, 40), seed) != plain(photo(60, 40), seed)).mean() > 0.5 for seed in range(4))


def test_normalisation_by_a_table_equals_the_formula_to_the_bit():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    plain = Preprocessing()
    mean, std = (np.array(values, dtype=np.float32) for values in (plain.mean, plain.std))
    expected = ((pixels.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1)
    np.testing.assert_array_equal(ImageTransform(8, Preprocessing(crop=1.0))(Image.fromarray(pixels)), expected)
