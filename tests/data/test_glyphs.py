"""The dataset of characters, for real on three small fonts: splits, pictures, options, and a training on it."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from hetxl.data import open_dataset
from hetxl.data.build import build, packages_folder
from hetxl.data.glyph_files import make_glyphs
from hetxl.data.glyph_fonts import fetch_fonts
from hetxl.data.glyph_render import render
from hetxl.data.glyph_sets import candidates
from hetxl.data.glyphs import VERSION, build_glyphs, load_glyphs, offsets
from hetxl.training.predict import predict
from hetxl.training.train import train
from support.packages import cache_with_packages, needs_debian
from support.training import QUIET, small

PACKAGES = ("fonts-konatu", "fonts-motoya-l-cedar", "fonts-seto")
CHARACTERS = candidates("jis1")[:300]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What `hetxl data build glyphs` makes, of three fonts and 300 characters; with two variants too."""
    for name in PACKAGES:
        needs_debian(name)
    folder = cache_with_packages(tmp_path_factory.mktemp("cache"))
    fonts = fetch_fonts(packages_folder(folder), PACKAGES, least=3)
    for variants in (1, 2):
        options = {"characters": "jis1", "variants": variants}
        build("glyphs", options, folder, lambda to, n=variants: make_glyphs(to, fonts, CHARACTERS, 1, n), VERSION)
    return folder


@pytest.fixture
def load(cache):
    return lambda **options: load_glyphs(**({"cache": cache} | options))


def everything(split):
    return split.fetch(np.arange(len(split))).inputs


def test_the_dataset(load):
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
    assert any("test: all pictures of the typefaces never trained on" in note for note in other.notes)


def test_pictures_are_normalised(load):
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


def test_training_pictures_are_moved_by_their_seeds(load):
    split = load().splits["train"]
    rows, seeds = np.arange(40), 10**15 + 17 * np.arange(40)
    moved, still = split.fetch(rows, seeds).inputs, split.fetch(rows).inputs
    assert torch.equal(moved, split.fetch(rows, seeds).inputs)
    assert torch.equal(moved[3:4], split.fetch(rows[3:4], seeds[3:4]).inputs)
    assert not torch.equal(moved, split.fetch(rows, seeds + 1).inputs)
    for picture, before, (down, right) in zip(moved, still, offsets(seeds).tolist(), strict=True):
        inner = torch.roll(before, (down, right), (1, 2))[:, 2:-2, 2:-2]
        assert torch.equal(picture[:, 2:-2, 2:-2], inner)
    both, counts = np.unique(offsets(np.arange(-5000, 5000)), axis=0, return_counts=True)
    assert both.tolist() == [[down, right] for down in range(-2, 3) for right in range(-2, 3)]
    assert counts.min() > 300


def test_an_example_is_shown_as_its_picture(load):
    split = load(unseen=True).splits["test"]
    shown = split.show(5)
    assert shown.text == f"{CHARACTERS[5]} Konatu"
    assert shown.image is None
    assert shown.pixels.shape == (32, 32)
    assert shown.pixels.dtype == np.uint8


def test_severity_is_known_for_each_picture(load):
    split = load(unseen=True).splits["test"]
    assert split.severity.shape == (300,)
    clean = everything(split)[np.argsort(split.severity)[:100]]
    noise = (clean - clean.round()).abs().mean()  # of clean pictures most pixels are black or white
    assert noise < 0.1


def test_the_clean_half_can_be_told_and_the_severe_tenth_cannot(load):
    split = load(unseen=True).splits["test"]
    path = next(needs_debian("fonts-konatu").root.rglob("Konatu.ttf"))
    clean = torch.from_numpy(255 - render(path, CHARACTERS).pictures).flatten(1).double()
    seen = everything(split).flatten(1).double()

    def unit(rows):
        rows = rows - rows.mean(1, keepdim=True)
        return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)

    found = (unit(seen) @ unit(clean).T).argmax(1).numpy()  # the most alike, of one typeface that is known
    right = (found == split.labels.ids)[np.argsort(split.severity)]
    assert right[:150].all()
    assert right[150:270].mean() > 0.8
    assert right[270:].mean() < 0.6


def test_variants_are_more_pictures_of_the_same(load):
    one, two = load().splits["train"], load(variants=2).splits["train"]
    assert len(two) == 2 * len(one)
    np.testing.assert_array_equal(two.labels.ids[::2], one.labels.ids)
    assert torch.equal(everything(two)[::2], everything(one))
    assert not torch.equal(everything(two)[1::2], everything(one))


def test_limit_keeps_training_rows_at_random(load):
    whole, few, other = load(), load(limit=50), load(limit=50, seed=1)
    assert len(few.splits["train"]) == 50
    assert set(few.splits["train"].rows) < set(whole.splits["train"].rows)
    assert set(few.splits["train"].rows) != set(other.splits["train"].rows)
    assert len(load(limit=10**6).splits["train"]) == len(whole.splits["train"])
    assert len(few.splits["test"]) == len(whole.splits["test"])


def test_notes_tell_sources_and_licences(load):
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
def test_what_is_not_built_says_how(options, command, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        open_dataset("glyphs", cache=tmp_path, **options)
    assert str(error.value) == f"glyphs is not built on this machine; build it with: {command}"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"characters": "jis2"}, ValueError, "characters must be one of 'jis1', 'jis', 'common', found 'jis2'"),
        ({"variants": 0}, ValueError, "variants must be at least 1, found 0"),
        ({"variants": 1.5}, TypeError, "variants must be an integer"),
        ({"fonts": 9}, ValueError, "fonts=9 goes with characters=common; leave it out for 'jis1'"),
        ({"characters": "common", "fonts": 21}, ValueError, "fonts must be at most 20, the families of typefaces"),
    ],
)
def test_bad_options(options, error, message, tmp_path):
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
def test_bad_options_of_loading(load, options, error, message):
    with pytest.raises(error, match=message):
        load(**options)


def test_what_is_there_is_not_built_again(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")  # nothing could be downloaded
    assert build_glyphs(cache=cache).is_dir()


def test_train_and_predict(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(cache))
    config = small(tmp_path / "run", data="glyphs", steps=2, width=8, depth=1, features=16, batch_size=32)
    run = train(config, narrator=QUIET)
    found = json.loads((run.path / "examples.json").read_text(encoding="utf-8"))
    for entries in found.values():
        for entry in entries:
            assert entry["image"].startswith("data:image/png;base64,")
            assert entry["label"] in entry["text"]
    # A picture of a file is taken as those of the dataset are.
    split = open_dataset("glyphs").splits["test"]
    Image.fromarray(split.show(3).pixels).convert("RGB").save(tmp_path / "3.png")
    assert predict(run.path, str(tmp_path / "3.png"), tmp_path / "out.jsonl", device="cpu", narrator=QUIET) == 1
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["source"].endswith("3.png")
