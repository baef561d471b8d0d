"""Icons: names and categories, drawing, files, and a slice of every font built from the real package."""

import json
import shutil

import numpy as np
import pytest
import torch

from hetxl_lab.build.packages import Package
from hetxl_lab.build.store import build_dataset
from hetxl_lab.datasets.glyph_images import SIZE, open_font
from hetxl_lab.datasets.icons import (
    DESIGNS,
    FAMILIES,
    FONTS,
    OTHER,
    build_icons,
    categories_of,
    draw_icon,
    load_icons,
    make_icons,
    shares_of,
    stem_of,
    words_of,
)
from hetxl_train.config import TrainConfig
from hetxl_train.data import open_dataset
from hetxl_train.data.open import open_data
from support.packages import cache_with_packages, needs_python


@pytest.mark.parametrize(
    ("name", "words", "stem"),
    [
        ("arrow-left-bold", "arrow left bold", "arrow left"),
        ("account_circle-outline", "account circle outline", "account circle"),
        ("24-hours-fill", "24 hours fill", "24 hours"),
        ("Bold", "bold", "bold"),
        ("format-bold", "format bold", "format"),
        ("line-thin", "line thin", "line"),
    ],
)
def test_names_are_split_into_words_and_stems(name, words, stem):
    assert words_of(name) == words
    assert stem_of(words) == stem


def test_categories_are_words_that_enough_names_share():
    names = [f"arrow {way}" for way in ("left", "right", "up", "down")] + ["arrow up bold", "go left", "go right"]
    names += ["left turn", "left foot", "left lane", "whale"]
    indices, known = categories_of(names, min_names=3)
    by_name = {name: known[index] for name, index in zip(names, indices, strict=True)}
    assert {by_name[name] for name in names[:5]} == {"arrow"}  # the first word goes before "left"
    assert by_name["go left"] == "left"  # two begin with "go": too few
    assert by_name["left foot"] == "left"
    assert by_name["whale"] == OTHER
    assert indices.dtype == np.int64


def test_repeated_names_count_once():
    indices, known = categories_of(["bell"] * 9 + ["bell bold"] * 9, min_names=2)
    assert [known[index] for index in indices] == [OTHER] * 18
    assert categories_of([], min_names=2)[0].shape == (0,)


def test_seven_families_of_six_designs():
    assert len(FAMILIES) == 7
    assert len(DESIGNS) == 6
    assert sum(len(family.fonts) for family in FAMILIES) == 12


def test_shares_are_equal_for_one_stem_or_one_image_of_a_design():
    images = np.arange(6)[:, None, None] * np.ones((6, 2, 2), dtype=np.uint8)
    images[3] = images[0]
    names = ["bell", "bell bold", "whale", "alarm", "bell", "alarm thin"]
    shares = shares_of(images, names, ["a", "a", "a", "a", "b", "a"])
    assert shares[0] == shares[1]  # of one stem
    assert shares[0] == shares[3]  # of one image
    assert shares[3] == shares[5]  # and so of all that these are one with
    assert len({shares[0], shares[2], shares[4]}) == 3
    assert ((shares >= 0) & (shares < 1)).all()
    # What comes later changes nothing.
    assert np.array_equal(shares_of(images[:3], names[:3], ["a"] * 3), shares[:3])


def test_wide_icons_are_scaled_down_and_centred():
    package = needs_python("qtawesome")
    (path,) = (package.root / FONTS).glob("fontawesome6-solid-webfont-6*.ttf")
    (table,) = (package.root / FONTS).glob("fontawesome6-solid-webfont-charmap-*.json")
    points = json.loads(table.read_text())
    font = open_font(path)
    for name in ("wifi", "person-walking-luggage", "train-subway", "hand"):
        image = draw_icon(font, chr(int(points[name], 16)))
        assert image.shape == (SIZE, SIZE)
        assert image.dtype == np.uint8
        rows, columns = (np.flatnonzero(image.any(axis)) for axis in (1, 0))
        for inked in (rows, columns):
            assert inked[0] >= 1
            assert inked[-1] <= SIZE - 2
            assert abs(inked[0] - (SIZE - 1 - inked[-1])) <= 1


def test_names_that_a_font_does_not_draw_are_left_out(tmp_path):
    package = needs_python("qtawesome")
    (tmp_path / FONTS).parent.mkdir()
    shutil.copytree(package.root / FONTS, tmp_path / FONTS)
    (table,) = (tmp_path / FONTS).glob("codicon-charmap-*.json")
    points = json.loads(table.read_text())
    table.write_text(json.dumps({"a": points["add"], "b": "0x3042", "c": "0xffff", "d": points["bell"]}))
    summary = make_icons(tmp_path / "made", package._replace(root=tmp_path), each=4)
    assert json.loads((tmp_path / "made" / "names.json").read_text())[:2] == ["a", "d"]
    assert any("2 names without a drawing" in note for note in summary.notes)


def test_interrupted_build_continues_with_the_next_font(tmp_path, monkeypatch):
    package = needs_python("qtawesome")
    drawn = []

    def stops(font, character):
        drawn.append(character)
        if len(drawn) == 25:
            raise KeyboardInterrupt
        return draw_icon(font, character)

    monkeypatch.setattr("hetxl_lab.datasets.icons.draw_icon", stops)
    with pytest.raises(KeyboardInterrupt):
        make_icons(tmp_path, package, each=10)
    summary = make_icons(tmp_path, package, each=10)
    assert len(drawn) == 25 + 12 * 11 - 2 * 11  # two fonts were done; each also draws its sign for what it has not
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "families.npy", "names.json", "pictures.npy", "shares.npy",
    ]  # fmt: skip
    assert any("CC-BY-4.0" in note for note in summary.notes)


def test_package_without_the_fonts_raises(tmp_path):
    package = Package("qtawesome", "9.9", "0", "a licence", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"qtawesome 9\.9 has 0 files codicon-charmap-VERSION\.json"):
        make_icons(tmp_path, package, each=2)
    (tmp_path / FONTS).mkdir(parents=True)
    (tmp_path / FONTS / "codicon-charmap-1.0.json").write_text('{"add": "xyz"}')
    with pytest.raises(ValueError, match=r"codicon-charmap-1\.0\.json is not a table of names and code points"):
        make_icons(tmp_path, package, each=2)


EACH = 60


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    needs_python("qtawesome")
    cache = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_icons(each=EACH, cache=cache)
    return cache


def test_test_split_is_the_held_out_design(cache):
    dataset = load_icons(each=EACH, cache=cache)
    assert dataset.input.shape == (1, 32, 32)
    designs = {
        name: {FAMILIES[number].design for number in split.families.tolist()} for name, split in dataset.splits.items()
    }
    assert designs["test"] == {"remix"}
    assert "remix" not in designs["train"] | designs["validation"]
    assert len(designs["train"]) == 5
    rows = {name: len(split) for name, split in dataset.splits.items()}
    assert EACH - 5 < rows["test"] <= EACH  # but for repeated drawings
    assert 0.02 < rows["validation"] / (rows["train"] + rows["validation"]) < 0.25
    assert any("never trained on: the design remix" in note for note in dataset.notes)
    assert any("licences of the fonts: Codicons: CC-BY-4.0" in note for note in dataset.notes)


def test_no_image_and_no_stem_of_a_design_is_in_train_and_validation(cache):
    dataset = load_icons(each=EACH, cache=cache)
    contents = {}
    for name in ("train", "validation"):
        split = dataset.splits[name]
        images = split.fetch(np.arange(len(split))).inputs.numpy()
        keys = {(FAMILIES[int(split.families[row])].design, stem_of(split.name(row))) for row in range(len(split))}
        contents[name] = ({image.tobytes() for image in images}, keys)
    assert not contents["train"][0] & contents["validation"][0]
    assert not contents["train"][1] & contents["validation"][1]


def test_images_are_black_on_white_and_moved_by_seeds(cache):
    split = load_icons(each=EACH, cache=cache).splits["train"]
    rows = np.array([3, 0])
    plain, moved, again = (split.fetch(rows, seeds).inputs for seeds in (None, rows + 5, rows + 5))
    assert plain.shape == (2, 1, 32, 32)
    assert plain.dtype == torch.float32
    assert plain.max() == 1
    assert plain.min() < -0.5
    assert plain.mean() > 0  # more paper than ink
    assert torch.equal(moved, again)
    assert not torch.equal(moved, plain)
    shown = split.show(3)
    assert shown.pixels.shape == (32, 32)
    assert split.name(3) in shown.text


def test_category_labels_leave_out_other(cache):
    names, dataset = (load_icons(each=EACH, labels=labels, cache=cache) for labels in ("names", "categories"))
    assert OTHER not in dataset.class_names
    assert 1 < dataset.num_classes < names.num_classes / 8
    assert any("categories are in no training pair" in note for note in dataset.notes)
    by_name = dict(zip(names.class_names, categories_of(names.class_names)[0], strict=True))
    known = categories_of(names.class_names)[1]
    for part, split in dataset.splits.items():
        whole = names.splits[part]
        categories = [known[by_name[whole.name(row)]] for row in range(len(whole))]
        assert [dataset.class_names[label] for label in split.labels.ids] == [
            name for name in categories if name != OTHER
        ]
        assert set(split.rows) <= set(whole.rows)
    train = dataset.splits["train"]
    assert dataset.class_names[train.labels.ids[0]] in train.name(0).split()
    assert train.name(0) in train.show(0).text  # the name, not the category


def test_another_design_can_be_held_out(cache):
    dataset = load_icons(each=EACH, held_out="material", cache=cache)
    families = {FAMILIES[number].name for number in dataset.splits["test"].families.tolist()}
    assert families == {"material5", "material6"}


def test_limit_samples_training_rows(cache):
    first, again, other = (
        load_icons(each=EACH, limit=50, seed=seed, cache=cache).splits["train"].rows for seed in (0, 0, 1)
    )
    assert len(first) == 50
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_icons_open_by_name(cache, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(cache))
    outcome = build_dataset(f"icons:each={EACH},held_out=codicon")
    assert not outcome.rebuilt
    assert "licence of qtawesome: MIT" in "\n".join(outcome.lines())
    assert open_dataset("icons", each=EACH).name == "icons"


def test_names_are_not_for_training_and_categories_are(cache, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(cache))
    with pytest.raises(ValueError, match="use icons:labels=categories, or the pairs: hetxl contrastive train icons"):
        open_data(TrainConfig(data=f"icons:each={EACH}"))
    assert open_data(TrainConfig(data=f"icons:each={EACH},labels=categories")).not_for_training is None


def test_missing_build_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"icons is not built on this machine; .*: hetxl data build icons$"):
        load_icons(cache=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": "material5"}, "held_out must be one of 'codicon'.*found 'material5'; did you mean 'material'"),
        ({"labels": "words"}, "labels must be one of 'names', 'categories', found 'words'"),
        ({"each": 0}, "each must be at least 1, found 0"),
        ({"limit": 0}, "limit must be at least 1, found 0"),
    ],
)
def test_wrong_options_raise(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_icons(cache=tmp_path, **options)
