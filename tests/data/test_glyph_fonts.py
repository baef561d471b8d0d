"""The table of typefaces, and packages that can be had or not."""

import numpy as np
import pytest

from hetxl.data.build import Unavailable
from hetxl.data.glyph_fonts import FACES, FAMILIES, LEAST, PACKAGES, UNSEEN, fetch_fonts, find_face
from hetxl.data.glyph_render import render
from hetxl.data.glyph_sets import candidates
from support.packages import needs_debian


def face_of(package):
    return next(face for face in FACES if face.package == package)


def test_the_table():
    assert (len(FACES), len(PACKAGES), FAMILIES) == (25, 24, 20)
    assert len({face.name for face in FACES}) == len(FACES)
    assert set(UNSEEN) < {face.family for face in FACES}
    assert len(UNSEEN) == 5
    assert all(face.package.startswith("fonts-") for face in FACES)
    # Faces of one package draw with the same file only if it is a collection.
    assert len({(face.package, face.file, face.number) for face in FACES}) == len(FACES)


@pytest.fixture(scope="module")
def pictures():
    """[200, 1024] for three faces, each normalised."""
    wanted = candidates("jis1")[::14][:200]
    found = {}
    for package in ("fonts-konatu", "fonts-motoya-l-cedar", "fonts-motoya-l-maruberi"):
        path = find_face(face_of(package), needs_debian(package).root)
        rendered = render(path, wanted)
        assert rendered.drawn.all()
        flat = rendered.pictures.reshape(len(wanted), -1).astype(np.float64)
        flat -= flat.mean(1, keepdims=True)
        found[package] = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return found


def test_families_are_the_faces_that_look_alike(pictures):
    konatu, cedar, maruberi = pictures.values()
    assert (cedar * maruberi).sum(1).mean() > 0.85
    assert (cedar * konatu).sum(1).mean() < 0.85
    assert (maruberi * konatu).sum(1).mean() < 0.85
    assert face_of("fonts-motoya-l-cedar").family == face_of("fonts-motoya-l-maruberi").family


@pytest.fixture
def folder(tmp_path):
    """Only one package is in it, and there is no tool to get another."""
    package = needs_debian("fonts-konatu")
    (tmp_path / package.root.name).symlink_to(package.root, target_is_directory=True)
    return tmp_path


def test_what_cannot_be_had_is_left_out(folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = fetch_fonts(folder, ("fonts-seto", "fonts-konatu"), least=1)
    assert [face.name for face in found.faces] == ["Konatu"]
    assert found.paths[0].name == "Konatu.ttf"
    assert [package.name for package in found.packages] == ["fonts-konatu"]
    (note,) = found.notes
    assert note.startswith("left out: apt-get is needed for the Debian package fonts-seto")


def test_too_few_packages(folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match=f"at least {LEAST} of its 24 font packages, and 1 can be had: apt-get is"):
        fetch_fonts(folder)


def test_a_package_without_its_face(tmp_path, monkeypatch):
    package = needs_debian("fonts-konatu")
    other = tmp_path / package.root.name
    other.mkdir()
    (other / ".package.json").write_bytes((package.root / ".package.json").read_bytes())
    monkeypatch.setenv("PATH", "")
    found = fetch_fonts(tmp_path, ("fonts-konatu",), least=1)
    assert list(found.faces) == []
    assert list(found.notes) == [f"Konatu is left out: fonts-konatu {package.version} has no Konatu.ttf"]


def test_a_package_that_is_not_in_the_table(tmp_path):
    with pytest.raises(ValueError, match="packages has 'fonts-lato', which has no face in the table of glyphs"):
        fetch_fonts(tmp_path, ("fonts-konatu", "fonts-lato"))
