import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score, top_k_accuracy_score

from hetxl.evaluation import Records, brier, nll, nll_standard_error, precision_at, summarise
from hetxl.functional import LabelLists
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
    found = summarise(records_of(logits, targets), np.bincount(labels, minlength=12))
    every = np.arange(12)
    assert found["nll"] == pytest.approx(log_loss(labels, probs, labels=every))
    assert found["precision@1"] == pytest.approx(top_k_accuracy_score(labels, probs, k=1, labels=every))
    assert found["precision@5"] == pytest.approx(top_k_accuracy_score(labels, probs, k=5, labels=every))
    assert found["auroc"] == pytest.approx(roc_auc_score(probs.argmax(-1) == labels, probs.max(-1)))
    assert found["brier"] == pytest.approx(((probs - np.eye(12)[labels]) ** 2).sum(-1).mean())
    losses = -np.log(probs[np.arange(200), labels])
    assert found["nll_standard_error"] == pytest.approx(losses.std(ddof=1) / math.sqrt(200))
    assert found["examples"] == 200
    # Each band holds about a third of the examples, and together all of them.
    assert (
        min(found[f"accuracy_{band}"] for band in ("head", "middle", "tail"))
        <= found["precision@1"]
        <= max(found[f"accuracy_{band}"] for band in ("head", "middle", "tail"))
    )


def test_the_keys_are_those_that_reports_read():
    logits, targets = drawn(20)
    assert set(summarise(records_of(logits, targets))) == KEYS
    assert set(summarise(records_of(logits, targets), np.ones(12))) == KEYS


def test_what_is_not_defined_is_none():
    found = summarise(with_confidence([0.75], [True]))
    assert {key for key, value in found.items() if value is None} == {
        "nll_standard_error",
        "auroc",
        "accuracy_head",
        "accuracy_middle",
        "accuracy_tail",
    }
    json.dumps(found, allow_nan=False)


def test_a_label_that_was_impossible_makes_the_loss_infinite():
    found = summarise(with_confidence([1.0, 0.75], [False, True]))
    assert found["nll"] == math.inf
    assert found["nll_standard_error"] is None


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
    found = summarise(records_of(torch.zeros(10, 10), torch.arange(10)))
    assert found["nll"] == pytest.approx(math.log(10))
    assert found["precision@1"] == pytest.approx(0.1)
    assert found["precision@5"] == pytest.approx(0.5)
    assert found["calibration_error"] == pytest.approx(0, abs=1e-6)


def test_any_number_of_labels():
    logits = torch.tensor([[3.0, 1, -1, -2, -3, -4], [3, 1, -1, -2, -3, -4]])
    records = records_of(logits, LabelLists.from_lists([[1, 5], [5]]), "sigmoid")
    found = summarise(records, np.ones(6))
    assert found["precision@1"] == 0
    assert found["precision@5"] == 0.5
    assert found["accuracy_head"] is None
    dense = torch.tensor([[0.0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, dense, reduction="none")
    assert found["nll"] == pytest.approx(float(loss.sum(-1).mean()))


@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 10_000))
def test_ranges_and_the_order_of_the_examples(n, classes, ties, seed):
    logits, targets = drawn(n, classes, seed)
    records = records_of(logits.round() if ties else logits, targets)
    counts = np.arange(classes)
    found = summarise(records, counts)
    for key, value in found.items():
        if value is not None and key not in ("nll", "nll_standard_error", "examples", "brier"):
            assert 0 <= value <= 1, key
    assert found["nll"] >= 0
    assert 0 <= found["brier"] <= 2
    assert found["precision@1"] <= found["precision@5"]
    order = np.random.default_rng(seed).permutation(n)
    for key, value in summarise(records.take(order), counts).items():
        assert value == (None if found[key] is None else pytest.approx(found[key], abs=1e-12)), key


@pytest.mark.parametrize(
    "metric", [nll, nll_standard_error, brier, summarise, lambda records: precision_at(records, 1)]
)
def test_no_examples(metric):
    with pytest.raises(ValueError, match="records must hold at least one example, found none"):
        metric(Records.empty(3))


def test_only_the_kept_classes_can_be_asked_for():
    records = with_confidence([0.75], [True])
    with pytest.raises(ValueError, match="k must be at most 5, the classes that records keep, found 6"):
        precision_at(records, 6)
    with pytest.raises(ValueError, match="k must be at least 1"):
        precision_at(records, 0)
