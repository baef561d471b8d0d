"""Icons: a slice of every font, built of the real package."""

import numpy as np
import pytest
import torch

from hetxl.data import open_dataset
from hetxl.data.build.run import build_dataset
from hetxl.data.icons import build_icons, load_icons
from hetxl.data.icons_files import FAMILIES
from hetxl.data.icons_names import OTHER, categories_of, stem_of
from support.packages import cache_with_packages, needs_python

EACH = 60


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    needs_python("qtawesome")
    cache = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_icons(each=EACH, cache=cache)
    return cache


def test_splits(cache):
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


def test_no_picture_and_no_stem_of_a_design_is_in_train_and_validation(cache):
    dataset = load_icons(each=EACH, cache=cache)
    found = {}
    for name in ("train", "validation"):
        split = dataset.splits[name]
        pictures = split.fetch(np.arange(len(split))).inputs.numpy()
        keys = {(FAMILIES[int(split.families[row])].design, stem_of(split.name(row))) for row in range(len(split))}
        found[name] = ({picture.tobytes() for picture in pictures}, keys)
    assert not found["train"][0] & found["validation"][0]
    assert not found["train"][1] & found["validation"][1]


def test_pictures_are_black_on_white_and_moved_by_seeds(cache):
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


def test_categories(cache):
    names, dataset = (load_icons(each=EACH, labels=labels, cache=cache) for labels in ("names", "categories"))
    assert OTHER not in dataset.class_names
    assert 1 < dataset.num_classes < names.num_classes / 8
    assert any("categories are in no training pair" in note for note in dataset.notes)
    by_name = dict(zip(names.class_names, categories_of(names.class_names)[0], strict=True))
    known = categories_of(names.class_names)[1]
    for part, split in dataset.splits.items():
        whole = names.splits[part]
        told = [known[by_name[whole.name(row)]] for row in range(len(whole))]
        assert [dataset.class_names[one] for one in split.labels.ids] == [name for name in told if name != OTHER]
        assert set(split.rows) <= set(whole.rows)
    train = dataset.splits["train"]
    assert dataset.class_names[train.labels.ids[0]] in train.name(0).split()
    assert train.name(0) in train.show(0).text  # the name, not the category


def test_another_design_can_be_held_out(cache):
    dataset = load_icons(each=EACH, held_out="material", cache=cache)
    families = {FAMILIES[number].name for number in dataset.splits["test"].families.tolist()}
    assert families == {"material5", "material6"}


def test_limit_draws_training_rows(cache):
    first, again, other = (
        load_icons(each=EACH, limit=50, seed=seed, cache=cache).splits["train"].rows for seed in (0, 0, 1)
    )
    assert len(first) == 50
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_by_name(cache, monkeypatch):
    monkeypatch.setenv("HETXL_CACHE", str(cache))
    outcome = build_dataset(f"icons:each={EACH},held_out=codicon")
    assert not outcome.made
    assert "licence of qtawesome: MIT" in "\n".join(outcome.lines())
    assert open_dataset("icons", each=EACH).name == "icons"


def test_what_is_not_built_says_how(tmp_path):
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
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_icons(cache=tmp_path, **options)
