"""Prediction sets: scores against their definitions, coverage, groups; selective answers and thresholds of labels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.metrics.conformal import (
    GROUPINGS,
    SCORES,
    ScoreOptions,
    calibrate,
    class_scores,
    label_scores,
    label_thresholds,
    risk_threshold,
    threshold,
)


def drawn(
    rows: int, classes: int, seed: int = 0, sharpness: float = 0.3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities, labels drawn from them, and uniforms."""
    generator = np.random.default_rng(seed)
    probs = torch.from_numpy(generator.dirichlet(np.full(classes, sharpness), rows))
    labels = torch.from_numpy((probs.numpy().cumsum(1) > generator.random((rows, 1))).argmax(1))
    return probs, labels, torch.from_numpy(generator.random(rows))


@pytest.mark.parametrize("kind", SCORES)
def test_scores_follow_their_definition(kind: str):
    probs, labels, u = drawn(20, 7)
    options = ScoreOptions(kind, penalty=0.05, free_ranks=2)
    scores = label_scores(probs, labels, u, options)
    for row in range(20):
        p, own = probs[row], probs[row, labels[row]]
        if kind == "lac":
            expected = 1 - own
        else:
            expected = p[p > own].sum() + u[row] * own
            if kind == "raps":
                expected = expected + 0.05 * max(0, int((p > own).sum()) + 1 - 2)
        assert float(scores[row]) == pytest.approx(float(expected), abs=1e-12)


@given(st.integers(0, 2**16), st.integers(1, 9), st.sampled_from(SCORES))
def test_scores_do_not_fall_with_the_rank(seed: int, classes: int, kind: str):
    probs, _, u = drawn(5, classes, seed)
    scores, ids = class_scores(probs, u, ScoreOptions(kind))
    assert (scores.diff(dim=-1) >= -1e-12).all()
    assert (ids.sort(-1).values == torch.arange(classes)).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.05, 0.95))
def test_threshold_is_the_conformal_quantile(scores: list[float], coverage: float):
    value = threshold(np.array(scores), coverage)
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    assert value == (math.inf if rank > len(scores) else sorted(scores)[rank - 1])


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_sets_cover_as_stated(kind: str, grouping: str):
    """Coverage of 20,000 new examples within 1 % of 90 %; two standard errors of the calibration are 0.85 %."""
    options = ScoreOptions(kind)
    probs, labels, u = drawn(5000, 10)
    scores = label_scores(probs, labels, u, options).numpy()
    conformal = calibrate(scores, labels.numpy(), 10, 0.9, options, grouping)
    probs, labels, u = drawn(20000, 10, seed=1)
    sets = conformal.sets(probs, u)
    hits = np.array([int(label) in chosen for label, chosen in zip(labels, sets, strict=True)])
    assert hits.mean() == pytest.approx(0.9, abs=0.01)
    if grouping == "class":
        by_class = [hits[labels.numpy() == k].mean() for k in range(10)]
        assert min(by_class) > 0.87


def test_class_thresholds_cover_a_class_that_the_model_is_blind_to():
    """A class whose probability is always halved: marginal sets miss it, those by class do not."""
    probs, labels, u = drawn(40000, 6, sharpness=0.5)
    probs[:, 0] /= 2
    probs /= probs.sum(1, keepdim=True)
    options = ScoreOptions("aps")
    half = slice(0, 20000)
    scores = label_scores(probs[half], labels[half], u[half], options).numpy()
    new = slice(20000, None)
    coverage = {}
    for grouping in ("marginal", "class"):
        conformal = calibrate(scores, labels[half].numpy(), 6, 0.9, options, grouping)
        sets = conformal.sets(probs[new], u[new])
        blind = [int(label) in chosen for label, chosen in zip(labels[new], sets, strict=True) if label == 0]
        coverage[grouping] = np.mean(blind)
    assert coverage["marginal"] < 0.88
    assert coverage["class"] == pytest.approx(0.9, abs=0.02)


def test_clusters_of_many_rare_classes_cover_evenly():
    """200 classes with 40 examples each, half of them hard: clustered thresholds cover both halves."""
    generator = np.random.default_rng(0)
    labels = np.arange(8000) % 200
    scores = generator.beta(np.where(labels % 2, 4, 2), 4)
    options = ScoreOptions("lac")
    conformal = calibrate(scores, labels, 200, 0.9, options, "clustered")
    new_scores, new_labels = generator.beta(np.where(np.arange(40000) % 2, 4, 2), 4), np.arange(40000) % 200
    covered = new_scores <= conformal.thresholds[new_labels]
    assert covered[new_labels % 2 == 0].mean() == pytest.approx(0.9, abs=0.03)
    assert covered[new_labels % 2 == 1].mean() == pytest.approx(0.9, abs=0.03)
    marginal = calibrate(scores, labels, 200, 0.9, options)
    assert abs((new_scores <= marginal.thresholds[new_labels])[new_labels % 2 == 1].mean() - 0.9) > 0.03


def test_too_few_examples_give_all_classes():
    probs, labels, u = drawn(5, 4)
    options = ScoreOptions("aps")
    conformal = calibrate(label_scores(probs, labels, u, options).numpy(), labels.numpy(), 4, 0.9, options)
    assert all(len(chosen) == 4 for chosen in conformal.sets(probs, u))


@pytest.mark.parametrize(("coverage", "message"), [(0.0, "coverage"), (1.0, "coverage")])
def test_coverage_must_be_a_share(coverage: float, message: str):
    with pytest.raises(ValueError, match=message):
        calibrate(np.ones(3), np.zeros(3, dtype=int), 2, coverage, ScoreOptions())


def test_selective_answers_keep_their_risk():
    """Of 200 calibrations, at most 10 % exceed the risk on the distribution itself (5 % and three standard errors)."""
    generator = np.random.default_rng(0)
    exceeded, shares = 0, []
    for _ in range(200):
        confidence = generator.random(5000)
        correct = generator.random(5000) < confidence
        limit, share = risk_threshold(confidence, correct, risk=0.1, delta=0.05)
        shares.append(share)
        exceeded += (1 - limit) / 2 > 0.1  # the mean error above the limit
    assert exceeded <= 20
    assert 0.1 < np.mean(shares) < 0.2  # the most confident fifth has a mean error of 10 %


def test_no_threshold_where_no_answer_is_safe():
    assert risk_threshold(np.linspace(0, 1, 50), np.zeros(50, dtype=bool), 0.05) == (math.inf, 0.0)


def test_label_thresholds_are_the_best_of_all():
    generator = np.random.default_rng(0)
    labels = generator.random((60, 3)) < 0.4
    probs = np.round(np.clip(0.5 * labels + 0.6 * generator.random((60, 3)), 0, 1), 1)  # with ties
    best = label_thresholds(probs, labels)
    precise = label_thresholds(probs, labels, precision=0.9)
    for k in range(3):
        candidates = np.unique(probs[:, k])

        def f1(value: float, k: int = k) -> float:
            chosen = probs[:, k] >= value
            return 2 * (chosen & labels[:, k]).sum() / (chosen.sum() + labels[:, k].sum())

        assert f1(best[k]) == pytest.approx(max(map(f1, candidates)))
        fine = [value for value in candidates if labels[probs[:, k] >= value, k].mean() >= 0.9]
        assert precise[k] == min(fine)
    assert np.isinf(label_thresholds(probs, np.zeros_like(labels))).all()


@pytest.mark.parametrize("grouping", ["class", "clustered"])
def test_classes_with_few_examples_have_a_threshold_together(grouping: str):
    generator = np.random.default_rng(0)
    # Two frequent classes with low scores; 300 rare ones with high scores and a few examples each.
    labels = np.where(generator.random(4000) < 0.6, generator.integers(2, size=4000), generator.integers(2, 302, 4000))
    scores = np.where(labels < 2, 0.5, 1.0) * generator.random(4000)
    own = np.arange(4000) < 2000
    fitted = calibrate(scores[own], labels[own], 302, 0.9, ScoreOptions("aps"), grouping)
    hit = scores[~own] <= fitted.thresholds[labels[~own]]
    assert hit.mean() == pytest.approx(0.9, abs=0.025)
    assert hit[labels[~own] >= 2].mean() == pytest.approx(0.9, abs=0.03)  # by the marginal threshold 0.75
