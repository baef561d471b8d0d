from collections import Counter
from itertools import combinations

import pytest
import torch

from hetxl.functional import LabelLists
from hetxl.metrics import ConfusionCounter, confusions
from support.cases import VARIANTS, make, normals
from support.records import predict_logits


def by_hand(prediction, targets, top=5):
    """(first, second) → examples, Σ p_i p_j ρ_ij, Σ p_i p_j, confusions; and errors by class."""
    pairs, errors = {}, Counter()
    correlation = prediction.correlation
    for example, classes in enumerate(prediction.classes.tolist()):
        for i, j in combinations(range(min(top, len(classes))), 2):
            weight = float(prediction.probs[example, classes[i]] * prediction.probs[example, classes[j]])
            actual = pairs.setdefault(tuple(sorted((classes[i], classes[j]))), [0, 0.0, 0.0, 0])
            actual[0] += 1
            actual[1] += weight * float(correlation[example, i, j])
            actual[2] += weight
        for label in targets[example]:
            if classes[0] not in targets[example]:
                errors[label] += 1
                pairs.setdefault(tuple(sorted((classes[0], label))), [0, 0.0, 0.0, 0])[3] += 1
    return pairs, errors


def check(actual, pairs, errors, noise=True):
    assert len(actual) == len(pairs)
    for entry in actual:
        first, second = int(entry["first"]), int(entry["second"])
        examples, tied, weight, confused = pairs[first, second]
        assert entry["examples"] == examples
        assert entry["confused"] == confused
        assert entry["weight"] == pytest.approx(weight)
        if noise and weight:
            assert entry["correlation"] == pytest.approx(tied / weight)
        else:
            assert entry["correlation"] is None
        wrong = errors[first] + errors[second]
        assert entry["confused_share"] == (pytest.approx(confused / wrong) if wrong else None)
    scores = [abs(pairs[int(entry["first"]), int(entry["second"])][1]) if noise else 0 for entry in actual]
    assert scores == pytest.approx(sorted(scores, reverse=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_pairs_equal_a_plain_count(variant):
    head = make(variant)
    prediction = head.predict(torch.randn(30, 5, dtype=torch.float64), noise=normals(head, 30))
    targets = torch.randint(7, (30,))
    pairs, errors = by_hand(prediction, [[label] for label in targets.tolist()])
    counter = ConfusionCounter()
    counter.add(prediction, targets)
    check(counter.pairs(k=100), pairs, errors, noise=variant != "det")


def test_lists_of_labels_are_counted_as_by_hand():
    head = make("het-xl", link="sigmoid")
    prediction = head.predict(torch.randn(4, 5, dtype=torch.float64), noise=normals(head, 4))
    lists = [[0, 1], [], [2, 3, 4], [6]]
    counter = ConfusionCounter()
    counter.add(prediction, LabelLists.from_lists(lists))
    check(counter.pairs(k=100), *by_hand(prediction, lists))


def test_batches_add_up_however_often_they_are_joined(monkeypatch):
    head = make("het-xl")
    features, targets = torch.randn(30, 5, dtype=torch.float64), torch.randint(7, (30,))
    noise = normals(head, 30)
    whole = ConfusionCounter()
    whole.add(head.predict(features, noise=noise), targets)
    monkeypatch.setattr(confusions, "_PENDING", 40)
    parts = ConfusionCounter()
    for rows in torch.arange(30).split(7):
        parts.add(head.predict(features[rows], noise=noise[rows]), targets[rows])
    for computed, reference in zip(whole.pairs(50), parts.pairs(50), strict=True):
        assert computed == {key: pytest.approx(value) for key, value in reference.items()}


def test_the_top_classes_of_a_prediction_are_enough():
    head = make("het-xl")
    features, noise, targets = torch.randn(9, 5, dtype=torch.float64), normals(head, 9), torch.randint(7, (9,))
    whole, top = ConfusionCounter(top=3), ConfusionCounter(top=3)
    whole.add(head.predict(features, noise=noise), targets)
    top.add(head.predict(features, noise=noise, top_k=4), targets)
    for computed, reference in zip(whole.pairs(50), top.pairs(50), strict=True):
        assert computed == {key: pytest.approx(value) for key, value in reference.items()}


def test_without_noise_the_most_confused_come_first():
    logits = torch.eye(4)[[0, 0, 0, 1, 2, 2]] * 5
    counter = ConfusionCounter()
    counter.add(predict_logits(logits), torch.tensor([1, 1, 0, 0, 3, 2]))
    first, second = counter.pairs(k=2, names=["ant", "bee", "cat", "dog"])
    assert (first["first"], first["second"], first["confused"], first["confused_share"]) == ("ant", "bee", 3, 1.0)
    assert (second["first"], second["second"], second["confused"]) == ("cat", "dog", 1)
    assert first["correlation"] is None


def test_examples_without_a_label_confuse_nothing():
    counter = ConfusionCounter()
    counter.add(predict_logits(torch.randn(5, 3)), torch.full((5,), -100))
    assert all(entry["confused"] == 0 and entry["confused_share"] is None for entry in counter.pairs())
    assert counter.pairs()[0]["examples"] == 5


def test_one_class_has_no_pairs():
    counter = ConfusionCounter()
    assert counter.pairs() == []
    counter.add(predict_logits(torch.zeros(2, 1)), torch.zeros(2, dtype=torch.int64))
    assert counter.pairs() == []


def test_beyond_the_limit_the_least_pairs_go():
    logits = torch.randn(200, 60)
    logits[::2, 7] += 8
    logits[::2, 11] += 8
    targets = torch.randint(60, (200,))
    targets[::2] = torch.where(logits[::2, 7] > logits[::2, 11], 11, 7)  # always the other of the two
    all_pairs, few = ConfusionCounter(), ConfusionCounter(max_pairs=5)
    for rows in torch.arange(200).split(20):
        for counter in (all_pairs, few):
            counter.add(predict_logits(logits[rows]), targets[rows])
            counter.pairs()  # joins, and so drops
    assert len(all_pairs.pairs(k=10_000)) > 500
    assert len(few.pairs(k=10_000)) == 5
    assert few.pairs()[0] == all_pairs.pairs()[0]
    assert few.pairs()[0]["confused"] == 100


def test_invalid_arguments_raise():
    counter = ConfusionCounter()
    with pytest.raises(ValueError, match=r"prediction must be of one batch, \[b, K\], found \[2, 2, 7\]"):
        counter.add(make("det").predict(torch.zeros(2, 2, 5, dtype=torch.float64)), torch.zeros(2, 2))
    counter.add(predict_logits(torch.randn(5, 3)), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="found 2 names and the class id 2"):
        counter.pairs(names=["ant", "bee"])
    with pytest.raises(ValueError, match="targets must be of the 2 examples of the prediction, found 3"):
        counter.add(predict_logits(torch.randn(2, 3)), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="top must be at least 2"):
        ConfusionCounter(top=1)
