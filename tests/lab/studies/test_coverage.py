"""`hetxl study coverage`: its measure of prediction sets, and the page that numbers make."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetxl_lab.studies import coverage
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.small_data import twins


def measured(score: str, grouping: str, sharpness: float = 1.0) -> dict[str, Any]:
    """Return the measure of sets on 4,000 rows of 6 classes; with `sharpness` 1 the probabilities are right."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 6, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].numpy()
    observed = np.where(np.random.default_rng(0).random(4000) < 0.2, 0, labels)
    bands = np.array([0, 0, 1, 1, 2, 2])
    probs = (sharpness * logits).softmax(-1)
    return coverage.measure_sets(probs, observed, labels, bands, score, grouping, seed=0, halves=10)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_given_labels_are_covered_as_often_as_was_asked_for(score: str, sharpness: float):
    result = measured(score, "marginal", sharpness)
    assert result["coverage"] == pytest.approx(coverage.COVERAGE, abs=0.01)
    assert result["coverage_right"] > result["coverage"] + 0.01  # the thresholds allow for wrong labels
    assert 1 < result["size"] < 6


def test_thresholds_by_class_cover_each_band():
    # Class 0 has most of the wrong labels, whose probability is low: one threshold covers its band too rarely.
    shared, by_class = (np.array(measured("aps", grouping)["bands"]) for grouping in ("marginal", "class"))
    assert np.abs(by_class - coverage.COVERAGE).max() < 0.02 < np.abs(shared - coverage.COVERAGE).max()


def test_page_names_the_furthest_coverage_and_counts_smaller_sets(tmp_path: Path):
    sets = {"coverage": 0.905, "coverage_right": 0.95, "bands": [0.93, 0.9, 0.86], "size": 3.0}
    seed = dict.fromkeys(coverage.METHODS, sets) | {coverage.OURS: sets | {"size": 2.0}}
    settings = [
        {"data": "digits", "rate": 0.0, "rows": 10, "num_classes": 4, "seeds": [seed, seed]},
        {"data": "digits", "rate": 0.1, "rows": 10, "num_classes": 4, "seeds": [seed, seed]},
    ]
    study: Any = load_study("coverage")
    text = study.text({"settings": settings, "halves": 20})
    assert "within 0.5 % of that in each of 2 settings" in text
    assert "in 2 of 2 settings" in text
    assert "| digits, 10% wrong | 4 | 90.5 %, 3.00 |" in text
    assert "4.0 % (DET, aps)" in text
    assert study.plot({"settings": settings}, tmp_path / "coverage.svg").exists()


@pytest.mark.slow
def test_a_setting_is_measured():
    result = coverage.measure_setting(twins(1200), 0.1, seed=0, steps=60, halves=5)
    assert set(result) == set(coverage.METHODS)
    assert result[coverage.OURS]["coverage"] == pytest.approx(coverage.COVERAGE, abs=0.03)
