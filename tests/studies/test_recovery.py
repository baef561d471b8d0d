"""Recovery: the true model against itself, and a whole study that trains in seconds."""

import json
import math

import numpy as np
import pytest
import torch

from hetxl.data.synthetic import load_synthetic, true_head, true_nll
from hetxl.nn import HetHead, HetXLHead
from hetxl.studies.recovery import labels, noise_of, page, pearson, study, true_head_of
from hetxl.training.config import TrainConfig
from hetxl.training.rescale import SCALED, SCALED_XL
from support.training import QUIET

DATA = "synthetic:rows=1200,classes=8,features=5,noise=0.7"
TINY = {"epochs": 1.0, "batch_size": 64, "rank": 2, "train_samples": 2, "eval_samples": 8, "evaluate_every": 10}
OPTIONS = {"seeds": (0, 1), "options": TINY, "jobs": 1, "narrator": QUIET}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A study, run twice."""
    out = tmp_path_factory.mktemp("recovery")
    path = study(DATA, out=out, **OPTIONS)
    first = path.read_text()
    before = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    assert study(DATA, out=out, **OPTIONS).read_text() == first
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    return out, json.loads(first)


def test_every_head_is_measured_against_the_true_model_on_the_same_rows(results):
    out, summary = results
    assert list(summary["heads"]) == labels() == ["DET", SCALED, "HET", "HET-H", "HET-XL", SCALED_XL]
    assert summary["test_rows"] == 60
    test = load_synthetic(rows=1200, classes=8, features=5, noise=0.7).splits["test"]
    truth = true_head(classes=8, features=5, noise=0.7)
    assert summary["true_nll"] == pytest.approx(true_nll(truth, test, rows=60, samples=4096), abs=0.005)
    det = summary["heads"]["DET"]["nll"]
    for values in summary["heads"].values():
        assert values["seeds"] == [0, 1]
        for place, closed in enumerate(values["gap_closed"]):
            assert det[place] - closed * (det[place] - summary["true_nll"]) == pytest.approx(values["nll"][place])
    assert summary["heads"]["DET"]["gap_closed"] == [0, 0]
    assert (out / "recovery.png").stat().st_size > 1000


def test_only_the_rows_that_were_evaluated_count(tmp_path):
    summary = json.loads(
        study(DATA, out=tmp_path, **OPTIONS | {"seeds": (3,), "options": TINY | {"test_examples": 20}}).read_text()
    )
    assert (summary["test_rows"], summary["examples"], summary["seeds"]) == (20, 20, [3])
    assert "1 seed." in (tmp_path / "study.md").read_text()


def test_noise_is_compared_where_there_is_some(results):
    _, summary = results
    assert "agreement" not in summary["heads"]["DET"]
    for label in ("HET", "HET-H", "HET-XL"):
        found = summary["heads"][label]["agreement"]
        assert all(-1 <= value <= 1 for value in found["pearson"])
        assert all(0 <= value <= 2 for value in found["difference"])
        assert all(value > 0 for value in found["scale"])
        assert len(found["scale"]) == 2


def test_the_page(results):
    out, summary = results
    text = (out / "study.md").read_text()
    assert text == page(summary)
    assert "8 classes, 1,080 training rows, 17 steps, 2 seeds. HET-XL closes " in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["head", "---", *labels(), "true model"]
    assert len({row.count("|") for row in rows}) == 1


def test_the_true_model_agrees_with_itself():
    truth = true_head_of(TrainConfig(data=DATA, data_seed=3))
    assert torch.equal(truth.classifier.weight, true_head(classes=8, features=5, noise=0.7, seed=3).classifier.weight)
    features, classes = torch.randn(20, 5), torch.arange(6).expand(20, 6)
    noise = noise_of(truth, features, classes)
    assert noise.correlations.shape == (20, 15)
    assert pearson(noise.correlations, noise.correlations) == pytest.approx(1)


def test_what_is_added_to_all_logits_is_no_noise():
    # The second head has a noise beside that of the first which moves all logits alike.
    one = HetHead(3, 4, rank=1, temperature=1.0)
    with torch.no_grad():
        for parameter in one.covariance.parameters():
            parameter.zero_()
        one.covariance.factor.copy_(torch.tensor([[1.0, -1.0, 2.0, 0.0]]))
        one.covariance.scale.bias.fill_(1.0)
        one.covariance.residual.bias.fill_(-20.0)
    other = HetHead(3, 4, rank=1, temperature=2.0)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        other.covariance.residual.bias.fill_(3.0)  # the same for all four, so nothing among them
    features, classes = torch.randn(2, 3), torch.arange(4).expand(2, 4)
    first, second = (noise_of(head, features, classes) for head in (one, other))
    np.testing.assert_allclose(first.correlations, second.correlations, atol=1e-4)
    # 0.5 is the mean of the factor: 0.5, −1.5, 1.5 and −0.5 are left. Their noise is all one normal.
    assert np.sign(first.correlations[0]).tolist() == [-1, 1, -1, -1, 1, -1]
    np.testing.assert_allclose(first.scale, math.sqrt((0.25 + 2.25 + 2.25 + 0.25) / 4), rtol=1e-4)
    np.testing.assert_allclose(second.scale, first.scale / 2, rtol=1e-4)


def test_pearson():
    values = np.random.default_rng(0).normal(size=(50, 3))
    assert pearson(values, 3 * values + 1) == pytest.approx(1)
    assert pearson(values, -values) == pytest.approx(-1)
    other = values + np.random.default_rng(1).normal(size=(50, 3))
    assert pearson(values, other) == pytest.approx(np.corrcoef(values.ravel(), other.ravel())[0, 1])
    assert pearson(values, np.ones_like(values)) == 0


@pytest.mark.parametrize("data", ["pycode", "synthetic:multi_label=true", "data.npy"])
def test_only_synthetic_data_has_a_true_model(data, tmp_path):
    with pytest.raises(ValueError, match="data must be synthetic with one label for each row"):
        study(data, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_true_model_is_a_het_xl_head():
    assert isinstance(true_head_of(TrainConfig(data="synthetic")), HetXLHead)
