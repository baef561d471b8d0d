import json
import shutil

import numpy as np
import pytest

from hetxl.data.build.packages import Package
from hetxl.data.glyph_render import SIZE, open_font
from hetxl.data.icons_files import DESIGNS, FAMILIES, FOLDER, draw_icon, make_icons, shares_of
from support.packages import needs_python


def test_seven_families_of_six_designs():
    assert len(FAMILIES) == 7
    assert len(DESIGNS) == 6
    assert sum(len(family.fonts) for family in FAMILIES) == 12


def test_shares_are_equal_for_one_stem_or_one_picture_of_a_design():
    pictures = np.arange(6)[:, None, None] * np.ones((6, 2, 2), dtype=np.uint8)
    pictures[3] = pictures[0]
    names = ["bell", "bell bold", "whale", "alarm", "bell", "alarm thin"]
    found = shares_of(pictures, names, ["a", "a", "a", "a", "b", "a"])
    assert found[0] == found[1]  # of one stem
    assert found[0] == found[3]  # of one picture
    assert found[3] == found[5]  # and so of all that these are one with
    assert len({found[0], found[2], found[4]}) == 3
    assert ((found >= 0) & (found < 1)).all()
    # What comes later changes nothing.
    assert np.array_equal(shares_of(pictures[:3], names[:3], ["a"] * 3), found[:3])


def test_wide_icons_are_made_smaller_and_centred():
    package = needs_python("qtawesome")
    (path,) = (package.root / FOLDER).glob("fontawesome6-solid-webfont-6*.ttf")
    (table,) = (package.root / FOLDER).glob("fontawesome6-solid-webfont-charmap-*.json")
    points = json.loads(table.read_text())
    font = open_font(path)
    for name in ("wifi", "person-walking-luggage", "train-subway", "hand"):
        picture = draw_icon(font, chr(int(points[name], 16)))
        assert picture.shape == (SIZE, SIZE)
        assert picture.dtype == np.uint8
        rows, columns = (np.flatnonzero(picture.any(axis)) for axis in (1, 0))
        for found in (rows, columns):
            assert found[0] >= 1
            assert found[-1] <= SIZE - 2
            assert abs(found[0] - (SIZE - 1 - found[-1])) <= 1


def test_names_that_a_font_does_not_draw_are_left_out(tmp_path):
    package = needs_python("qtawesome")
    (tmp_path / FOLDER).parent.mkdir()
    shutil.copytree(package.root / FOLDER, tmp_path / FOLDER)
    (table,) = (tmp_path / FOLDER).glob("codicon-charmap-*.json")
    points = json.loads(table.read_text())
    table.write_text(json.dumps({"a": points["add"], "b": "0x3042", "c": "0xffff", "d": points["bell"]}))
    made = make_icons(tmp_path / "made", package._replace(root=tmp_path), each=4)
    assert json.loads((tmp_path / "made" / "names.json").read_text())[:2] == ["a", "d"]
    assert any("2 names without a drawing" in note for note in made.notes)


def test_an_interrupted_build_goes_on_with_the_next_font(tmp_path, monkeypatch):
    package = needs_python("qtawesome")
    drawn = []

    def stops(font, character):
        drawn.append(character)
        if len(drawn) == 25:
            raise KeyboardInterrupt
        return draw_icon(font, character)

    monkeypatch.setattr("hetxl.data.icons_files.draw_icon", stops)
    with pytest.raises(KeyboardInterrupt):
        make_icons(tmp_path, package, each=10)
    made = make_icons(tmp_path, package, each=10)
    assert len(drawn) == 25 + 12 * 11 - 2 * 11  # two fonts were done; each also draws its sign for what it has not
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "families.npy", "names.json", "pictures.npy", "shares.npy",
    ]  # fmt: skip
    assert any("CC-BY-4.0" in note for note in made.notes)


def test_a_package_without_the_fonts(tmp_path):
    package = Package("qtawesome", "9.9", "0", "a licence", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"qtawesome 9\.9 has 0 files codicon-charmap-VERSION\.json"):
        make_icons(tmp_path, package, each=2)
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "codicon-charmap-1.0.json").write_text('{"add": "xyz"}')
    with pytest.raises(ValueError, match=r"codicon-charmap-1\.0\.json is no table of names and code points"):
        make_icons(tmp_path, package, each=2)
