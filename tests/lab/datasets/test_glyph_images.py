"""Characters drawn by real fonts, and the damage to their images: how much, of which kind, and reproducible."""

import numpy as np
import pytest

from hetxl_lab.datasets.glyph_images import (
    AREA,
    EM,
    SIZE,
    blurred,
    coverage,
    damage,
    engine,
    image_generator,
    reduced,
    render,
    shifted,
)
from support.packages import needs_debian


def font(package, file):
    return next(needs_debian(package).root.rglob(file))


@pytest.fixture(scope="module")
def cedar():
    return font("fonts-motoya-l-cedar", "MTLc3m.ttf")


def centre(image):
    """Of the box around the ink: the means of its first and last row and column."""
    rows, columns = np.flatnonzero(image.max(1)), np.flatnonzero(image.max(0))
    return (rows[0] + rows[-1]) / 2, (columns[0] + columns[-1]) / 2


def test_images_are_centred_with_a_margin(cedar):
    rendered = render(cedar, ["一", "口", "龍"])
    assert rendered.images.shape == (3, SIZE, SIZE)
    assert rendered.images.dtype == np.uint8
    assert rendered.drawn.tolist() == [True] * 3
    for image in rendered.images:
        assert image.max() > 200
        assert image[0].max() == image[:, 0].max() == 0  # a margin
        np.testing.assert_allclose(centre(image), [15.5, 15.5], atol=0.51)
    line, mouth, dragon = rendered.images
    assert np.flatnonzero(line.max(1)).size < 8 < np.flatnonzero(line.max(0)).size  # its proportions are kept
    assert mouth.mean() < dragon.mean()


def test_box_for_missing_characters_is_left_out(cedar):
    rendered = render(cedar, ["亜", "专", "业"])  # the last two are Chinese alone
    assert rendered.drawn.tolist() == [True, False, False]
    assert len(rendered.images) == 1
    assert render(cedar, ["专"]).drawn.tolist() == [False]  # alone, too


def test_characters_drawn_alike_are_left_out(cedar):
    assert render(cedar, ["昂", "亜", "昻"]).drawn.tolist() == [False, True, False]
    assert render(cedar, ["昂", "亜"]).drawn.tolist() == [True, True]


def test_blank_drawings_are_left_out():
    seto = font("fonts-seto", "setofont.ttf")
    assert render(seto, ["亜", "蜰"]).drawn.tolist() == [True, False]


def test_failing_font_programs_are_left_out():
    broken = font("fonts-horai-umefont", "ume-tgs5.ttf")
    assert not render(broken, ["亜", "位"]).drawn.any()


def test_images_follow_the_order_of_the_characters(cedar):
    few, more = render(cedar, ["亜", "位"]), render(cedar, ["亜", "专", "昂", "位", "昻"])
    np.testing.assert_array_equal(few.images, more.images)


def test_progress_counts_all(cedar):
    steps = []
    render(cedar, ["亜", "专", "位"], advance=steps.append)
    assert sum(steps) == 3


def test_no_characters_give_no_images(cedar):
    rendered = render(cedar, [])
    assert rendered.images.shape == (0, SIZE, SIZE)
    assert rendered.drawn.shape == (0,)


def test_file_that_is_not_a_font_raises(tmp_path):
    path = tmp_path / "font.ttf"
    path.write_text("no font")
    with pytest.raises(ValueError, match=r"font\.ttf cannot be read as a font"):
        render(path, ["亜"])


def test_large_drawing_is_cut_on_both_sides():
    from PIL import Image

    wide = Image.new("L", (200, 30), 255)
    image = reduced(wide)
    assert image.shape == (SIZE, SIZE)
    assert (image[15] == 255).all()
    assert image[0].max() == image[-1].max() == 0
    assert EM < SIZE


def test_engine_names_pillow_and_freetype():
    assert engine().startswith("Pillow ")
    assert "FreeType 2." in engine()


SIDE = 32


def ink(count):
    """Crosses, [n, 32, 32]."""
    images = np.zeros((count, SIDE, SIDE), dtype=np.uint8)
    images[:, 6:26, 15:17] = images[:, 15:17, 6:26] = 255
    return images


def sources(count, face="Face"):
    return [image_generator(0, face, chr(0x4E00 + number), 0) for number in range(count)]


@pytest.fixture(scope="module")
def many():
    return damage(ink(2000), sources(2000))


def test_half_are_nearly_clean_and_a_tenth_is_severe(many):
    assert many.images.dtype == np.uint8
    assert many.severity.dtype == np.float32
    assert many.severity.min() >= 0
    assert many.severity.max() <= 1
    np.testing.assert_allclose(np.quantile(many.severity, [0.5, 0.9]), [0.125, 0.729], atol=0.04)


def test_images_are_black_on_white(many):
    clean = many.images[many.severity < 1e-4]
    assert len(clean) > 20
    np.testing.assert_allclose(clean, 255 - ink(len(clean)), atol=2)


def test_loss_of_ink_grows_with_severity(many):
    clean = 255.0 - ink(1)[0]
    order = np.argsort(many.severity)
    lost = np.abs(many.images - clean).mean((1, 2))[order].reshape(5, 400).mean(1)
    assert (np.diff(lost) > 0).all()
    assert lost[0] < 1
    assert lost[-1] > 40


def test_damage_is_independent_of_other_images():
    together = damage(ink(8), sources(8))
    alone = damage(ink(1), sources(8)[5:6])
    np.testing.assert_array_equal(together.images[5], alone.images[0])
    assert together.severity[5] == alone.severity[0]
    again = damage(ink(8), sources(8))
    np.testing.assert_array_equal(together.images, again.images)


@pytest.mark.parametrize(
    "other", [(1, "Face", "一", 0), (0, "Other", "一", 0), (0, "Face", "丁", 0), (0, "Face", "一", 1)]
)
def test_generator_depends_on_seed_face_character_and_variant(other):
    assert image_generator(0, "Face", "一", 0).random() == image_generator(0, "Face", "一", 0).random()
    assert image_generator(0, "Face", "一", 0).random() != image_generator(*other).random()


def test_damage_accepts_no_images():
    damaged = damage(ink(0), [])
    assert damaged.images.shape == (0, SIDE, SIDE)
    assert damaged.severity.shape == (0,)


def test_blur_equals_the_outer_product_of_gaussians():
    image = np.zeros((1, 9, 12))
    image[0, 4, 5] = 1
    across = np.exp(-0.5 * ((np.arange(12) - 5) / 1.1) ** 2)
    down = np.exp(-0.5 * ((np.arange(9) - 4) / 1.1) ** 2)
    expected = np.outer(down, across) / (np.exp(-0.5 * (np.arange(-30, 31) / 1.1) ** 2).sum() ** 2)
    np.testing.assert_allclose(blurred(image, np.array([1.1]))[0], expected, atol=1e-6)


def test_each_image_has_its_own_blur():
    images = ink(3) / np.float32(255)
    results = blurred(images, np.array([0.0, 1.0, 3.0]))
    np.testing.assert_array_equal(results[0], images[0])
    assert results[1].max() > 1.2 * results[2].max()
    np.testing.assert_allclose(results[1].sum(), images[1].sum(), rtol=1e-3)  # ink is moved, not lost


def test_shift_fills_with_a_value_or_the_edge():
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    moved = shifted(images, np.array([[1, 0], [0, -2]]), 99)
    np.testing.assert_array_equal(moved[0], [[99] * 4, [0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(moved[1], [[14, 15, 99, 99], [18, 19, 99, 99], [22, 23, 99, 99]])
    edge = shifted(images, np.array([[1, 0], [0, -2]]), None)
    np.testing.assert_array_equal(edge[0], [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(edge[1], [[14, 15, 15, 15], [18, 19, 19, 19], [22, 23, 23, 23]])
    np.testing.assert_array_equal(images.ravel(), np.arange(24))


def test_block_has_the_area_of_its_amount():
    draws = np.array([[0.0, 0.5, 0.5, 0.5, 0.0]])
    mask = coverage(np.array([0.4]), draws, (SIDE, SIDE))[0]
    assert mask.sum() == pytest.approx(AREA * 0.4 * SIDE**2, rel=0.05)
    np.testing.assert_allclose(mask, mask[::-1, ::-1])
    assert mask[16, 16] == 1
    assert mask[0, 0] == 0


def test_stroke_has_its_direction():
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
