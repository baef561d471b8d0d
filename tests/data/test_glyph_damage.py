"""Damage: how much of it, what each part does, and that it depends on the picture alone."""

import numpy as np
import pytest

from hetxl.data.glyph_damage import AREA, blurred, coverage, damage, shifted, source_of

SIDE = 32


def ink(count):
    """Crosses, [n, 32, 32]."""
    pictures = np.zeros((count, SIDE, SIDE), dtype=np.uint8)
    pictures[:, 6:26, 15:17] = pictures[:, 15:17, 6:26] = 255
    return pictures


def sources(count, face="Face"):
    return [source_of(0, face, chr(0x4E00 + number), 0) for number in range(count)]


@pytest.fixture(scope="module")
def many():
    return damage(ink(2000), sources(2000))


def test_half_are_nearly_clean_and_a_tenth_is_severe(many):
    assert many.pictures.dtype == np.uint8
    assert many.severity.dtype == np.float32
    assert many.severity.min() >= 0
    assert many.severity.max() <= 1
    np.testing.assert_allclose(np.quantile(many.severity, [0.5, 0.9]), [0.125, 0.729], atol=0.04)


def test_pictures_are_black_on_white(many):
    clean = many.pictures[many.severity < 1e-4]
    assert len(clean) > 20
    np.testing.assert_allclose(clean, 255 - ink(len(clean)), atol=2)


def test_the_more_severe_the_less_is_left(many):
    wanted = 255.0 - ink(1)[0]
    order = np.argsort(many.severity)
    lost = np.abs(many.pictures - wanted).mean((1, 2))[order].reshape(5, 400).mean(1)
    assert (np.diff(lost) > 0).all()
    assert lost[0] < 1
    assert lost[-1] > 40


def test_a_picture_depends_on_its_own_numbers_alone():
    together = damage(ink(8), sources(8))
    alone = damage(ink(1), sources(8)[5:6])
    np.testing.assert_array_equal(together.pictures[5], alone.pictures[0])
    assert together.severity[5] == alone.severity[0]
    again = damage(ink(8), sources(8))
    np.testing.assert_array_equal(together.pictures, again.pictures)


@pytest.mark.parametrize(
    "other", [(1, "Face", "一", 0), (0, "Other", "一", 0), (0, "Face", "丁", 0), (0, "Face", "一", 1)]
)
def test_seed_face_character_and_variant_each_count(other):
    assert source_of(0, "Face", "一", 0).random() == source_of(0, "Face", "一", 0).random()
    assert source_of(0, "Face", "一", 0).random() != source_of(*other).random()


def test_no_pictures():
    found = damage(ink(0), [])
    assert found.pictures.shape == (0, SIDE, SIDE)
    assert found.severity.shape == (0,)


def test_blur_against_the_plain_way():
    picture = np.zeros((1, 9, 12))
    picture[0, 4, 5] = 1
    across = np.exp(-0.5 * ((np.arange(12) - 5) / 1.1) ** 2)
    down = np.exp(-0.5 * ((np.arange(9) - 4) / 1.1) ** 2)
    expected = np.outer(down, across) / (np.exp(-0.5 * (np.arange(-30, 31) / 1.1) ** 2).sum() ** 2)
    np.testing.assert_allclose(blurred(picture, np.array([1.1]))[0], expected, atol=1e-6)


def test_each_picture_has_its_own_blur():
    pictures = ink(3) / np.float32(255)
    found = blurred(pictures, np.array([0.0, 1.0, 3.0]))
    np.testing.assert_array_equal(found[0], pictures[0])
    assert found[1].max() > 1.2 * found[2].max()
    np.testing.assert_allclose(found[1].sum(), pictures[1].sum(), rtol=1e-3)  # ink is moved, not lost


def test_shift():
    pictures = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    found = shifted(pictures, np.array([[1, 0], [0, -2]]), 99)
    np.testing.assert_array_equal(found[0], [[99] * 4, [0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(found[1], [[14, 15, 99, 99], [18, 19, 99, 99], [22, 23, 99, 99]])
    edge = shifted(pictures, np.array([[1, 0], [0, -2]]), None)
    np.testing.assert_array_equal(edge[0], [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(edge[1], [[14, 15, 15, 15], [18, 19, 19, 19], [22, 23, 23, 23]])
    np.testing.assert_array_equal(pictures.ravel(), np.arange(24))


def test_a_block_in_the_middle():
    draws = np.array([[0.0, 0.5, 0.5, 0.5, 0.0]])
    found = coverage(np.array([0.4]), draws, (SIDE, SIDE))[0]
    assert found.sum() == pytest.approx(AREA * 0.4 * SIDE**2, rel=0.05)
    np.testing.assert_allclose(found, found[::-1, ::-1])
    assert found[16, 16] == 1
    assert found[0, 0] == 0


def test_a_stroke_across():
    draws = np.array([[0.9, 0.5, 0.5, 0.0, 0.0], [0.9, 0.5, 0.5, 0.0, 0.5]])
    across, down = coverage(np.array([0.5, 0.5]), draws, (SIDE, SIDE))
    assert (across[16] == 1).all()
    assert (across[0] == 0).all()
    np.testing.assert_allclose(down, across.T, atol=1e-6)


def test_no_occlusion_hides_nothing():
    draws = np.random.default_rng(0).random((50, 5))
    assert coverage(np.zeros(50), draws, (SIDE, SIDE)).max() == 0
    faint = coverage(np.full(50, 1e-4), draws, (SIDE, SIDE))
    assert faint.sum((1, 2)).max() < 2
