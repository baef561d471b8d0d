"""Images of characters from three small fonts: faces, sets of characters, files, splits, options, and a run."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from hetxl_lab.build import store
from hetxl_lab.build.packages import Unavailable
from hetxl_lab.datasets.glyph_images import damage, image_generator, offsets, render
from hetxl_lab.datasets.glyphs import (
    FACES,
    FAMILIES,
    MIN_PACKAGES,
    PACKAGES,
    UNFINISHED,
    UNSEEN,
    UNSEEN_SPLIT,
    VERSION,
    build_glyphs,
    candidates,
    fetch_fonts,
    find_face,
    load_glyphs,
    make_glyphs,
    split_numbers,
)
from hetxl_train.data import open_dataset
from hetxl_train.prediction import predict
from hetxl_train.training import train
from support.packages import cache_with_packages, needs_debian, session_packages
from support.training import QUIET, small


def test_jis_levels_have_their_sizes():
    level_1, both = candidates("jis1"), candidates("jis")
    assert (len(level_1), len(both) - len(level_1)) == (2965, 3390)
    assert set(level_1) < set(both)
    assert {"亜", "腕"} <= set(level_1)  # the first and the last of the level
    assert {"弌", "熙"} <= set(both) - set(level_1)


@pytest.mark.parametrize("name", ["jis1", "jis", "common"])
def test_characters_are_ideographs_in_order(name):
    characters = candidates(name)
    assert characters == sorted(set(characters))
    assert all(0x3400 <= ord(character) < 0xA000 for character in characters)


def test_common_contains_jis():
    assert len(candidates("common")) == 20_992 + 6_592
    assert set(candidates("jis")) < set(candidates("common"))


def all_drawn(families, characters):
    return np.ones((len(families), len(characters)), dtype=bool)


def test_shares_of_the_splits():
    families, characters = [f"f{number}" for number in range(8)], candidates("jis1")
    numbers = split_numbers(families, characters, all_drawn(families, characters), ["f3"])
    assert (numbers[3] == UNSEEN_SPLIT).all()
    rest = np.delete(numbers, 3, axis=0)
    np.testing.assert_allclose(np.bincount(rest.ravel()) / rest.size, [0.8, 0.1, 0.1], atol=0.01)
    assert (rest == 0).any(0).all()


def test_split_of_a_pair_is_independent_of_the_others():
    families, characters = ["a", "b", "c"], candidates("jis1")
    whole = split_numbers(families, characters, all_drawn(families, characters), [])
    part = split_numbers(["c", "a"], characters[100:200], np.ones((2, 100), dtype=bool), [])
    together = (whole[[2, 0], 100:200] == 0).any(0) & (part == 0).any(0)  # the others were moved
    assert together.sum() > 80
    moved = (part != whole[[2, 0], 100:200])[:, together]
    # A pair that was moved because a character had no other is the one exception.
    assert moved.mean() < 0.02


def test_every_character_is_in_training():
    families, characters = ["a", "b", "c"], candidates("jis1")
    drawn = np.zeros((3, len(characters)), dtype=bool)
    drawn[0] = drawn[1] = True
    first = split_numbers(families[:1], characters, drawn[:1], [])
    assert (first == 0).all()  # one family: always in training
    numbers = split_numbers(families, characters, drawn, ["b"])
    assert (numbers[0] == 0).all()  # the unseen family does not count
    assert (numbers[1] == UNSEEN_SPLIT).all()
    assert (numbers[2] != 0).any()  # nothing is drawn there, so nothing is moved


def test_split_numbers_of_no_characters():
    assert split_numbers(["a"], [], np.ones((1, 0), dtype=bool), []).shape == (1, 0)


def face_of(package):
    return next(face for face in FACES if face.package == package)


def test_faces_are_unique_and_unseen_families_exist():
    assert (len(FACES), len(PACKAGES), FAMILIES) == (25, 24, 20)
    assert len({face.name for face in FACES}) == len(FACES)
    assert set(UNSEEN) < {face.family for face in FACES}
    assert len(UNSEEN) == 5
    assert all(face.package.startswith("fonts-") for face in FACES)
    # Faces of one package draw with the same file only if it is a collection.
    assert len({(face.package, face.file, face.number) for face in FACES}) == len(FACES)


@pytest.fixture(scope="module")
def normalised_images():
    """[200, 1024] for three faces, each normalised."""
    characters = candidates("jis1")[::14][:200]
    images = {}
    for package in ("fonts-konatu", "fonts-motoya-l-cedar", "fonts-motoya-l-maruberi"):
        path = find_face(face_of(package), needs_debian(package).root)
        rendered = render(path, characters)
        assert rendered.drawn.all()
        flat = rendered.images.reshape(len(characters), -1).astype(np.float64)
        flat -= flat.mean(1, keepdims=True)
        images[package] = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return images


def test_families_are_faces_with_correlated_images(normalised_images):
    konatu, cedar, maruberi = normalised_images.values()
    assert (cedar * maruberi).sum(1).mean() > 0.85
    assert (cedar * konatu).sum(1).mean() < 0.85
    assert (maruberi * konatu).sum(1).mean() < 0.85
    assert face_of("fonts-motoya-l-cedar").family == face_of("fonts-motoya-l-maruberi").family


@pytest.fixture
def one_package(tmp_path):
    """Only one package is in it, and there is no tool to get another."""
    package = needs_debian("fonts-konatu")
    (tmp_path / package.root.name).symlink_to(package.root, target_is_directory=True)
    return tmp_path


def test_unavailable_packages_are_left_out(one_package, monkeypatch):
    monkeypatch.setenv("PATH", "")
    fetched = fetch_fonts(one_package, ("fonts-seto", "fonts-konatu"), least=1)
    assert [face.name for face in fetched.faces] == ["Konatu"]
    assert fetched.paths[0].name == "Konatu.ttf"
    assert [package.name for package in fetched.packages] == ["fonts-konatu"]
    (note,) = fetched.notes
    assert note.startswith("left out: apt-get, which downloads the Debian package fonts-seto")


def test_too_few_packages_raise(one_package, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match=f"at least {MIN_PACKAGES} of its 24 font packages, 1 are available: apt-get"):
        fetch_fonts(one_package)


def test_package_without_its_face_is_noted(tmp_path, monkeypatch):
    package = needs_debian("fonts-konatu")
    other = tmp_path / package.root.name
    other.mkdir()
    (other / ".package.json").write_bytes((package.root / ".package.json").read_bytes())
    monkeypatch.setenv("PATH", "")
    fetched = fetch_fonts(tmp_path, ("fonts-konatu",), least=1)
    assert list(fetched.faces) == []
    assert list(fetched.notes) == [f"Konatu is left out: fonts-konatu {package.version} has no Konatu.ttf"]


def test_unknown_package_raises(tmp_path):
    with pytest.raises(ValueError, match="names has 'fonts-lato', a package without a face"):
        fetch_fonts(tmp_path, ("fonts-konatu", "fonts-lato"))


PACKAGES_USED = ("fonts-konatu", "fonts-motoya-l-cedar", "fonts-seto")
REQUESTED = [*candidates("jis1")[:60], "专"]  # the last one is in Seto and Konatu alone


@pytest.fixture(scope="module")
def fonts():
    for name in PACKAGES_USED:
        needs_debian(name)
    return fetch_fonts(session_packages(), PACKAGES_USED, least=3)


@pytest.fixture(scope="module")
def built(fonts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("built")
    summary = make_glyphs(directory, fonts, REQUESTED, 1, 2)
    return directory, summary


def read(directory, name):
    return np.load(directory / f"{name}.npy")


def digests(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_build_writes_all_files(built, fonts):
    directory, summary = built
    assert sorted(path.name for path in directory.iterdir()) == [
        "faces.npy",
        "glyphs.json",
        "homes.npy",
        "labels.npy",
        "pictures.npy",
        "severity.npy",
    ]
    table = json.loads((directory / "glyphs.json").read_text(encoding="utf-8"))
    assert table["characters"] == REQUESTED
    assert [face["name"] for face in table["faces"]] == ["Konatu", "Motoya L Cedar", "Seto"]
    assert [package.name for package in summary.packages] == list(PACKAGES_USED)
    assert len(summary.notes) == 1
    assert summary.notes[0].startswith("drawn by Pillow")
    count = 2 * sum(render(path, REQUESTED).drawn.sum() for path in fonts.paths)
    assert read(directory, "pictures").shape == (count, 32, 32)
    assert read(directory, "pictures").dtype == np.uint8
    for name in ("faces", "homes", "labels", "severity"):
        assert read(directory, name).shape == (count,)


def test_images_match_their_labels_and_faces(built, fonts):
    directory, _ = built
    labels, faces, severity = (read(directory, name) for name in ("labels", "faces", "severity"))
    images = read(directory, "pictures")
    for face, path in enumerate(fonts.paths):
        name = fonts.faces[face].name
        for character in ("亜", REQUESTED[30]):
            rows = np.flatnonzero((faces == face) & (labels == REQUESTED.index(character)))
            assert len(rows) == 2
            clean = render(path, [character]).images
            for variant, row in enumerate(rows):
                expected = damage(clean, [image_generator(0, name, character, variant)])
                np.testing.assert_array_equal(images[row], expected.images[0])
                assert severity[row] == expected.severity[0]
            assert not np.array_equal(images[rows[0]], images[rows[1]])


def test_face_without_a_character_has_no_image_of_it(built):
    directory, _ = built
    faces, labels = read(directory, "faces"), read(directory, "labels")
    missing = labels == REQUESTED.index("专")
    assert 1 not in faces[missing]  # Cedar would draw a box
    assert missing.any()


def test_splits_go_by_family_and_character(built):
    directory, _ = built
    faces, labels, home = (read(directory, name) for name in ("faces", "labels", "homes"))
    assert ((home == UNSEEN_SPLIT) == (faces == 0)).all()  # Konatu is never trained on
    for face in (1, 2):
        for label in range(len(REQUESTED)):
            assert len(np.unique(home[(faces == face) & (labels == label)])) <= 1
    assert set(labels[home == 0]) == set(range(len(REQUESTED)))


def test_builds_are_reproducible(built, fonts, tmp_path):
    make_glyphs(tmp_path, fonts, REQUESTED, 1, 2)
    assert digests(tmp_path) == digests(built[0])


def test_interrupted_build_continues(built, fonts, tmp_path):
    absent = tmp_path / "absent" / fonts.paths[2].name
    with pytest.raises(ValueError, match="cannot be read as a font"):
        make_glyphs(tmp_path, fonts._replace(paths=[*fonts.paths[:2], absent]), REQUESTED, 1, 2)
    assert len(list(tmp_path.glob(f"{UNFINISHED}*"))) == 4  # two faces, two files each
    assert not (tmp_path / "pictures.npy").exists()
    # The first two are not drawn again: their fonts are gone.
    gone = [absent.with_name(path.name) for path in fonts.paths[:2]]
    make_glyphs(tmp_path, fonts._replace(paths=[*gone, fonts.paths[2]]), REQUESTED, 1, 2)
    assert digests(tmp_path) == digests(built[0])


def test_drawings_of_other_characters_are_not_reused(built, fonts, tmp_path):
    absent = tmp_path / "absent" / fonts.paths[1].name
    with pytest.raises(ValueError, match="cannot be read as a font"):
        make_glyphs(tmp_path, fonts._replace(paths=[fonts.paths[0], absent, absent]), REQUESTED[::-1], 1, 2)
    make_glyphs(tmp_path, fonts, REQUESTED, 1, 2)
    assert digests(tmp_path) == digests(built[0])


def test_images_are_independent_of_other_fonts(built, fonts, tmp_path):
    few = fonts._replace(faces=fonts.faces[2:], paths=fonts.paths[2:], packages=fonts.packages[2:])
    make_glyphs(tmp_path, few, REQUESTED, 1, 2)
    np.testing.assert_array_equal(read(tmp_path, "pictures"), read(built[0], "pictures")[read(built[0], "faces") == 2])


def test_characters_that_few_families_draw_are_left_out(fonts, tmp_path):
    make_glyphs(tmp_path, fonts, REQUESTED, 3, 1)
    assert json.loads((tmp_path / "glyphs.json").read_text(encoding="utf-8"))["characters"] == REQUESTED[:-1]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(ValueError, match="fonts must be at most 3, found 4: no character has more families"):
        make_glyphs(tmp_path, fonts, REQUESTED, 4, 1)


def test_characters_that_no_font_draws_are_noted(fonts, tmp_path):
    summary = make_glyphs(tmp_path, fonts, ["亜", "位", "\U0002a6d0"], 1, 1)
    assert summary.notes[-1] == "1 of 3 characters are left out: no font draws them"


CHARACTERS = candidates("jis1")[:300]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What `hetxl data build glyphs` makes, of three fonts and 300 characters; with two variants too."""
    for name in PACKAGES_USED:
        needs_debian(name)
    directory = cache_with_packages(tmp_path_factory.mktemp("cache"))
    fonts = fetch_fonts(store.packages_directory(directory), PACKAGES_USED, least=3)
    for variants in (1, 2):
        options = {"characters": "jis1", "variants": variants}
        store.build(
            "glyphs", options, directory, lambda to, n=variants: make_glyphs(to, fonts, CHARACTERS, 1, n), VERSION
        )
    return directory


@pytest.fixture
def load(cache):
    return lambda **options: load_glyphs(**({"cache": cache} | options))


def everything(split):
    return split.fetch(np.arange(len(split))).inputs


def test_dataset_has_classes_and_splits(load):
    dataset = load()
    assert (dataset.name, dataset.num_classes, dataset.multi_label) == ("glyphs", 300, False)
    assert list(dataset.class_names) == CHARACTERS
    assert (dataset.input.kind, dataset.input.shape) == ("image", (1, 32, 32))
    assert sum(map(len, dataset.splits.values())) == 600  # Konatu is never trained on
    assert len(dataset.splits["train"]) / 600 == pytest.approx(0.8, abs=0.06)
    assert not any(split.workers for split in dataset.splits.values())
    assert sorted(set(dataset.splits["train"].labels.ids)) == list(range(300))


def test_splits_share_no_family_and_character(load):
    for options in ({}, {"variants": 2}, {"unseen": True}):
        pairs = [set(zip(part.faces, part.labels.ids, strict=True)) for part in load(**options).splits.values()]
        assert not pairs[0] & pairs[1]
        assert not pairs[0] & pairs[2]
        assert not pairs[1] & pairs[2]


def test_unseen_families_are_the_test_split(load):
    usual, other = load(), load(unseen=True)
    split = other.splits["test"]
    assert {split.names[face] for face in split.faces} == {"Konatu"}
    assert split.labels.ids.tolist() == list(range(300))
    assert "Konatu" not in {name for part in usual.splits.values() for name in np.array(part.names)[part.faces]}
    for name in ("train", "validation"):
        assert torch.equal(everything(usual.splits[name]), everything(other.splits[name]))
    assert any("test: all images of the typefaces never trained on" in note for note in other.notes)


def test_images_are_normalised(load):
    split = load().splits["train"]
    rows = np.array([7, 0, 7])
    fetched = split.fetch(rows)
    assert fetched.inputs.shape == (3, 1, 32, 32)
    assert fetched.inputs.dtype == torch.float32
    np.testing.assert_array_equal(fetched.rows, rows)
    expected = np.stack([split.show(int(row)).pixels for row in rows]).astype(np.float32) / 127.5 - 1
    np.testing.assert_allclose(fetched.inputs[:, 0], expected, atol=1e-6)
    assert everything(split).min() == -1
    assert everything(split).max() == 1
    assert split.fetch(np.empty(0, dtype=np.int64)).inputs.shape == (0, 1, 32, 32)


def test_training_images_are_moved_by_their_seeds(load):
    split = load().splits["train"]
    rows, seeds = np.arange(40), 10**15 + 17 * np.arange(40)
    moved, still = split.fetch(rows, seeds).inputs, split.fetch(rows).inputs
    assert torch.equal(moved, split.fetch(rows, seeds).inputs)
    assert torch.equal(moved[3:4], split.fetch(rows[3:4], seeds[3:4]).inputs)
    assert not torch.equal(moved, split.fetch(rows, seeds + 1).inputs)
    for image, before, (down, right) in zip(moved, still, offsets(seeds).tolist(), strict=True):
        inner = torch.roll(before, (down, right), (1, 2))[:, 2:-2, 2:-2]
        assert torch.equal(image[:, 2:-2, 2:-2], inner)
    both, counts = np.unique(offsets(np.arange(-5000, 5000)), axis=0, return_counts=True)
    assert both.tolist() == [[down, right] for down in range(-2, 3) for right in range(-2, 3)]
    assert counts.min() > 300


def test_an_example_is_shown_as_its_image(load):
    split = load(unseen=True).splits["test"]
    shown = split.show(5)
    assert shown.text == f"{CHARACTERS[5]} Konatu"
    assert shown.image is None
    assert shown.pixels.shape == (32, 32)
    assert shown.pixels.dtype == np.uint8


def test_severity_is_known_for_each_image(load):
    split = load(unseen=True).splits["test"]
    assert split.severity.shape == (300,)
    clean = everything(split)[np.argsort(split.severity)[:100]]
    noise = (clean - clean.round()).abs().mean()  # of clean images most pixels are black or white
    assert noise < 0.1


def test_clean_half_is_recognised_and_severe_tenth_is_not(load):
    split = load(unseen=True).splits["test"]
    path = next(needs_debian("fonts-konatu").root.rglob("Konatu.ttf"))
    clean = torch.from_numpy(255 - render(path, CHARACTERS).images).flatten(1).double()
    seen = everything(split).flatten(1).double()

    def unit(rows):
        rows = rows - rows.mean(1, keepdim=True)
        return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)

    predicted = (unit(seen) @ unit(clean).T).argmax(1).numpy()  # the most alike, of one typeface that is known
    right = (predicted == split.labels.ids)[np.argsort(split.severity)]
    assert right[:150].all()
    assert right[150:270].mean() > 0.8
    assert right[270:].mean() < 0.6


def test_variants_are_more_images_of_the_same(load):
    single, double = load().splits["train"], load(variants=2).splits["train"]
    assert len(double) == 2 * len(single)
    np.testing.assert_array_equal(double.labels.ids[::2], single.labels.ids)
    assert torch.equal(everything(double)[::2], everything(single))
    assert not torch.equal(everything(double)[1::2], everything(single))


def test_limit_samples_training_rows(load):
    whole, few, other = load(), load(limit=50), load(limit=50, seed=1)
    assert len(few.splits["train"]) == 50
    assert set(few.splits["train"].rows) < set(whole.splits["train"].rows)
    assert set(few.splits["train"].rows) != set(other.splits["train"].rows)
    assert len(load(limit=10**6).splits["train"]) == len(whole.splits["train"])
    assert len(few.splits["test"]) == len(whole.splits["test"])


def test_notes_have_sources_and_licences(load):
    notes = load().notes
    assert notes[0].startswith("sources: fonts-konatu 2")
    assert "fonts-konatu: MIT" in notes[1]
    assert "3 typefaces in 3 families; never trained on: Konatu" in notes
    assert any(note.startswith("drawn by Pillow") for note in notes)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({}, "hetxl data build glyphs"),
        ({"unseen": True, "seed": 3, "limit": 9}, "hetxl data build glyphs"),
        ({"characters": "jis", "variants": 3}, "hetxl data build glyphs:characters=jis,variants=3"),
        ({"characters": "common"}, "hetxl data build glyphs:characters=common"),
        ({"characters": "common", "fonts": 9}, "hetxl data build glyphs:characters=common,fonts=9"),
    ],
)
def test_missing_build_names_the_command(options, command, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        open_dataset("glyphs", cache=tmp_path, **options)
    assert str(error.value) == f"glyphs is not built on this machine; build it with: {command}"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"characters": "jis2"}, ValueError, "characters must be one of 'jis1', 'jis', 'common', found 'jis2'"),
        ({"variants": 0}, ValueError, "variants must be at least 1, found 0"),
        ({"variants": 1.5}, TypeError, "variants must be an integer"),
        ({"fonts": 9}, ValueError, "fonts=9 needs characters=common; leave it out for 'jis1'"),
        ({"characters": "common", "fonts": 21}, ValueError, "fonts must be at most 20, the number of font families"),
    ],
)
def test_wrong_options_raise(options, error, message, tmp_path):
    for function in (build_glyphs, load_glyphs):
        with pytest.raises(error, match=message):
            function(cache=tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unseen": "yes"}, TypeError, "unseen must be true or false, found 'yes'"),
        ({"limit": 0}, ValueError, "limit must be at least 1, found 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, found -1"),
    ],
)
def test_wrong_loading_options_raise(load, options, error, message):
    with pytest.raises(error, match=message):
        load(**options)


def test_existing_build_is_reused(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")  # nothing could be downloaded
    assert build_glyphs(cache=cache).is_dir()


def test_train_and_predict(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(cache))
    config = small(tmp_path / "run", data="glyphs", steps=2, width=8, depth=1, features=16, batch_size=32)
    run = train(config, console=QUIET)
    examples = json.loads((run.path / "examples.json").read_text(encoding="utf-8"))
    for name in ("most_certain", "least_certain", "most_wrong"):
        for entry in examples[name]:
            assert entry["image"].startswith("data:image/png;base64,")
            assert entry["label"] in entry["text"]
    # A image of a file is taken as those of the dataset are.
    split = open_dataset("glyphs").splits["test"]
    Image.fromarray(split.show(3).pixels).convert("RGB").save(tmp_path / "3.png")
    assert predict(run.path, str(tmp_path / "3.png"), tmp_path / "out.jsonl", device="cpu", console=QUIET) == 1
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["source"].endswith("3.png")
