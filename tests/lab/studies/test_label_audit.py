"""`hetxl study audit` and `hetxl study noise-only`: their parts, and the pages that numbers make."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetxl_lab.studies import label_audit, noise_only
from hetxl_lab.studies.registry import load_study
from hetxl_lab.studies.small_data import Arrays, digits, principal_components, stored, twins


def arrays(rows: int = 200) -> Arrays:
    generator = np.random.default_rng(0)
    labels = np.arange(rows) % 4
    centres = 3 * generator.normal(size=(4, 5))
    return Arrays((centres[labels] + generator.normal(size=(rows, 5))).astype(np.float32), labels)


def test_flips_replace_about_the_share_that_was_asked_for():
    data = arrays()
    labels = data.flipped("symmetric", 0.3, seed=1)
    assert 0.2 < (labels != data.labels).mean() < 0.4
    assert np.array_equal(labels, data.flipped("symmetric", 0.3, seed=1))
    assert set(np.unique(labels)) <= set(range(data.num_classes))


def test_data_has_the_sizes_that_pages_name():
    assert digits().features.shape == (1797, 64)
    assert (twins(100).num_classes, twins(100).features.shape) == (60, (100, 32))
    components = principal_components(np.random.default_rng(0).normal(size=(200, 70)))
    variances = components.var(0)
    assert components.shape == (200, 64)
    assert (np.diff(variances) <= 1e-5).all()


def test_parts_are_computed_once(tmp_path: Path):
    calls: list[int] = []

    def compute() -> dict[str, Any]:
        calls.append(1)
        return {"value": len(calls)}

    path = tmp_path / "parts" / "a.json"
    assert stored(path, compute) == stored(path, compute) == {"value": 1}


@pytest.mark.parametrize("matrix", [False, True])
def test_scaled_logits_lower_the_loss(matrix: bool):
    torch.manual_seed(0)
    logits = 5 * torch.randn(300, 3)
    labels = torch.multinomial((logits / 4).softmax(-1), 1)[:, 0]
    fitted = noise_only.scaled_logits(logits, labels, matrix)(logits)
    assert F.cross_entropy(fitted, labels) < min(F.cross_entropy(logits, labels), F.cross_entropy(logits / 4, labels))


def precisions(value: float) -> dict[str, Any]:
    return {"all": value, "folds": [value - 0.01, value, value, value + 0.01]}


def test_audit_page_names_the_best_score_and_the_share_that_comes_back(tmp_path: Path):
    names = [f"cleanlab {score}, {head}" for score in label_audit.PEER for head in ("DET", "HET-XL")]
    scores = {name: precisions(0.5) for name in names} | {"cleanlab normalized_margin, DET": precisions(0.7)}
    scores |= {f"cleanlab {score}, HET-XL and neighbours": precisions(0.8) for score in label_audit.PEER}
    scores |= {label_audit.OURS: precisions(0.9), label_audit.MODEL: precisions(0.6)}
    losses = {"noisy": 1.0, "top 5 %": 0.8, "all suspects": 0.7, "right": 0.6}
    seeds = [{"average_precision": scores, "nll": losses, "wrong": dict.fromkeys(losses, 0.02)}] * 2
    summary = {"rate": 0.1, "settings": [{"data": "digits", "kind": "symmetric", "rows": 10, "seeds": seeds}]}
    study: Any = load_study("audit")
    text = study.text(summary)
    assert "0.700 (normalized margin, DET) | 0.900 | +0.200" in text
    assert "| 50% | 75% | 2.0% |" in text
    assert study.plot(summary, tmp_path / "audit.svg").exists()


def test_noise_only_page_counts_settings(tmp_path: Path):
    losses = dict.fromkeys(noise_only.METHODS, 1.0) | {noise_only.NOISE: 0.9}
    sets = {"coverage": 0.9, "coverage_right": 0.95, "size": 2.0}
    names = [f"{name}, {score}" for name in ("DET", noise_only.NOISE, noise_only.START) for score in ("aps", "raps")]
    seed = {
        "nll": losses,
        "seconds": {"DET": 1.0, noise_only.NOISE: 0.07, noise_only.START: 3.0},
        "choice": "constant noise",
        "sets": dict.fromkeys(names, sets),
    }
    settings = [{"data": "digits", "kind": "symmetric", "rows": 10, "seeds": [seed]}]
    settings.append({**settings[0], "kind": "confusable", "seeds": [seed | {"nll": dict.fromkeys(losses, 1.0)}]})
    study: Any = load_study("noise-only")
    summary = {"rate": 0.3, "steps": 2000, "settings": settings}
    text = study.text(summary)
    assert "lower mean NLL than temperature scaling in 1 of 2 settings, and a higher one in 0" in text
    assert "takes 7% of that time" in text
    assert "-0.1000 | 1/1 | 7% |" in text
    assert study.plot(summary, tmp_path / "noise-only.svg").exists()


@pytest.mark.slow
@pytest.mark.parametrize("module", [label_audit, noise_only])
def test_a_setting_is_measured(module: Any):
    pytest.importorskip("cleanlab")
    result = module.measure_setting(arrays(), "confusable", 0.2, 0, 20)
    assert np.isfinite(list(result["nll"].values())).all()
