"""Vectors as a user would bring them."""

from types import SimpleNamespace

import numpy as np
import pytest

from hetxl_lab.datasets import vectors as module
from hetxl_lab.datasets.vectors import load_vectors, twins_of, with_wrong_labels, write_vectors


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    return load_vectors("digits")


def test_rows_are_divided_by_class_and_seed(digits):
    assert digits.features.shape == (1352, 64)
    assert digits.features.dtype == np.float32
    assert np.bincount(digits.test_labels).min() >= 43
    assert not np.array_equal(digits.labels, load_vectors("digits", seed=1).labels)


def test_twins_come_in_pairs(digits):
    twins = twins_of(digits)
    assert np.array_equal(twins[twins], np.arange(10))
    assert (twins != np.arange(10)).all()


@pytest.mark.parametrize("noise", ["twins", "next", "symmetric"])
def test_a_share_of_the_training_labels_is_wrong(digits, noise):
    noisy = with_wrong_labels(digits, noise, 0.3, seed=2)
    wrong = noisy.labels != digits.labels
    assert wrong.mean() == pytest.approx(0.3, abs=0.04)  # three standard errors of a share of 1,352
    assert noisy.test_labels is digits.test_labels
    if noise == "twins":
        assert np.array_equal(noisy.labels[wrong], twins_of(digits)[digits.labels[wrong]])
    elif noise == "next":
        assert np.array_equal(noisy.labels[wrong], (digits.labels[wrong] + 1) % 10)
    else:
        assert len(set(zip(digits.labels[wrong], noisy.labels[wrong], strict=True))) > 80


def test_files_are_written_once(digits, tmp_path):
    train, test = write_vectors(tmp_path / "data", "digits", digits)
    with np.load(test) as stored:
        assert np.array_equal(stored["labels"], digits.test_labels)
    changed = train.stat().st_mtime_ns
    assert write_vectors(tmp_path / "data", "digits", digits) == (train, test)
    assert train.stat().st_mtime_ns == changed


def test_every_seed_divides_the_same_glosses(monkeypatch):
    synsets = [SimpleNamespace(gloss=f"number {row}", file=3 + row % 5) for row in range(50)]
    encoded = []

    def encode(texts, cache):
        encoded.append(texts)
        return np.array([[float(text.split()[1])] for text in texts], dtype=np.float32)

    monkeypatch.setattr(module, "debian_package", lambda package, directory: SimpleNamespace(root=directory))
    monkeypatch.setattr(module.wordnet, "read_synsets", lambda directory, part: synsets)
    monkeypatch.setattr(module, "MINILM", SimpleNamespace(encode=encode))
    monkeypatch.setattr(module, "TEST_ROWS", 10)
    monkeypatch.setattr(module, "GLOSSES", 30)
    first, second = load_vectors("glosses"), load_vectors("glosses", seed=1)
    assert encoded[0] == encoded[1]  # so that they are encoded once
    for part in (first, second):
        assert (len(part.labels), len(part.test_labels), part.num_classes) == (30, 10, 5)
        rows = np.concatenate([part.features, part.test_features]).ravel().astype(int)
        assert len(set(rows)) == 40
        assert np.array_equal(rows % 5, np.concatenate([part.labels, part.test_labels]))
    assert not np.array_equal(first.test_labels, second.test_labels)
