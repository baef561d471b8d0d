"""Label noise: how much, where, to which classes, and that the list of flips tells the truth."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from PIL import Image

from hetxl_train.config import LABEL_NOISE
from hetxl_train.data import Dataset, InputSpec, Labels, open_dataset
from hetxl_train.data.images import ImageSplit
from hetxl_train.data.label_noise import (
    BLOCK,
    LabelNoise,
    NoisySplit,
    as_vectors,
    blocks,
    near_classes,
    with_label_noise,
)
from hetxl_train.data.synthetic import FeatureSplit
from hetxl_train.data.transforms import ImageTransform

CLASSES, ROWS = 12, 6000


def dataset_of(labels, features=None, classes=CLASSES):
    rng = np.random.default_rng(3)
    if features is None:
        features = torch.from_numpy(rng.standard_normal((len(labels), 4))).float()
    held = FeatureSplit(torch.zeros(5, 4), Labels(np.arange(5)))
    splits = {"train": FeatureSplit(features, labels), "validation": held, "test": held}
    return Dataset("made", InputSpec("features", (4,)), [str(n) for n in range(classes)], splits, notes=("first",))


@pytest.fixture(scope="module")
def single():
    """Twelve classes on a circle, so that each has two that are clearly nearest."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, CLASSES, ROWS)
    angle = 2 * np.pi * ids / CLASSES
    features = np.stack((np.cos(angle), np.sin(angle), angle * 0, angle * 0), 1) + rng.normal(0, 0.3, (ROWS, 4))
    return dataset_of(Labels(ids), torch.from_numpy(features).float())


@pytest.fixture(scope="module")
def multi():
    rng = np.random.default_rng(1)
    lists = [rng.permutation(CLASSES)[: rng.integers(0, 4)] for _ in range(ROWS)]
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in lists])))
    return dataset_of(Labels(np.concatenate(lists), offsets))


@pytest.mark.parametrize("kind", LABEL_NOISE)
@pytest.mark.parametrize("rate", [0.05, 0.4, 1.0])
def test_rate_is_met_and_only_training_labels_change(single, kind, rate):
    noisy = with_label_noise(single, kind, rate, seed=7)
    split = noisy.splits["train"]
    noise = split.noise
    assert len(noise) / ROWS == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / ROWS))
    changed = np.flatnonzero(split.labels.ids != single.splits["train"].labels.ids)
    assert changed.tolist() == noise.rows.tolist()
    assert single.splits["train"].labels.ids[changed].tolist() == noise.old.tolist()
    assert split.labels.ids[changed].tolist() == noise.new.tolist()
    assert noise.new.min() >= 0
    assert noise.new.max() < CLASSES
    assert noisy.splits["test"] is single.splits["test"]
    assert noisy.splits["validation"] is single.splits["validation"]
    rows = np.array([3, 1, 2])
    assert torch.equal(split.fetch(rows).inputs, single.splits["train"].fetch(rows).inputs)
    assert noisy.notes == (
        "first",
        f"label noise: {kind}, rate {rate:g}, seed 7: {len(noise):,} of 6,000 training rows ({len(noise) / ROWS:.1%}) "
        "have a wrong label; validation and test are clean",
    )


@pytest.mark.parametrize("kind", LABEL_NOISE)
def test_flips_depend_on_the_seed(single, kind):
    first, again, other = (with_label_noise(single, kind, 0.2, seed).splits["train"].noise for seed in (1, 1, 2))
    for name in ("rows", "old", "new"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.rows, other.rows)


def test_symmetric_noise_is_uniform_over_other_classes(single):
    noise = with_label_noise(single, "symmetric", 1.0).splits["train"].noise
    table = np.zeros((CLASSES, CLASSES))
    np.add.at(table, (noise.old, noise.new), 1)
    assert np.diag(table).sum() == 0
    off = table[~np.eye(CLASSES, dtype=bool)]
    expected = ROWS / (CLASSES * (CLASSES - 1))
    assert ((off - expected) ** 2 / expected).sum() < 190  # χ² of about 131 degrees of freedom


@pytest.mark.parametrize("kind", LABEL_NOISE[1:])
def test_labels_flip_to_near_classes_by_rank(single, kind):
    noise = with_label_noise(single, kind, 0.5).splits["train"].noise
    near = near_classes(single.splits["train"], single.input, CLASSES)
    rank = (near[noise.old] == noise.new[:, None]).argmax(1)
    assert (near[noise.old, rank] == noise.new).all()
    shares = np.bincount(rank, minlength=5) / len(noise)
    expected = (1 / np.arange(1, 6)) / (1 / np.arange(1, 6)).sum()
    assert shares == pytest.approx(expected, abs=0.04)
    # On the circle: fewer steps apart than at random, where it would be about 3.3.
    apart = np.abs(noise.old - noise.new)
    assert np.minimum(apart, CLASSES - apart).mean() < 2
    blind = with_label_noise(single, "symmetric", 0.5).splits["train"].noise
    apart = np.abs(blind.old - blind.new)
    assert np.minimum(apart, CLASSES - apart).mean() > 3


def test_feature_dependent_flips_depend_on_the_input(single):
    noise = with_label_noise(single, "feature-dependent", 0.3, seed=2).splits["train"].noise
    features = single.splits["train"].features.double().numpy()
    flipped = np.zeros(ROWS)
    flipped[noise.rows] = 1
    direction = np.linalg.lstsq(features - features.mean(0), flipped - flipped.mean(), rcond=None)[0]
    order = np.argsort(features @ direction)
    # A linear function parts rows that are rarely flipped from rows that mostly are.
    assert flipped[order[: ROWS // 5]].mean() < 0.1
    assert flipped[order[-ROWS // 5 :]].mean() > 0.6
    blind = with_label_noise(single, "confusable", 0.3, seed=2).splits["train"].noise
    flipped = np.isin(np.arange(ROWS), blind.rows)
    assert flipped[order[: ROWS // 5]].mean() == pytest.approx(0.3, abs=0.06)


def test_constant_inputs_flip_with_equal_probability(single):
    constant = dataset_of(single.splits["train"].labels, torch.ones(ROWS, 4))
    noise = with_label_noise(constant, "feature-dependent", 0.3).splits["train"].noise
    assert len(noise) / ROWS == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("kind", LABEL_NOISE)
def test_multi_label_rows_get_a_class_that_they_lack(multi, kind):
    clean = multi.splits["train"].labels
    split = with_label_noise(multi, kind, 0.5).splits["train"]
    labelled = np.flatnonzero(np.diff(clean.offsets))
    assert np.isin(split.noise.rows, labelled).all()
    assert len(split.noise) / len(labelled) == pytest.approx(0.5, abs=0.05)
    lists = (split.noise.rows.tolist(), split.noise.old.tolist(), split.noise.new.tolist())
    flips = {row: (old, new) for row, old, new in zip(*lists, strict=True)}
    for row in range(ROWS):
        before = set(clean.ids[clean.offsets[row] : clean.offsets[row + 1]].tolist())
        after = set(split.labels.ids[split.labels.offsets[row] : split.labels.offsets[row + 1]].tolist())
        old, new = flips.get(row, (None, None))
        assert after == (before if old is None else before - {old} | {new})
        assert old is None or (old in before and new not in before)
    # Any of the labels of a row may be the one.
    first = [
        old == clean.ids[clean.offsets[row]] for row, (old, _) in flips.items() if np.diff(clean.offsets)[row] == 3
    ]
    assert np.mean(first) == pytest.approx(1 / 3, abs=0.06)


@pytest.mark.parametrize("kind", LABEL_NOISE)
def test_rows_with_all_classes_keep_their_labels(kind):
    ids, counts = [0, 1, 2, 0, 1, 2, 2], [3, 1, 2, 1]
    labels = Labels(np.array(ids * 50), np.concatenate(([0], np.cumsum(counts * 50))))
    noise = with_label_noise(dataset_of(labels, classes=3), kind, 1.0).splits["train"].noise
    assert np.unique(noise.rows % 4).tolist() == [1, 2, 3]
    assert noise.new[noise.rows % 4 == 2].tolist() == [0] * 50


@pytest.mark.parametrize("kind", LABEL_NOISE)
def test_unlabelled_rows_stay_unlabelled(kind):
    ids = np.where(np.arange(600) % 3 == 0, -100, np.arange(600) % CLASSES)
    split = with_label_noise(dataset_of(Labels(ids)), kind, 1.0).splits["train"]
    assert (split.noise.rows % 3 != 0).all()
    assert len(split.noise) == 400
    assert (split.labels.ids[::3] == -100).all()


@pytest.mark.parametrize("kind", LABEL_NOISE)
def test_label_noise_on_tokens_has_its_rate(kind):
    dataset = open_dataset("pycode", classes=200, limit=4000)
    split = with_label_noise(dataset, kind, 0.2).splits["train"]
    assert len(split.noise) / 4000 == pytest.approx(0.2, abs=0.03)
    assert split.show(5) == dataset.splits["train"].show(5)


@pytest.mark.parametrize("kind", LABEL_NOISE)
def test_unreadable_images_do_not_stop_the_noise(tmp_path, kind):
    rng = np.random.default_rng(0)
    paths = [str(tmp_path / f"{number}.png") for number in range(24)]
    for path in paths:
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    (tmp_path / "3.png").write_bytes(b"no image")
    split = ImageSplit(paths, Labels(np.arange(24) % 3), transform=ImageTransform(8))
    dataset = Dataset("images", InputSpec("image", (3, 8, 8)), ["a", "b", "c"], {"train": split})
    noisy = with_label_noise(dataset, kind, 0.5).splits["train"]
    assert noisy.workers
    assert 4 <= len(noisy.noise) <= 20
    assert len(noisy.fetch(np.arange(5)).unreadable) == 1


def test_label_noise_round_trip(single, tmp_path):
    noise = with_label_noise(single, "confusable", 0.25, seed=4).splits["train"].noise
    noise.save(tmp_path / "noise.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["noise.npz"]
    loaded = LabelNoise.load(tmp_path / "noise.npz")
    assert (loaded.kind, loaded.rate, loaded.seed) == ("confusable", 0.25, 4)
    for name in ("rows", "old", "new"):
        assert np.array_equal(getattr(loaded, name), getattr(noise, name))
    again = NoisySplit(single.splits["train"], loaded)
    assert np.array_equal(again.labels.ids, with_label_noise(single, "confusable", 0.25, 4).splits["train"].labels.ids)


def test_files_without_label_noise_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz does not exist"):
        LabelNoise.load(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", rows=np.arange(3))
    np.save(tmp_path / "array.npy", np.arange(3))
    (tmp_path / "text.npz").write_text("no zip")
    for name in ("other.npz", "array.npy", "text.npz"):
        with pytest.raises(ValueError, match=f"{name} holds no label noise"):
            LabelNoise.load(tmp_path / name)
    noise = LabelNoise(np.arange(3), np.arange(3), np.arange(2), "symmetric", 0.1, 0)
    noise.save(tmp_path / "uneven.npz")
    with pytest.raises(ValueError, match=r"uneven\.npz must have rows, old and new of int64 \[m\], found int64 \[3\]"):
        LabelNoise.load(tmp_path / "uneven.npz")


def test_failed_write_leaves_no_file(single, tmp_path):
    noise = with_label_noise(single, "symmetric", 0.1).splits["train"].noise
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        noise.save(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("kind", "rate", "seed", "message"),
    [
        ("symetric", 0.1, 0, "kind must be one of 'symmetric', 'confusable', 'feature-dependent', found 'symetric'"),
        ("symmetric", 0, 0, "rate must be above 0 and at most 1, the share of labels to replace, found 0"),
        ("symmetric", 1.2, 0, "found 1.2"),
        ("symmetric", float("nan"), 0, "found nan"),
        ("symmetric", True, 0, "found True"),
        ("symmetric", 0.1, -1, "seed must be at least 0, found -1"),
    ],
)
def test_invalid_arguments_raise(single, kind, rate, seed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        with_label_noise(single, kind, rate, seed)


def test_data_without_two_training_classes_raises(single):
    with pytest.raises(ValueError, match="'made' has label noise already"):
        with_label_noise(with_label_noise(single, "symmetric", 0.1), "symmetric", 0.1)
    without = dataclasses.replace(single, splits={"test": single.splits["test"]})
    with pytest.raises(ValueError, match="label noise is for the training split; 'made' has only test"):
        with_label_noise(without, "symmetric", 0.1)
    alone = dataset_of(Labels(np.zeros(10, dtype=np.int64)), classes=1)
    with pytest.raises(ValueError, match="needs two classes or more, 'made' has 1"):
        with_label_noise(alone, "symmetric", 0.1)
    with pytest.raises(ValueError, match="confusable label noise needs training rows of two classes or more"):
        with_label_noise(dataset_of(Labels(np.zeros(10, dtype=np.int64)), classes=3), "confusable", 0.1)


def on_a_line(positions, each=20, spread=0.01, offset=0.0, seed=0):
    """Features [n, 3] around positions on a line, and their classes."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(len(positions)), each)
    rng.shuffle(ids)
    features = np.zeros((len(ids), 3))
    features[:, 0] = np.asarray(positions)[ids] + rng.normal(0, spread, len(ids))
    return torch.from_numpy(features + offset).float(), ids


def test_near_classes_of_features():
    features, ids = on_a_line([0, 1, 3, 7, 15])
    nearest = near_classes(FeatureSplit(features, Labels(ids)), InputSpec("features", (3,)), 5, 2)
    assert nearest.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1], [3, 2]]


def test_near_classes_ignore_a_common_offset():
    features, ids = on_a_line([0, 1, 3, 7, 15], offset=1000)
    nearest = near_classes(FeatureSplit(features, Labels(ids)), InputSpec("features", (3,)), 5, 2)
    assert nearest.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1], [3, 2]]


def test_near_classes_do_not_depend_on_blocks(monkeypatch):
    features, ids = on_a_line(np.random.default_rng(1).normal(size=30), each=7)
    split, spec = FeatureSplit(features, Labels(ids)), InputSpec("features", (3,))
    whole = near_classes(split, spec, 30)
    monkeypatch.setattr("hetxl_train.data.label_noise.BLOCK", 50)
    assert near_classes(split, spec, 30).tolist() == whole.tolist()
    means = np.stack([features.numpy()[ids == number].mean(0) for number in range(30)])
    distances = np.linalg.norm(means[:, None] - means, axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert whole.tolist() == distances.argsort(1)[:, :5].tolist()


def test_classes_without_rows_have_no_near_classes():
    features, ids = on_a_line([0, 1, 3])
    split = FeatureSplit(features, Labels(np.array([0, 2, 4])[ids]))
    nearest = near_classes(split, InputSpec("features", (3,)), 6, 5)
    assert nearest.tolist() == [[2, 4], [-1, -1], [0, 4], [-1, -1], [2, 0], [-1, -1]]
    alone = FeatureSplit(features, Labels(np.zeros(len(features), dtype=np.int64)))
    assert near_classes(alone, InputSpec("features", (3,)), 6).shape == (6, 0)


def test_near_classes_of_unlabelled_and_multi_label_rows():
    features, ids = on_a_line([0, 1, 3, 7])
    ids = np.where(np.arange(len(ids)) % 3 == 0, -100, ids)
    nearest = near_classes(FeatureSplit(features, Labels(ids)), InputSpec("features", (3,)), 4, 1)
    assert nearest.ravel().tolist() == [1, 0, 1, 2]
    # Class 4 is a second label of the rows of class 3.
    lists = [[3, 4] if label == 3 else [label] * int(label >= 0) for label in ids]
    flat = np.array([label for row in lists for label in row])
    labels = Labels(flat, np.concatenate(([0], np.cumsum([len(row) for row in lists]))))
    nearest = near_classes(FeatureSplit(features, labels), InputSpec("features", (3,)), 5, 1)
    assert nearest.ravel().tolist() == [1, 0, 1, 4, 3]


def windows(tokens, positions, context):
    """The tokens before some positions, and those there as classes."""
    before = tokens[positions[:, None] + np.arange(-context, 0)]
    return FeatureSplit(torch.from_numpy(before), Labels(tokens[positions]))


def test_near_classes_of_tokens(monkeypatch):
    # "dog" and "cat" follow "the" and "a", "runs" and "eats" follow "dog" and "cat"; "the" and "a" start.
    names = ["dog", "cat", "runs", "eats", "the", "a"]
    rng = np.random.default_rng(0)
    sentences = [[rng.integers(4, 6), rng.integers(0, 2), rng.integers(2, 4)] for _ in range(200)]
    tokens = np.array([token for words in sentences for token in (6, 7, *words)])
    split = windows(tokens, np.flatnonzero(tokens < 6), 2)
    nearest = near_classes(split, InputSpec("tokens", (2,), 8), 6, 1)
    assert [names[near] for near in nearest.ravel()] == ["cat", "dog", "eats", "runs", "a", "the"]
    monkeypatch.setattr("hetxl_train.data.label_noise.BLOCK", 20)
    assert near_classes(split, InputSpec("tokens", (2,), 8), 6, 1).tolist() == nearest.tolist()


def test_equally_near_tokens_keep_their_order():
    # Each class follows a token of its own: no two have anything in common.
    split = windows(np.array([4, 0, 5, 1, 6, 2, 7, 3]), np.array([1, 3, 5, 7]), 1)
    assert near_classes(split, InputSpec("tokens", (1,), 8), 4, 2).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]


def test_near_classes_of_images(tmp_path):
    shades = {"black": 0, "dark": 40, "light": 200, "white": 255}
    paths, ids = [], []
    rng = np.random.default_rng(0)
    for number, (name, shade) in enumerate(shades.items()):
        for copy in range(3):
            pixels = np.clip(rng.normal(shade, 10, (20, 20, 3)), 0, 255).astype(np.uint8)
            paths.append(str(tmp_path / f"{name}{copy}.png"))
            Image.fromarray(pixels).save(paths[-1])
            ids.append(number)
    (tmp_path / "dark0.png").write_bytes(b"no image")
    split = ImageSplit(paths, Labels(np.array(ids)), transform=ImageTransform(20))
    spec = InputSpec("image", (3, 20, 20))
    assert near_classes(split, spec, 4, 1).ravel().tolist() == [1, 0, 3, 2]


def test_images_per_class_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("hetxl_train.data.label_noise.IMAGES_PER_CLASS", 2)
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    split = ImageSplit(
        [str(tmp_path / "one.png")] * 20, Labels(np.repeat(np.arange(4), 5)), transform=ImageTransform(8)
    )
    read = []
    fetch = split.fetch
    monkeypatch.setattr(split, "fetch", lambda rows: read.extend(rows) or fetch(rows))
    near_classes(split, InputSpec("image", (3, 8, 8)), 4)
    assert np.bincount(np.array(read) // 5).tolist() == [2, 2, 2, 2]


def test_images_are_shrunk():
    assert as_vectors(torch.ones(2, 3, 40, 40)).shape == (2, 3 * 16 * 16)
    assert as_vectors(torch.ones(2, 3, 8, 8)).shape == (2, 3 * 8 * 8)
    assert as_vectors(torch.ones(2, 7)).dtype == torch.float64


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_blocks_cover_all_rows(rows):
    split = FeatureSplit(torch.arange(rows * 2).view(rows, 2).float(), Labels(np.zeros(rows, dtype=np.int64)))
    spec = InputSpec("features", (2, BLOCK // 100))  # of such large rows, few at a time
    read, inputs = zip(*blocks(split, spec, np.arange(rows), "reading"), strict=True)
    assert np.concatenate(read).tolist() == list(range(rows))
    assert torch.equal(torch.cat(inputs), split.features)
    assert max(map(len, read)) <= 50
