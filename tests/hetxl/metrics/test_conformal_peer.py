"""Prediction sets equal those of MAPIE for the same probabilities."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin

from hetxl.metrics.conformal import ScoreOptions, calibrate, label_scores

mapie = pytest.importorskip("mapie.classification")
K = 6


class Prefitted(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose inputs are its probabilities."""

    def fit(self, X: Any, y: Any) -> "Prefitted":
        self.classes_ = np.arange(K)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        return np.asarray(X)

    def predict(self, X: Any) -> np.ndarray:
        return np.asarray(X).argmax(1)


def drawn(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    probs = generator.dirichlet(np.full(K, 0.4), rows)
    return probs, (probs.cumsum(1) > generator.random((rows, 1))).argmax(1)


@pytest.mark.parametrize("coverage", [0.7, 0.9])
@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_sets_equal_those_of_mapie(kind: str, coverage: float):
    probs, labels = drawn(400, seed=0)
    new, _ = drawn(200, seed=1)
    peer = mapie.SplitConformalClassifier(
        Prefitted().fit(probs, labels), confidence_level=coverage, conformity_score=kind, prefit=True, random_state=0
    )
    peer.conformalize(probs, labels)
    options = {} if kind == "lac" else {"conformity_score_params": {"include_last_label": "randomized"}}
    _, expected = peer.predict_set(new, **options)

    def uniforms(count: int) -> torch.Tensor:
        # MAPIE takes a share u of the label's probability away, this library adds one of 1 − u to those before it.
        return torch.from_numpy(1 - np.random.RandomState(0).uniform(size=count))

    scores = label_scores(torch.from_numpy(probs), torch.from_numpy(labels), uniforms(400), ScoreOptions(kind))
    sets = calibrate(scores.numpy(), labels, K, coverage, ScoreOptions(kind)).sets(torch.from_numpy(new), uniforms(200))
    assert [set(chosen.tolist()) for chosen in sets] == [set(np.flatnonzero(row).tolist()) for row in expected[:, :, 0]]
