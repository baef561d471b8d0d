import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score, top_k_accuracy_score

from hetxl.functional import LabelLists
from hetxl.metrics import Records, band_accuracy, brier, class_bands, nll, nll_standard_error, precision_at, summarise
from support.records import records_of, with_confidence

KEYS = {
    "nll",
    "nll_standard_error",
    "precision@1",
    "precision@5",
    "calibration_error",
    "calibration_error_width",
    "brier",
    "aurc",
    "auroc",
    "accuracy_head",
    "accuracy_middle",
    "accuracy_tail",
    "examples",
}


def drawn(n=200, classes=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def test_the_summary_agrees_with_scikit_learn():
    logits, targets = drawn()
    probs, labels = logits.softmax(-1).numpy(), targets.numpy()
    actual = summarise(records_of(logits, targets), np.bincount(labels, minlength=12))
    every = np.arange(12)
    assert actual["nll"] == pytest.approx(log_loss(labels, probs, labels=every))
    assert actual["precision@1"] == pytest.approx(top_k_accuracy_score(labels, probs, k=1, labels=every))
    assert actual["precision@5"] == pytest.approx(top_k_accuracy_score(labels, probs, k=5, labels=every))
    assert actual["auroc"] == pytest.approx(roc_auc_score(probs.argmax(-1) == labels, probs.max(-1)))
    assert actual["brier"] == pytest.approx(((probs - np.eye(12)[labels]) ** 2).sum(-1).mean())
    losses = -np.log(probs[np.arange(200), labels])
    assert actual["nll_standard_error"] == pytest.approx(losses.std(ddof=1) / math.sqrt(200))
    assert actual["examples"] == 200
    # Each band holds about a third of the examples, and together all of them.
    assert (
        min(actual[f"accuracy_{band}"] for band in ("head", "middle", "tail"))
        <= actual["precision@1"]
        <= max(actual[f"accuracy_{band}"] for band in ("head", "middle", "tail"))
    )


def test_the_keys_are_those_that_reports_read():
    logits, targets = drawn(20)
    assert set(summarise(records_of(logits, targets))) == KEYS
    assert set(summarise(records_of(logits, targets), np.ones(12))) == KEYS


def test_undefined_metrics_are_none():
    actual = summarise(with_confidence([0.75], [True]))
    assert {key for key, value in actual.items() if value is None} == {
        "nll_standard_error",
        "auroc",
        "accuracy_head",
        "accuracy_middle",
        "accuracy_tail",
    }
    json.dumps(actual, allow_nan=False)


def test_a_label_that_was_impossible_makes_the_loss_infinite():
    actual = summarise(with_confidence([1.0, 0.75], [False, True]))
    assert actual["nll"] == math.inf
    assert actual["nll_standard_error"] is None


def test_perfect_and_hopeless_predictions():
    logits = 60 * torch.eye(6, dtype=torch.float64)
    perfect = summarise(records_of(logits, torch.arange(6)))
    assert perfect["nll"] == pytest.approx(0, abs=1e-9)
    assert perfect["precision@1"] == perfect["precision@5"] == 1
    assert perfect["brier"] == pytest.approx(0, abs=1e-9)
    assert perfect["calibration_error"] == pytest.approx(0, abs=1e-6)
    assert perfect["aurc"] == 0
    hopeless = summarise(records_of(logits, (torch.arange(6) + 1) % 6))
    assert hopeless["nll"] == pytest.approx(60)
    assert hopeless["brier"] == pytest.approx(2)
    assert hopeless["calibration_error"] == pytest.approx(1)
    assert hopeless["calibration_error_width"] == pytest.approx(1)
    assert hopeless["aurc"] == 1


def test_a_uniform_prediction_is_a_guess():
    actual = summarise(records_of(torch.zeros(10, 10), torch.arange(10)))
    assert actual["nll"] == pytest.approx(math.log(10))
    assert actual["precision@1"] == pytest.approx(0.1)
    assert actual["precision@5"] == pytest.approx(0.5)
    assert actual["calibration_error"] == pytest.approx(0, abs=1e-6)


def test_any_number_of_labels():
    logits = torch.tensor([[3.0, 1, -1, -2, -3, -4], [3, 1, -1, -2, -3, -4]])
    records = records_of(logits, LabelLists.from_lists([[1, 5], [5]]), "sigmoid")
    actual = summarise(records, np.ones(6))
    assert actual["precision@1"] == 0
    assert actual["precision@5"] == 0.5
    assert actual["accuracy_head"] is None
    dense = torch.tensor([[0.0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, dense, reduction="none")
    assert actual["nll"] == pytest.approx(float(loss.sum(-1).mean()))


@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 10_000))
def test_ranges_and_the_order_of_the_examples(n, classes, ties, seed):
    logits, targets = drawn(n, classes, seed)
    records = records_of(logits.round() if ties else logits, targets)
    counts = np.arange(classes)
    actual = summarise(records, counts)
    for key, value in actual.items():
        if value is not None and key not in ("nll", "nll_standard_error", "examples", "brier"):
            assert 0 <= value <= 1, key
    assert actual["nll"] >= 0
    assert 0 <= actual["brier"] <= 2
    assert actual["precision@1"] <= actual["precision@5"]
    order = np.random.default_rng(seed).permutation(n)
    for key, value in summarise(records.take(order), counts).items():
        assert value == (None if actual[key] is None else pytest.approx(actual[key], abs=1e-12)), key


@pytest.mark.parametrize(
    "metric", [nll, nll_standard_error, brier, summarise, lambda records: precision_at(records, 1)]
)
def test_no_examples_raise(metric):
    with pytest.raises(ValueError, match="records must hold at least one example, found none"):
        metric(Records.empty(3))


def test_only_the_kept_classes_can_be_asked_for():
    records = with_confidence([0.75], [True])
    with pytest.raises(ValueError, match="k must be at most 5, the classes that records keep, found 6"):
        precision_at(records, 6)
    with pytest.raises(ValueError, match="k must be at least 1"):
        precision_at(records, 0)


def test_thirds_of_the_training_examples():
    # 90 examples: 30 and 60 are the borders. The second class starts below 30 and the third below 60.
    assert class_bands(np.array([20, 20, 25, 15, 10])).tolist() == [0, 1, 0, 2, 2]
    assert class_bands(np.array([30, 30, 30])).tolist() == [0, 1, 2]


def test_one_class_can_fill_more_than_a_band():
    assert class_bands(np.array([1, 98, 1])).tolist() == [2, 0, 2]


def test_classes_without_training_examples_are_in_the_tail():
    assert class_bands(np.array([0, 5, 0])).tolist() == [2, 0, 2]
    assert class_bands(np.zeros(2)).tolist() == [2, 2]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_the_head_is_the_fewest_classes_with_a_third(counts):
    counts = np.array(counts)
    bands = class_bands(counts)
    total = counts.sum()
    if not total:
        return
    for band, share in ((0, 1), (1, 2)):
        inside = counts[bands <= band]
        assert 3 * inside.sum() >= share * total
        if (bands == band).any():
            least = counts[bands == band].min()
            assert 3 * (inside.sum() - least) < share * total
            assert least >= counts[bands > band].max(initial=0)


def test_band_without_examples_has_no_accuracy():
    records = with_confidence(np.full(5, 0.75), [True, True, False, True, False])
    records = dataclasses.replace(records, label=np.array([0, 0, 0, 1, 1]))
    actual = band_accuracy(records, np.array([30, 30, 30]))
    assert actual == {"head": pytest.approx(2 / 3), "middle": 0.5, "tail": None}


def test_lists_of_labels_are_in_no_band():
    records = dataclasses.replace(with_confidence([0.75], [True]), label=np.array([-1]))
    assert band_accuracy(records, np.array([1])) == {"head": None, "middle": None, "tail": None}


def test_counts_must_fit():
    with pytest.raises(ValueError, match="class_counts has 1 classes, and a record the class id 1"):
        band_accuracy(with_confidence([0.75], [False]), np.array([3]))
    with pytest.raises(ValueError, match="class_counts must be K counts of at least 0"):
        class_bands(np.array([3, -1]))
    with pytest.raises(ValueError, match=r"found shape \[1, 2\]"):
        class_bands(np.array([[3, 1]]))
