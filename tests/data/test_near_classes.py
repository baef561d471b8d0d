"""Near classes are those that a reader would find near, for every kind of input."""

import numpy as np
import pytest
import torch
from PIL import Image

from hetxl.data.dataset import InputSpec
from hetxl.data.images import ImageSplit
from hetxl.data.labels import Labels
from hetxl.data.near_classes import BLOCK, as_vectors, blocks, near_classes
from hetxl.data.synthetic import FeatureSplit


def on_a_line(places, each=20, spread=0.01, offset=0.0, seed=0):
    """Features [n, 3] around places on a line, and their classes."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(len(places)), each)
    rng.shuffle(ids)
    features = np.zeros((len(ids), 3))
    features[:, 0] = np.asarray(places)[ids] + rng.normal(0, spread, len(ids))
    return torch.from_numpy(features + offset).float(), ids


def test_features_by_their_means():
    features, ids = on_a_line([0, 1, 3, 7, 15])
    found = near_classes(FeatureSplit(features, Labels(ids)), InputSpec("features", (3,)), 5, 2)
    assert found.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1], [3, 2]]


def test_an_offset_that_all_share_changes_nothing():
    features, ids = on_a_line([0, 1, 3, 7, 15], offset=1000)
    found = near_classes(FeatureSplit(features, Labels(ids)), InputSpec("features", (3,)), 5, 2)
    assert found.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1], [3, 2]]


def test_blocks_change_nothing(monkeypatch):
    features, ids = on_a_line(np.random.default_rng(1).normal(size=30), each=7)
    split, spec = FeatureSplit(features, Labels(ids)), InputSpec("features", (3,))
    whole = near_classes(split, spec, 30)
    monkeypatch.setattr("hetxl.data.near_classes.BLOCK", 50)
    assert near_classes(split, spec, 30).tolist() == whole.tolist()
    means = np.stack([features.numpy()[ids == number].mean(0) for number in range(30)])
    distances = np.linalg.norm(means[:, None] - means, axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert whole.tolist() == distances.argsort(1)[:, :5].tolist()


def test_classes_without_rows_are_near_to_nothing():
    features, ids = on_a_line([0, 1, 3])
    split = FeatureSplit(features, Labels(np.array([0, 2, 4])[ids]))
    found = near_classes(split, InputSpec("features", (3,)), 6, 5)
    assert found.tolist() == [[2, 4], [-1, -1], [0, 4], [-1, -1], [2, 0], [-1, -1]]
    alone = FeatureSplit(features, Labels(np.zeros(len(features), dtype=np.int64)))
    assert near_classes(alone, InputSpec("features", (3,)), 6).shape == (6, 0)


def test_rows_without_a_label_and_rows_with_several():
    features, ids = on_a_line([0, 1, 3, 7])
    ids = np.where(np.arange(len(ids)) % 3 == 0, -100, ids)
    found = near_classes(FeatureSplit(features, Labels(ids)), InputSpec("features", (3,)), 4, 1)
    assert found.ravel().tolist() == [1, 0, 1, 2]
    # Class 4 is a second label of the rows of class 3.
    lists = [[3, 4] if label == 3 else [label] * int(label >= 0) for label in ids]
    flat = np.array([label for row in lists for label in row])
    labels = Labels(flat, np.concatenate(([0], np.cumsum([len(row) for row in lists]))))
    found = near_classes(FeatureSplit(features, labels), InputSpec("features", (3,)), 5, 1)
    assert found.ravel().tolist() == [1, 0, 1, 4, 3]


def windows(tokens, positions, context):
    """The tokens before some positions, and those there as classes."""
    before = tokens[positions[:, None] + np.arange(-context, 0)]
    return FeatureSplit(torch.from_numpy(before), Labels(tokens[positions]))


def test_tokens_by_what_stands_before_them(monkeypatch):
    # "dog" and "cat" follow "the" and "a", "runs" and "eats" follow "dog" and "cat"; "the" and "a" start.
    names = ["dog", "cat", "runs", "eats", "the", "a"]
    rng = np.random.default_rng(0)
    sentences = [[rng.integers(4, 6), rng.integers(0, 2), rng.integers(2, 4)] for _ in range(200)]
    tokens = np.array([token for words in sentences for token in (6, 7, *words)])
    split = windows(tokens, np.flatnonzero(tokens < 6), 2)
    found = near_classes(split, InputSpec("tokens", (2,), 8), 6, 1)
    assert [names[near] for near in found.ravel()] == ["cat", "dog", "eats", "runs", "a", "the"]
    monkeypatch.setattr("hetxl.data.near_classes.BLOCK", 20)
    assert near_classes(split, InputSpec("tokens", (2,), 8), 6, 1).tolist() == found.tolist()


def test_the_first_of_equally_near_tokens():
    # Each class follows a token of its own: no two have anything in common.
    split = windows(np.array([4, 0, 5, 1, 6, 2, 7, 3]), np.array([1, 3, 5, 7]), 1)
    assert near_classes(split, InputSpec("tokens", (1,), 8), 4, 2).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]


def test_pictures_by_their_mean_colours(tmp_path):
    shades = {"black": 0, "dark": 40, "light": 200, "white": 255}
    paths, ids = [], []
    rng = np.random.default_rng(0)
    for number, (name, shade) in enumerate(shades.items()):
        for copy in range(3):
            pixels = np.clip(rng.normal(shade, 10, (20, 20, 3)), 0, 255).astype(np.uint8)
            paths.append(str(tmp_path / f"{name}{copy}.png"))
            Image.fromarray(pixels).save(paths[-1])
            ids.append(number)
    (tmp_path / "dark0.png").write_bytes(b"no picture")
    split = ImageSplit(paths, Labels(np.array(ids)), size=20)
    spec = InputSpec("image", (3, 20, 20))
    assert near_classes(split, spec, 4, 1).ravel().tolist() == [1, 0, 3, 2]


def test_at_most_so_many_pictures_of_a_class_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hetxl.data.near_classes.PICTURES", 2)
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    split = ImageSplit([str(tmp_path / "one.png")] * 20, Labels(np.repeat(np.arange(4), 5)), size=8)
    read = []
    fetch = split.fetch
    monkeypatch.setattr(split, "fetch", lambda rows: read.extend(rows) or fetch(rows))
    near_classes(split, InputSpec("image", (3, 8, 8)), 4)
    assert np.bincount(np.array(read) // 5).tolist() == [2, 2, 2, 2]


def test_pictures_are_shrunk():
    assert as_vectors(torch.ones(2, 3, 40, 40)).shape == (2, 3 * 16 * 16)
    assert as_vectors(torch.ones(2, 3, 8, 8)).shape == (2, 3 * 8 * 8)
    assert as_vectors(torch.ones(2, 7)).dtype == torch.float64


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_all_rows_are_read_in_blocks(rows):
    split = FeatureSplit(torch.arange(rows * 2).view(rows, 2).float(), Labels(np.zeros(rows, dtype=np.int64)))
    spec = InputSpec("features", (2, BLOCK // 100))  # of such large rows, few at a time
    read, inputs = zip(*blocks(split, spec, np.arange(rows), "reading"), strict=True)
    assert np.concatenate(read).tolist() == list(range(rows))
    assert torch.equal(torch.cat(inputs), split.features)
    assert max(map(len, read)) <= 50
