"""Pairs from icons, directories, manifests and arrays, and swapped texts."""

import csv
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from hetxl_lab.datasets.icons import build_icons
from hetxl_train.data.pairs import PairSplit, Swaps, Texts, open_pairs, read_pairs, swapped
from hetxl_train.data.transforms import ImageTransform
from support.packages import cache_with_packages, needs_python
from support.pairs import image_folder, vectors_file


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    needs_python("qtawesome")
    cache = cache_with_packages(tmp_path_factory.mktemp("cache"))
    build_icons(each=30, cache=cache)
    return cache


def test_icons_are_pairs_of_an_image_and_its_name(icons):
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


def test_options_of_icons_are_applied_and_checked(icons):
    chosen = open_pairs("icons:each=30,held_out=phosphor,limit=40", cache=icons)
    assert len(chosen.splits["train"]) == 40
    with pytest.raises(TypeError, match="'icons' has no option 'hold', only held_out"):
        open_pairs("icons:hold=phosphor", cache=icons)


def test_groups_are_equal_texts():
    texts = Texts(captions=["bell", "whale", "bell"])
    assert texts.groups.tolist() == [0, 1, 0]
    vectors = Texts(vectors=np.array([[1.0, 2], [3, 4], [1, 2]]))
    assert vectors.groups.tolist() == [0, 1, 0]
    assert vectors.take(np.array([1])).tolist() == [[3.0, 4.0]]
    with pytest.raises(ValueError, match="captions but no vectors"):
        texts.take(np.array([0]))
    with pytest.raises(ValueError, match="captions or vectors, found neither"):
        Texts()


def test_splits_are_drawn_by_text_and_seed(tmp_path):
    path = vectors_file(tmp_path / "x.npz", captions=[f"text {row // 2}" for row in range(80)])  # each twice
    first, again, other = (open_pairs(path, seed=seed) for seed in (0, 0, 1))
    rows = {name: set(split.captions()) for name, split in first.splits.items()}
    assert not rows["train"] & rows["test"]
    assert not rows["validation"] & rows["test"]
    assert sum(len(split) for split in first.splits.values()) == 80
    assert len(first.splits["test"]) == 8
    assert first.splits["test"].captions() == again.splits["test"].captions()
    assert first.splits["test"].captions() != other.splits["test"].captions()
    assert "by text, drawn with seed 0" in first.notes[-1]


def test_pairs_keep_their_images(tmp_path):
    path = vectors_file(tmp_path / "x.npz", captions=True)
    images = np.load(path)["images"]
    for split in open_pairs(path).splits.values():
        numbers = [int(caption.split()[1]) for caption in split.captions() or ()]
        inputs = split.images.fetch(np.arange(len(split))).inputs.numpy()
        assert np.array_equal(inputs, images[numbers])


def test_whole_data_is_one_test_split(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz"), whole=True)
    assert list(pairs.splits) == ["test"]
    assert len(pairs.splits["test"]) == 80


def test_bad_pairs_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="nor an existing path"):
        open_pairs(tmp_path / "nothing")
    with pytest.raises(TypeError, match="has no option 'limit'"):
        open_pairs(vectors_file(tmp_path / "x.npz"), limit=3)
    split = open_pairs(tmp_path / "x.npz").splits["test"]
    with pytest.raises(ValueError, match="sources must have one entry for each of 8 pairs, found 3"):
        PairSplit(split.images, split.texts, np.arange(3))
    few = vectors_file(tmp_path / "few.npz", count=2)
    with pytest.raises(ValueError, match="few has 2 distinct texts, too few to split"):
        open_pairs(few)


def test_directory_of_images_and_captions(tmp_path):
    root = image_folder(tmp_path / "shapes")
    (root / "red-small-0.txt").unlink()
    (root / "red-small-1.txt").write_text("  \n")
    pairs = read_pairs(root, transform=ImageTransform(16))
    assert pairs.name == "shapes"
    assert pairs.image.shape == (3, 16, 16)
    assert sum(len(split) for split in pairs.splits.values()) == 22
    assert "left out images without a caption: 2" in pairs.notes[0]
    for split in pairs.splits.values():
        for row in range(len(split)):
            colour, size, number = split.images.show(row).image.rsplit("/", 1)[1].split(".")[0].split("-")
            assert split.caption(row) == f"a {size} {colour} square number {number}"
    assert pairs.splits["train"].images.fetch(np.array([0])).inputs.shape == (1, 3, 16, 16)


def test_split_directories_are_read(tmp_path):
    for name, each in (("train", 3), ("val", 1), ("test", 2)):
        image_folder(tmp_path / "shapes" / name, each=each)
    pairs = read_pairs(tmp_path / "shapes")
    assert {name: len(split) for name, split in pairs.splits.items()} == {"train": 18, "validation": 6, "test": 12}
    image_folder(tmp_path / "shapes", each=1)
    with pytest.raises(ValueError, match="has images outside of its split directories"):
        read_pairs(tmp_path / "shapes")


def test_directory_without_captions_raises(tmp_path):
    root = image_folder(tmp_path / "shapes", each=1)
    for path in root.glob("*.txt"):
        path.unlink()
    with pytest.raises(ValueError, match=r"6 images but no captions; put NAME\.txt beside each"):
        read_pairs(root)
    (root / "blue-large-0.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"blue-large-0\.txt is not UTF-8 text"):
        read_pairs(root)


def write_manifest(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_manifest_of_pairs_is_read(tmp_path, suffix):
    root = image_folder(tmp_path / "shapes", each=2)
    rows = [
        {
            "image": f"shapes/{path.name}",
            "Caption": f"{path.stem},  quoted",
            "split": "val" if path.stem.endswith("1") else "train",
            "category": path.stem.split("-")[0] + " " * int(path.stem.endswith("1")),
        }
        for path in sorted(root.glob("*.png"))
    ]
    pairs = read_pairs(write_manifest(tmp_path / f"pairs{suffix}", rows))
    assert {name: len(split) for name, split in pairs.splits.items()} == {"train": 5, "validation": 6, "test": 1}
    split = pairs.splits["validation"]
    assert split.caption(0) == "blue-large-1, quoted"
    assert split.images.show(0).image.endswith("blue-large-1.png")
    assert split.categories.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Caption": ""}, r"row 1 \(counted from 1\) must have a caption, found ''"),
        ({"split": "other"}, r"row 1 \(counted from 1\) has the split 'other'"),
        ({"image": ""}, r"row 1 \(counted from 1\) must have a path"),
    ],
)
def test_bad_manifest_rows_raise(tmp_path, change, message):
    root = image_folder(tmp_path / "shapes", each=1)
    rows = [{"image": f"shapes/{path.name}", "Caption": "x", "split": "train"} for path in root.glob("*.png")]
    rows[0] |= change
    with pytest.raises(ValueError, match=message):
        read_pairs(write_manifest(tmp_path / "pairs.csv", rows))


def test_unknown_pair_files_raise(tmp_path):
    path = write_manifest(tmp_path / "a.csv", [{"image": "x.png", "other": 1}])
    with pytest.raises(ValueError, match=r"a\.csv must have a column caption or captions .*'image' .*, 'other'"):
        read_pairs(path)
    path = write_manifest(tmp_path / "b.csv", [{"caption": "x"}])
    with pytest.raises(ValueError, match=r"b\.csv must have a column of inputs"):
        read_pairs(path)
    path = write_manifest(tmp_path / "c.csv", [{"image": "gone.png", "caption": "x"}])
    with pytest.raises(FileNotFoundError, match="names files that do not exist"):
        read_pairs(path)
    (tmp_path / "d.doc").write_text("x")
    with pytest.raises(ValueError, match=r"d\.doc is not a known kind of pairs"):
        read_pairs(tmp_path / "d.doc")


def test_vectors_are_read_by_split(tmp_path):
    split = np.array(["train"] * 60 + ["test"] * 20)
    pairs = open_pairs(vectors_file(tmp_path / "x.npz", split=split))
    assert pairs.image.shape == pairs.text.shape == (6,)
    assert len(pairs.splits["test"]) == 20
    assert pairs.splits["test"].caption(0) is None
    content = dict(np.load(tmp_path / "x.npz"))
    test = pairs.splits["test"]
    assert np.array_equal(test.texts.take(test.sources), content["texts"][60:])
    save_file({name: content[name] for name in ("images", "texts")}, tmp_path / "x.safetensors")
    assert open_pairs(tmp_path / "x.safetensors").text.shape == (6,)


def test_vectors_of_images_with_captions(tmp_path):
    pairs = open_pairs(vectors_file(tmp_path / "x.npz", captions=True))
    assert pairs.text is None
    assert pairs.splits["train"].caption(0).startswith("number ")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"images": np.zeros((4, 2), np.float32)},
            r"must have the keys images and texts \(or captions\), found 'images'",
        ),
        (
            {"images": np.zeros((4, 2), np.float32), "texts": np.zeros((3, 2), np.float32)},
            "array 'texts' of .* has 3 rows, but 'images' has 4",
        ),
        (
            {"images": np.zeros((4, 2), np.int64), "texts": np.zeros((4, 2), np.float32)},
            r"array 'images' of .* must hold floating-point vectors \[n, D\], found int64",
        ),
        ({"images": np.full((4, 2), np.nan), "texts": np.zeros((4, 2))}, "NaN or infinite"),
        ({"images": np.zeros((4, 2)), "captions": np.arange(4)}, "array 'captions' of .* must be a list of strings"),
        ({"images": np.zeros((0, 2)), "texts": np.zeros((0, 2))}, "array 'images' of .* has no rows"),
    ],
)
def test_invalid_arrays_raise(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises((TypeError, ValueError), match=message):
        read_pairs(tmp_path / "x.npz")


@pytest.fixture
def pairs(tmp_path):
    rng = np.random.default_rng(1)
    category = rng.integers(0, 40, 400)  # some have few members
    category[0] = 77  # and one has a single one
    path = vectors_file(tmp_path / "x.npz", count=400, captions=True, category=category)
    return open_pairs(path, whole=True).splits["test"]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9])
def test_swaps_move_a_share_of_the_texts_and_lose_none(pairs, rate, within):
    noisy = swapped(pairs, rate, within, seed=3)
    assert abs(len(noisy.swaps) - rate * 400) <= (2 if rate < 0.9 else 8)
    before, after = pairs.captions(), noisy.captions()
    assert sorted(after) == sorted(before)
    changed = np.array([old != new for old, new in zip(before, after, strict=True)])
    assert np.array_equal(changed, noisy.swaps.mask(400))
    assert [before[source] for source in noisy.swaps.sources] == [after[row] for row in noisy.swaps.rows]
    if within:
        assert np.array_equal(pairs.categories[noisy.swaps.sources], pairs.categories[noisy.swaps.rows])
    elif rate:
        assert (pairs.categories[noisy.swaps.sources] != pairs.categories[noisy.swaps.rows]).mean() > 0.5
    assert pairs.swaps is None


def test_swaps_depend_on_the_seed(pairs):
    first, again, other = (swapped(pairs, 0.3, seed=seed).sources for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_equal_texts_do_not_count_as_swapped(tmp_path):
    path = vectors_file(tmp_path / "x.npz", count=100, captions=["same"] * 100)
    noisy = swapped(open_pairs(path, whole=True).splits["test"], 0.5)
    assert len(noisy.swaps) == 0


def test_swaps_round_trip(pairs, tmp_path):
    swaps = swapped(pairs, 0.3, within=True, seed=2).swaps
    swaps.save(tmp_path / "swaps.npz")
    loaded = Swaps.load(tmp_path / "swaps.npz")
    assert np.array_equal(loaded.rows, swaps.rows)
    assert np.array_equal(loaded.sources, swaps.sources)
    assert (loaded.rate, loaded.within, loaded.seed) == (0.3, True, 2)
    (tmp_path / "swaps.npz").write_bytes(b"not a file of swaps")
    with pytest.raises(ValueError, match=r"swaps\.npz holds no swaps"):
        Swaps.load(tmp_path / "swaps.npz")


def test_bad_swaps_raise(pairs, tmp_path):
    for rate in (-0.1, 1.1, True, "0.2"):
        with pytest.raises(ValueError, match="rate must be from 0 to 1"):
            swapped(pairs, rate)
    with pytest.raises(ValueError, match="pairs have swaps already"):
        swapped(swapped(pairs, 0.2), 0.2)
    plain = open_pairs(vectors_file(tmp_path / "y.npz"), whole=True).splits["test"]
    with pytest.raises(ValueError, match="within=True needs categories"):
        swapped(plain, 0.2, within=True)
