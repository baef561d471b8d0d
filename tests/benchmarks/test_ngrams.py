"""benchmarks/_ngrams.py: classes out of runs of words."""

import numpy as np
import pytest


def test_runs_of_words_by_hand(load):
    ngrams = load("_ngrams").ngrams
    #                0  1  2  3 | 4  5   6  7   8  9   10
    ids = np.array([-1, 5, 6, 7, 8, 9, 8, 9, 8, 9, 3], dtype=np.int32)
    contexts, classes = ngrams(ids, 2, 3)
    # The runs (8, 9) at 4, 6, 8; (9, 8) at 5, 7; (9, 3) at 9.
    assert classes.tolist() == [0, 1, 0, 1, 0, 2]
    assert contexts.shape == (6, 4)
    assert (contexts >= 0).all()
    other, most = ngrams(ids, 2, 2)
    assert most.tolist() == [0, 1, 0, 1, 0]
    assert np.array_equal(other, contexts[:5])


def test_too_few_runs(load):
    with pytest.raises(SystemExit, match="hold 3 distinct runs of 2 words, fewer than 4"):
        load("_ngrams").ngrams(np.array([-1, 5, 6, 7, 8, 9, 8, 9, 8, 9, 3], dtype=np.int32), 2, 4)


def test_words_of_the_standard_library(load):
    module = load("_ngrams")
    found = module.words(("stdlib",), 20_000)
    assert len(found) >= 20_000
    assert found[0] == -1
    _, classes = module.ngrams(found, 2, 1000)
    times = np.bincount(classes, minlength=1000)
    assert (times > 0).all()
    assert (np.diff(times) <= 0).all()
