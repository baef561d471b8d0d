"""benchmarks/millions.py: classes from runs of words, and a smoke run of the smallest setting."""

import numpy as np
import pytest
import torch


def test_runs_of_words_are_classes_by_frequency(load):
    ngrams = load("millions").ngrams
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


def test_too_few_runs_exit(load):
    with pytest.raises(SystemExit, match="hold 3 distinct runs of 2 words, fewer than 4"):
        load("millions").ngrams(np.array([-1, 5, 6, 7, 8, 9, 8, 9, 8, 9, 3], dtype=np.int32), 2, 4)


def test_words_of_the_standard_library(load):
    module = load("millions")
    word_ids = module.words(("stdlib",), 20_000)
    assert len(word_ids) >= 20_000
    assert word_ids[0] == -1
    _, classes = module.ngrams(word_ids, 2, 1000)
    times = np.bincount(classes, minlength=1000)
    assert (times > 0).all()
    assert (np.diff(times) <= 0).all()


def test_both_heads_over_every_classifier(load):
    module = load("millions")
    for setting in module.QUICK:
        training = module.Training(setting)
        contexts, classes = torch.randint(module.BUCKETS, (50, 4)), torch.randint(setting.K, (50,))
        following = module.batches(contexts, classes, setting.B)
        before = training.classifier.weight.detach().clone()
        for name in training.heads:
            training.step(name, *following())
        moved = (training.classifier.weight != before).any(-1).sum()
        assert moved == setting.K if setting.kind == "linear" else moved > 0
        assert training.nll("het-xl", contexts, classes) > 0
        assert module.predicted(setting, "het-xl") > module.predicted(setting, "det") > 4 * before.numel()
