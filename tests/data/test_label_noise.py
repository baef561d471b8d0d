"""Label noise: how much, where, to which classes, and that the list of flips tells the truth."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from PIL import Image

from hetxl.data import Dataset, InputSpec, Labels, open_dataset
from hetxl.data.images import ImageSplit
from hetxl.data.label_noise import KINDS, LabelNoise, NoisySplit, with_label_noise
from hetxl.data.near_classes import near_classes
from hetxl.data.synthetic import FeatureSplit

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.05, 0.4, 1.0])
def test_the_rate_and_nothing_but_training_labels(single, kind, rate):
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(single, kind):
    first, again, other = (with_label_noise(single, kind, 0.2, seed).splits["train"].noise for seed in (1, 1, 2))
    for name in ("rows", "old", "new"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.rows, other.rows)


def test_symmetric_takes_all_other_classes_alike(single):
    noise = with_label_noise(single, "symmetric", 1.0).splits["train"].noise
    table = np.zeros((CLASSES, CLASSES))
    np.add.at(table, (noise.old, noise.new), 1)
    assert np.diag(table).sum() == 0
    off = table[~np.eye(CLASSES, dtype=bool)]
    expected = ROWS / (CLASSES * (CLASSES - 1))
    assert ((off - expected) ** 2 / expected).sum() < 190  # χ² of about 131 degrees of freedom


@pytest.mark.parametrize("kind", KINDS[1:])
def test_labels_go_to_near_classes_the_nearest_most_often(single, kind):
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


def test_constant_inputs_are_flipped_alike(single):
    constant = dataset_of(single.splits["train"].labels, torch.ones(ROWS, 4))
    noise = with_label_noise(constant, "feature-dependent", 0.3).splits["train"].noise
    assert len(noise) / ROWS == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_several_labels_one_is_replaced_by_a_class_that_the_row_has_not(multi, kind):
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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_have_all_classes_stay(kind):
    ids, counts = [0, 1, 2, 0, 1, 2, 2], [3, 1, 2, 1]
    labels = Labels(np.array(ids * 50), np.concatenate(([0], np.cumsum(counts * 50))))
    noise = with_label_noise(dataset_of(labels, classes=3), kind, 1.0).splits["train"].noise
    assert np.unique(noise.rows % 4).tolist() == [1, 2, 3]
    assert noise.new[noise.rows % 4 == 2].tolist() == [0] * 50


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_label_stay_without(kind):
    ids = np.where(np.arange(600) % 3 == 0, -100, np.arange(600) % CLASSES)
    split = with_label_noise(dataset_of(Labels(ids)), kind, 1.0).splits["train"]
    assert (split.noise.rows % 3 != 0).all()
    assert len(split.noise) == 400
    assert (split.labels.ids[::3] == -100).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens(kind):
    dataset = open_dataset("pycode", classes=200, limit=4000)
    split = with_label_noise(dataset, kind, 0.2).splits["train"]
    assert len(split.noise) / 4000 == pytest.approx(0.2, abs=0.03)
    assert split.show(5) == dataset.splits["train"].show(5)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_with_one_that_is_broken(tmp_path, kind):
    rng = np.random.default_rng(0)
    paths = [str(tmp_path / f"{number}.png") for number in range(24)]
    for path in paths:
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    (tmp_path / "3.png").write_bytes(b"no picture")
    split = ImageSplit(paths, Labels(np.arange(24) % 3), size=8)
    dataset = Dataset("pictures", InputSpec("image", (3, 8, 8)), ["a", "b", "c"], {"train": split})
    noisy = with_label_noise(dataset, kind, 0.5).splits["train"]
    assert noisy.workers
    assert 4 <= len(noisy.noise) <= 20
    assert len(noisy.fetch(np.arange(5)).broken) == 1


def test_flips_are_saved_and_read_back(single, tmp_path):
    noise = with_label_noise(single, "confusable", 0.25, seed=4).splits["train"].noise
    noise.save(tmp_path / "noise.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["noise.npz"]
    found = LabelNoise.load(tmp_path / "noise.npz")
    assert (found.kind, found.rate, found.seed) == ("confusable", 0.25, 4)
    for name in ("rows", "old", "new"):
        assert np.array_equal(getattr(found, name), getattr(noise, name))
    again = NoisySplit(single.splits["train"], found)
    assert np.array_equal(again.labels.ids, with_label_noise(single, "confusable", 0.25, 4).splits["train"].labels.ids)


def test_files_that_hold_no_flips(tmp_path):
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


def test_a_file_that_cannot_be_written_leaves_nothing(single, tmp_path):
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
def test_bad_arguments(single, kind, rate, seed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        with_label_noise(single, kind, rate, seed)


def test_data_that_cannot_have_noise(single):
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
