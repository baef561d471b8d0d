import numpy as np
import pytest
import torch

from hetxl.contrastive.ngrams import NgramTable, ngrams


def test_words_and_pieces_within_words():
    pieces = ["<ab>", "<a", "ab", "b>", "<c>", "<c", "c>"]
    assert len(ngrams("ab c", 10**6, sizes=(2,))) == len(pieces)
    assert ngrams("ab c", 10**6) == ngrams("  AB   C ", 10**6)
    assert ngrams("c ab", 10**6) != ngrams("ab c", 10**6)
    assert sorted(ngrams("c ab", 10**6)) == sorted(ngrams("ab c", 10**6))


def test_the_hash_stays_the_same():
    # Trained tables depend on it.
    assert ngrams("a", 16384) == [683, 15054, 5554]


def test_every_text_has_a_piece():
    for text in ("", " ", "\ud800", "長い"):
        found = ngrams(text, 7)
        assert found
        assert all(0 <= number < 7 for number in found)


def test_names_that_share_words_share_pieces():
    left, right, other = (set(ngrams(text, 10**6)) for text in ("arrow left", "arrow left bold", "moon"))
    assert left < right
    assert not left & other


def test_bags_are_those_of_the_texts():
    texts = ["arrow left", "", "whale", "arrow"]
    table = NgramTable(texts, 500)
    assert len(table) == 4
    bags = table.take(np.array([2, 0, 2, 1]))
    ends = [*bags.offsets.tolist()[1:], len(bags.ids)]
    found = [bags.ids[start:end].tolist() for start, end in zip(bags.offsets.tolist(), ends, strict=True)]
    assert found == [ngrams(texts[place], 500) for place in (2, 0, 2, 1)]
    assert bags.ids.dtype == bags.offsets.dtype == torch.int64
    assert bags.to(torch.device("cpu")).ids is bags.ids
    assert NgramTable([], 5).ids.shape == (0,)


def test_places_outside():
    with pytest.raises(IndexError):
        NgramTable(["a"], 5).take(np.array([1]))
