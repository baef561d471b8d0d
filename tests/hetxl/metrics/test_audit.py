"""Audits of labels: scores, ranking, what the noise adds, and several labels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hetxl
from hetxl.functional import LabelLists
from hetxl.metrics import Audit, AuditBuilder, audit
from hetxl.metrics.audit import MISSING, POWER

PROBS = np.array([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.4, 0.35, 0.25], [0.0, 0.0, 1.0]])


def test_score_compares_the_label_with_the_most_probable_other_class():
    result = audit([1, 1, 0, 0], PROBS)
    np.testing.assert_array_equal(result.suggestion, [0, 0, 1, 2])
    np.testing.assert_allclose(result.label_prob, [0.2, 0.9, 0.4, 0.0])
    np.testing.assert_allclose(result.score, [0.7**POWER - 0.2**POWER, 0.05**POWER - 0.9**POWER,
                                              0.35**POWER - 0.4**POWER, 1.0])  # fmt: skip
    assert result.suspects == 2


def test_ranking_puts_the_largest_score_first_and_breaks_ties_by_row():
    assert audit([1, 1, 0, 0], PROBS).ranked().rows.tolist() == [3, 0, 2, 1]
    assert audit([0, 0], np.full((2, 2), 0.5)).ranked(1).rows.tolist() == [0]


@given(st.integers(2, 6), st.integers(1, 20), st.integers(0, 2**16))
def test_scores_are_bounded_and_positive_only_for_a_more_probable_class(classes: int, rows: int, seed: int):
    generator = np.random.default_rng(seed)
    probs, labels = generator.dirichlet(np.ones(classes), rows), generator.integers(classes, size=rows)
    result = audit(labels, probs)
    assert (np.abs(result.score) <= 1).all()
    np.testing.assert_array_equal(result.score > 0, probs[np.arange(rows), labels] < result.suggestion_prob)
    assert (result.suggestion != labels).all()


def test_nearest_rows_add_to_the_probabilities():
    features = np.concatenate([np.zeros((5, 2)), np.ones((5, 2))])
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    probs = np.full((10, 2), 0.5)  # a model that knows nothing
    result = audit(labels, probs, features + 0.01 * np.random.default_rng(0).normal(size=(10, 2)))
    worst = result.ranked(1)
    assert worst.rows.tolist() == [4]
    assert worst.label_prob[0] == pytest.approx((0.5 + 1 / 5) / 2)  # one of its five nearest rows is of the others
    assert worst.neighbours[0] == pytest.approx(4 / 5)
    assert np.isnan(audit(labels, probs).neighbours).all()


def test_ignored_rows_are_left_out():
    assert audit([1, -100, 0, 0], PROBS).rows.tolist() == [0, 2, 3]


def test_errors_by_class_and_by_pair():
    result = audit([1, 1, 0, 0], PROBS)
    labels, suspects = result.class_errors(3)
    assert labels.tolist() == [2, 2, 0]
    assert suspects.tolist() == [1, 1, 0]
    assert result.pair_errors() == [(0, 2, 1), (1, 0, 1)]


@pytest.mark.parametrize(
    ("labels", "probs", "message"),
    [
        ([0, 1, 1], PROBS, r"probs must have shape \[3, K\]"),
        ([0, 0, 0, 3], PROBS, "3"),
        ([0], [[0.5, float("nan")]], "NaN"),
    ],
)
def test_wrong_arrays_are_refused(labels: list[int], probs: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        audit(labels, probs)


def head_and_features(link: str = "softmax") -> tuple[hetxl.HetXLHead, torch.Tensor]:
    torch.manual_seed(0)
    head = hetxl.HetXLHead(6, 7, rank=3, noise_init=3.0, link=link, temperature=0.7).double().eval()
    return head, torch.randn(11, 6, dtype=torch.float64)


def test_builder_equals_the_arrays_and_adds_the_noise():
    head, features = head_and_features()
    labels = torch.arange(11) % 7
    prediction = head.predict(features, generator=torch.Generator().manual_seed(0))
    builder = AuditBuilder()
    rows = np.arange(11)[::-1].copy()  # any order of rows
    builder.add(prediction, labels, rows)
    result, plain = builder.build(), audit(labels.flip(0), prediction.probs.flip(0))
    for name in ("rows", "label", "suggestion", "score", "label_prob", "suggestion_prob"):
        np.testing.assert_allclose(getattr(result, name), getattr(plain, name), atol=1e-12)
    assert not plain.noise_gain.any()
    # The naive equivalents, for each row.
    without = head.predict(features, method="deterministic").log_probs
    for entry, row in enumerate(result.rows):
        example = 10 - int(row)
        label, other = int(result.label[entry]), int(result.suggestion[entry])
        expected = prediction.log_probs[example, label] - without[example, label]
        assert result.noise_gain[entry] == pytest.approx(float(expected), abs=1e-10)
        factors = head.logit_distribution(features).factors[example].detach()
        covariance = (factors.T @ factors)[[label, other]][:, [label, other]]
        expected = covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt()
        assert result.correlation[entry] == pytest.approx(float(expected), abs=1e-10)


def test_several_labels_may_be_superfluous_or_missing():
    head, features = head_and_features("sigmoid")
    prediction = head.predict(features, generator=torch.Generator().manual_seed(0))
    builder = AuditBuilder("sigmoid")
    lists = LabelLists.from_lists([[row % 7, (row + 2) % 7] for row in range(11)])
    builder.add(prediction, lists, np.arange(11))
    result = builder.build()
    superfluous, missing = result.take(result.suggestion < 0), result.take(result.label < 0)
    assert len(superfluous) == 22
    assert len(missing) == 11 * min(MISSING, 5)
    probs = prediction.probs.numpy()
    np.testing.assert_allclose(superfluous.label_prob, probs[superfluous.rows, superfluous.label])
    np.testing.assert_allclose(superfluous.suggestion_prob, 1 - superfluous.label_prob)
    np.testing.assert_allclose(missing.suggestion_prob, probs[missing.rows, missing.suggestion])
    np.testing.assert_array_equal(missing.score > 0, missing.suggestion_prob > 0.5)
    assert all((label - row) % 7 not in (0, 2) for row, label in zip(missing.rows, missing.suggestion, strict=True))


def test_folds_are_joined_in_the_order_of_rows():
    whole = audit([1, 1, 0, 0], PROBS)
    joined = Audit.concatenate([whole.take(np.array([3, 1])), whole.take(np.array([0, 2]))])
    np.testing.assert_array_equal(joined.rows, whole.rows)
    np.testing.assert_array_equal(joined.score, whole.score)


def test_wrong_labels_of_twins_and_of_any_class_rank_first():
    """Average precision of 30 % wrong labels with the right posterior: 0.97 at least for both kinds of noise."""
    generator = np.random.default_rng(0)
    rows, classes = 4000, 10
    truth = generator.integers(classes, size=rows)
    sure = generator.dirichlet(np.full(classes, 0.05), rows) * 0.1  # 10 % of every prediction is spread out
    for twin in (True, False):
        wrong = generator.random(rows) < 0.3
        other = truth ^ 1 if twin else (truth + generator.integers(1, classes, size=rows)) % classes
        labels = np.where(wrong, other, truth)
        noise = np.eye(classes)[truth ^ 1] if twin else (1 - np.eye(classes)[truth]) / (classes - 1)
        probs = sure + 0.9 * (0.7 * np.eye(classes)[truth] + 0.3 * noise)
        ranked = audit(labels, probs).ranked()
        hits = wrong[ranked.rows]
        precision = np.cumsum(hits) / np.arange(1, rows + 1)
        assert precision[hits].mean() > 0.97
