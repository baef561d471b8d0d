import numpy as np
import pytest

from hetxl.data.icons import build_icons
from hetxl.data.pairs import PairSplit, Texts, open_pairs
from support.packages import cache_with_packages, needs_python
from support.pairs import vectors_file


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    needs_python("qtawesome")
    cache = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_icons(each=30, cache=cache)
    return cache


def test_icons_are_pairs_of_a_picture_and_its_name(icons):
    pairs = open_pairs("icons:each=30", cache=icons)
    assert pairs.text is None
    assert set(pairs.splits) == {"train", "validation", "test"}
    split = pairs.splits["test"]
    assert split.images.show(4).text == f"{split.caption(4)} (Remix Icon)"
    assert split.captions()[4] == split.caption(4)
    assert split.categories.shape == (len(split),)
    assert np.array_equal(split.images.labels.ids, np.arange(len(split)))
    fetched = split.images.fetch(np.array([1, 0]))
    assert fetched.inputs.shape == (2, 1, 32, 32)


def test_options_of_icons(icons):
    found = open_pairs("icons:each=30,held_out=phosphor,limit=40", cache=icons)
    assert len(found.splits["train"]) == 40
    with pytest.raises(TypeError, match="'icons' has no option 'hold', only held_out"):
        open_pairs("icons:hold=phosphor", cache=icons)


def test_groups_are_equal_texts():
    texts = Texts(captions=["bell", "whale", "bell"])
    assert texts.groups.tolist() == [0, 1, 0]
    vectors = Texts(vectors=np.array([[1.0, 2], [3, 4], [1, 2]]))
    assert vectors.groups.tolist() == [0, 1, 0]
    assert vectors.take(np.array([1])).tolist() == [[3.0, 4.0]]
    with pytest.raises(ValueError, match="captions and no vectors"):
        texts.take(np.array([0]))
    with pytest.raises(ValueError, match="captions or vectors, found neither"):
        Texts()


def test_parts_by_text_and_seed(tmp_path):
    path = vectors_file(tmp_path / "x.npz", captions=[f"text {place // 2}" for place in range(80)])  # each twice
    first, again, other = (open_pairs(path, seed=seed) for seed in (0, 0, 1))
    rows = {name: set(split.captions()) for name, split in first.splits.items()}
    assert not rows["train"] & rows["test"]
    assert not rows["validation"] & rows["test"]
    assert sum(len(split) for split in first.splits.values()) == 80
    assert len(first.splits["test"]) == 8
    assert first.splits["test"].captions() == again.splits["test"].captions()
    assert first.splits["test"].captions() != other.splits["test"].captions()
    assert "by text, drawn with seed 0" in first.notes[-1]


def test_a_pair_keeps_its_picture(tmp_path):
    path = vectors_file(tmp_path / "x.npz", captions=True)
    images = np.load(path)["images"]
    for split in open_pairs(path).splits.values():
        numbers = [int(caption.split()[1]) for caption in split.captions() or ()]
        found = split.images.fetch(np.arange(len(split))).inputs.numpy()
        assert np.array_equal(found, images[numbers])


def test_whole(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz"), whole=True)
    assert list(pairs.splits) == ["test"]
    assert len(pairs.splits["test"]) == 80


def test_bad_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no file or folder, and not icons"):
        open_pairs(tmp_path / "nothing")
    with pytest.raises(ValueError, match="image_size must be at least 8, found 2"):
        open_pairs("icons", image_size=2)
    with pytest.raises(TypeError, match="has no option 'limit'"):
        open_pairs(vectors_file(tmp_path / "x.npz"), limit=3)
    split = open_pairs(tmp_path / "x.npz").splits["test"]
    with pytest.raises(ValueError, match="sources must have one entry for each of 8 pairs, found 3"):
        PairSplit(split.images, split.texts, np.arange(3))
    few = vectors_file(tmp_path / "few.npz", count=2)
    with pytest.raises(ValueError, match="few has 2 different texts, too few to part"):
        open_pairs(few)
