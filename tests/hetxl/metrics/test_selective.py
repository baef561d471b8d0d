import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from hetxl.metrics import aurc, auroc, risk_coverage, threshold_for
from hetxl.metrics.records import Records
from hetxl.metrics.summary import by_confidence
from support.records import with_confidence

PAIRS = st.lists(st.tuples(st.sampled_from(np.linspace(0.5, 1, 9).tolist()), st.booleans()), min_size=1, max_size=40)


@given(PAIRS)
def test_auroc_agrees_with_scikit_learn_ties_included(pairs):
    confidence, hit = zip(*pairs, strict=True)
    actual = auroc(with_confidence(confidence, hit))
    if len(set(hit)) == 1:
        assert actual is None
    else:
        assert actual == pytest.approx(roc_auc_score(hit, confidence))


def test_auroc_and_aurc_have_known_values():
    falling = np.linspace(1, 0.5, 8)
    half = np.arange(8) < 4
    best, worst = with_confidence(falling, half), with_confidence(falling, ~half)
    assert auroc(best) == 1
    assert auroc(worst) == 0
    # Errors last: risks 0, 0, 0, 0, 1/5, 2/6, 3/7, 4/8. Errors first: 1, 1, 1, 1, 4/5, 4/6, 4/7, 4/8.
    assert aurc(best) == pytest.approx((1 / 5 + 2 / 6 + 3 / 7 + 4 / 8) / 8)
    assert aurc(worst) == pytest.approx((4 + 4 / 5 + 4 / 6 + 4 / 7 + 4 / 8) / 8)
    assert aurc(with_confidence(falling, [True] * 8)) == 0
    assert aurc(with_confidence(falling, [False] * 8)) == 1


def test_constant_confidence_has_the_risk_of_a_random_order():
    records = with_confidence([0.75] * 10, [True] * 7 + [False] * 3)
    assert aurc(records) == pytest.approx(0.3)
    assert auroc(records) == pytest.approx(0.5)


@given(PAIRS, st.integers(1, 50), st.randoms())
def test_risk_coverage_ends_at_the_total_risk(pairs, points, random):
    records = with_confidence(*zip(*pairs, strict=True))
    coverage, risk = risk_coverage(records, points)
    assert len(coverage) == len(risk) == min(points, len(pairs))
    assert (np.diff(coverage) > 0).all()
    assert coverage[0] > 0
    assert coverage[-1] == 1
    assert ((risk >= 0) & (risk <= 1)).all()
    assert risk[-1] == pytest.approx(1 - records.hit.mean())
    assert risk_coverage(records, len(pairs))[1].mean() == pytest.approx(aurc(records))
    random.shuffle(pairs)
    shuffled = with_confidence(*zip(*pairs, strict=True))
    np.testing.assert_allclose(risk_coverage(shuffled, points)[1], risk, atol=1e-12)


@given(PAIRS, st.sampled_from([0.3, 0.5, 0.75, 0.95, 1.0]))
def test_threshold_maximises_coverage(pairs, precision):
    confidence, hit = (np.array(column) for column in zip(*pairs, strict=True))
    threshold, coverage = threshold_for(with_confidence(confidence, hit), precision)
    allowed = [level for level in np.unique(confidence) if hit[confidence >= level].mean() >= precision]
    if not allowed:
        assert (threshold, coverage) == (None, 0.0)
    else:
        assert threshold == min(allowed)
        assert coverage == pytest.approx((confidence >= threshold).mean())


@pytest.mark.parametrize("precision", [0, -1, 1.1, float("nan")])
def test_a_precision_must_be_one(precision):
    with pytest.raises(ValueError, match=r"precision must lie in \(0, 1\], found"):
        threshold_for(with_confidence([0.5], [True]), precision)


def test_points_must_be_positive():
    with pytest.raises(ValueError, match="points must be at least 1"):
        risk_coverage(with_confidence([0.5], [True]), 0)


def test_examples_of_equal_confidence_share_their_hits():
    ordered = by_confidence(with_confidence([0.5, 0.75, 0.5, 1.0, 0.5], [True, False, False, True, False]))
    assert ordered.confidence.tolist() == [1, 0.75, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(ordered.hit, [1, 0, 1 / 3, 1 / 3, 1 / 3])
    assert ordered.ends.tolist() == [1, 2, 5]
    assert ordered.hits.tolist() == [1, 0, 1]


@given(st.lists(st.tuples(st.sampled_from([0.5, 0.625, 0.75, 1.0]), st.booleans()), min_size=1), st.randoms())
def test_the_order_of_the_examples_does_not_matter(pairs, random):
    first = by_confidence(with_confidence(*zip(*pairs, strict=True)))
    random.shuffle(pairs)
    second = by_confidence(with_confidence(*zip(*pairs, strict=True)))
    assert all(np.array_equal(computed, reference) for computed, reference in zip(first, second, strict=True))
    assert first.hit.sum() == pytest.approx(sum(hit for _, hit in pairs))


def test_no_examples_raise():
    with pytest.raises(ValueError, match="records must hold at least one example, found none"):
        by_confidence(Records.empty(4))
