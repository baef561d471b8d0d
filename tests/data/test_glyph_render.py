"""What fonts draw, for real: characters, boxes for missing ones, blanks, and twins."""

import numpy as np
import pytest

from hetxl.data.glyph_render import EM, SIZE, engine, reduced, render
from support.packages import needs_debian


def font(package, file):
    return next(needs_debian(package).root.rglob(file))


@pytest.fixture(scope="module")
def cedar():
    return font("fonts-motoya-l-cedar", "MTLc3m.ttf")


def centre(picture):
    """Of the box around the ink: the means of its first and last row and column."""
    rows, columns = np.flatnonzero(picture.max(1)), np.flatnonzero(picture.max(0))
    return (rows[0] + rows[-1]) / 2, (columns[0] + columns[-1]) / 2


def test_pictures(cedar):
    found = render(cedar, ["一", "口", "龍"])
    assert found.pictures.shape == (3, SIZE, SIZE)
    assert found.pictures.dtype == np.uint8
    assert found.drawn.tolist() == [True] * 3
    for picture in found.pictures:
        assert picture.max() > 200
        assert picture[0].max() == picture[:, 0].max() == 0  # a margin
        np.testing.assert_allclose(centre(picture), [15.5, 15.5], atol=0.51)
    line, mouth, dragon = found.pictures
    assert np.flatnonzero(line.max(1)).size < 8 < np.flatnonzero(line.max(0)).size  # its proportions are kept
    assert mouth.mean() < dragon.mean()


def test_the_box_for_missing_characters_is_none_of_them(cedar):
    found = render(cedar, ["亜", "专", "业"])  # the last two are Chinese alone
    assert found.drawn.tolist() == [True, False, False]
    assert len(found.pictures) == 1
    assert render(cedar, ["专"]).drawn.tolist() == [False]  # alone, too


def test_characters_that_a_font_does_not_tell_apart(cedar):
    assert render(cedar, ["昂", "亜", "昻"]).drawn.tolist() == [False, True, False]
    assert render(cedar, ["昂", "亜"]).drawn.tolist() == [True, True]


def test_blanks():
    seto = font("fonts-seto", "setofont.ttf")
    assert render(seto, ["亜", "蜰"]).drawn.tolist() == [True, False]


def test_programs_in_a_font_that_fail():
    broken = font("fonts-horai-umefont", "ume-tgs5.ttf")
    assert not render(broken, ["亜", "位"]).drawn.any()


def test_pictures_are_those_of_the_drawn_in_order(cedar):
    few, more = render(cedar, ["亜", "位"]), render(cedar, ["亜", "专", "昂", "位", "昻"])
    np.testing.assert_array_equal(few.pictures, more.pictures)


def test_progress_counts_all(cedar):
    told = []
    render(cedar, ["亜", "专", "位"], advance=told.append)
    assert sum(told) == 3


def test_no_characters(cedar):
    found = render(cedar, [])
    assert found.pictures.shape == (0, SIZE, SIZE)
    assert found.drawn.shape == (0,)


def test_what_is_no_font(tmp_path):
    path = tmp_path / "font.ttf"
    path.write_text("no font")
    with pytest.raises(ValueError, match=r"font\.ttf cannot be read as a font"):
        render(path, ["亜"])


def test_a_drawing_larger_than_the_picture_is_cut_on_both_sides():
    from PIL import Image

    wide = Image.new("L", (200, 30), 255)
    found = reduced(wide)
    assert found.shape == (SIZE, SIZE)
    assert (found[15] == 255).all()
    assert found[0].max() == found[-1].max() == 0
    assert EM < SIZE


def test_the_engine_is_named():
    assert engine().startswith("Pillow ")
    assert "FreeType 2." in engine()
