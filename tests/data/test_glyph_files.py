"""The builder for real, on three small fonts: what it writes, and that it goes on where it was interrupted."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from hetxl.data.glyph_damage import damage, source_of
from hetxl.data.glyph_files import UNFINISHED, make_glyphs
from hetxl.data.glyph_fonts import fetch_fonts
from hetxl.data.glyph_render import render
from hetxl.data.glyph_sets import UNSEEN_HOME, candidates
from support.packages import needs_debian, session_packages

NAMES = ("fonts-konatu", "fonts-motoya-l-cedar", "fonts-seto")
WANTED = [*candidates("jis1")[:60], "专"]  # the last one is in Seto and Konatu alone


@pytest.fixture(scope="module")
def fonts():
    for name in NAMES:
        needs_debian(name)
    return fetch_fonts(session_packages(), NAMES, least=3)


@pytest.fixture(scope="module")
def built(fonts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    made = make_glyphs(folder, fonts, WANTED, 1, 2)
    return folder, made


def read(folder, name):
    return np.load(folder / f"{name}.npy")


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_files(built, fonts):
    folder, made = built
    assert sorted(path.name for path in folder.iterdir()) == [
        "faces.npy",
        "glyphs.json",
        "homes.npy",
        "labels.npy",
        "pictures.npy",
        "severity.npy",
    ]
    table = json.loads((folder / "glyphs.json").read_text(encoding="utf-8"))
    assert table["characters"] == WANTED
    assert [face["name"] for face in table["faces"]] == ["Konatu", "Motoya L Cedar", "Seto"]
    assert [package.name for package in made.packages] == list(NAMES)
    assert len(made.notes) == 1
    assert made.notes[0].startswith("drawn by Pillow")
    count = 2 * sum(render(path, WANTED).drawn.sum() for path in fonts.paths)
    assert read(folder, "pictures").shape == (count, 32, 32)
    assert read(folder, "pictures").dtype == np.uint8
    for name in ("faces", "homes", "labels", "severity"):
        assert read(folder, name).shape == (count,)


def test_every_picture_is_the_one_it_says(built, fonts):
    folder, _ = built
    labels, faces, severity = (read(folder, name) for name in ("labels", "faces", "severity"))
    pictures = read(folder, "pictures")
    for face, path in enumerate(fonts.paths):
        name = fonts.faces[face].name
        for character in ("亜", WANTED[30]):
            rows = np.flatnonzero((faces == face) & (labels == WANTED.index(character)))
            assert len(rows) == 2
            clean = render(path, [character]).pictures
            for variant, row in enumerate(rows):
                expected = damage(clean, [source_of(0, name, character, variant)])
                np.testing.assert_array_equal(pictures[row], expected.pictures[0])
                assert severity[row] == expected.severity[0]
            assert not np.array_equal(pictures[rows[0]], pictures[rows[1]])


def test_a_face_that_does_not_draw_a_character(built):
    folder, _ = built
    faces, labels = read(folder, "faces"), read(folder, "labels")
    missing = labels == WANTED.index("专")
    assert 1 not in faces[missing]  # Cedar would draw a box
    assert missing.any()


def test_splits_go_by_family_and_character(built):
    folder, _ = built
    faces, labels, home = (read(folder, name) for name in ("faces", "labels", "homes"))
    assert ((home == UNSEEN_HOME) == (faces == 0)).all()  # Konatu is never trained on
    for face in (1, 2):
        for label in range(len(WANTED)):
            assert len(np.unique(home[(faces == face) & (labels == label)])) <= 1
    assert set(labels[home == 0]) == set(range(len(WANTED)))


def test_the_same_bytes_again(built, fonts, tmp_path):
    make_glyphs(tmp_path, fonts, WANTED, 1, 2)
    assert digests(tmp_path) == digests(built[0])


def test_an_interrupted_build_goes_on(built, fonts, tmp_path):
    absent = tmp_path / "absent" / fonts.paths[2].name
    with pytest.raises(ValueError, match="cannot be read as a font"):
        make_glyphs(tmp_path, fonts._replace(paths=[*fonts.paths[:2], absent]), WANTED, 1, 2)
    assert len(list(tmp_path.glob(f"{UNFINISHED}*"))) == 4  # two faces, two files each
    assert not (tmp_path / "pictures.npy").exists()
    # The first two are not drawn again: their fonts are gone.
    gone = [absent.with_name(path.name) for path in fonts.paths[:2]]
    make_glyphs(tmp_path, fonts._replace(paths=[*gone, fonts.paths[2]]), WANTED, 1, 2)
    assert digests(tmp_path) == digests(built[0])


def test_drawings_of_other_characters_are_not_taken(built, fonts, tmp_path):
    absent = tmp_path / "absent" / fonts.paths[1].name
    with pytest.raises(ValueError, match="cannot be read as a font"):
        make_glyphs(tmp_path, fonts._replace(paths=[fonts.paths[0], absent, absent]), WANTED[::-1], 1, 2)
    make_glyphs(tmp_path, fonts, WANTED, 1, 2)
    assert digests(tmp_path) == digests(built[0])


def test_a_picture_does_not_depend_on_the_other_fonts(built, fonts, tmp_path):
    few = fonts._replace(faces=fonts.faces[2:], paths=fonts.paths[2:], packages=fonts.packages[2:])
    make_glyphs(tmp_path, few, WANTED, 1, 2)
    np.testing.assert_array_equal(read(tmp_path, "pictures"), read(built[0], "pictures")[read(built[0], "faces") == 2])


def test_characters_that_few_families_draw_are_left_out(fonts, tmp_path):
    make_glyphs(tmp_path, fonts, WANTED, 3, 1)
    assert json.loads((tmp_path / "glyphs.json").read_text(encoding="utf-8"))["characters"] == WANTED[:-1]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(ValueError, match="fonts must be at most 3, found 4: no character has more families"):
        make_glyphs(tmp_path, fonts, WANTED, 4, 1)


def test_characters_that_no_font_draws_are_told(fonts, tmp_path):
    made = make_glyphs(tmp_path, fonts, ["亜", "位", "\U0002a6d0"], 1, 1)
    assert made.notes[-1] == "1 of 3 characters are left out: no font draws them"
