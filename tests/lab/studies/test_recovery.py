"""Recovery: the true model against itself, and a whole study that trains in seconds."""

import math

import numpy as np
import pytest
import torch

from hetxl._files import read_json
from hetxl.nn import HetHead, HetXLHead
from hetxl_lab.studies.recovery import OPTIONS, labels, noise_of, pearson, true_head_of
from hetxl_lab.studies.run import run_study
from hetxl_train.config import TrainConfig
from hetxl_train.data.synthetic import load_synthetic, true_head, true_nll
from hetxl_train.rescale import SCALED, SCALED_XL

DATA = "synthetic:rows=1200,classes=8,features=5,noise=0.7"


def test_every_head_is_measured_against_the_true_model_on_the_same_rows(studied):
    _, summary = studied("recovery")
    assert summary["data"] == DATA
    assert list(summary["heads"]) == labels() == ["DET", SCALED, "HET", "HET-H", "HET-XL", SCALED_XL]
    assert summary["test_rows"] == 60
    test = load_synthetic(rows=1200, classes=8, features=5, noise=0.7).splits["test"]
    truth = true_head(classes=8, features=5, noise=0.7)
    assert summary["true_nll"] == pytest.approx(true_nll(truth, test, rows=60, samples=4096), abs=0.005)
    det = summary["heads"]["DET"]["nll"]
    for values in summary["heads"].values():
        assert values["seeds"] == [0, 1]
        for index, closed in enumerate(values["gap_closed"]):
            assert det[index] - closed * (det[index] - summary["true_nll"]) == pytest.approx(values["nll"][index])
    assert summary["heads"]["DET"]["gap_closed"] == [0, 0]


def test_only_the_rows_that_were_evaluated_count(studied, tmp_path, monkeypatch):
    monkeypatch.setitem(OPTIONS, "miniature", OPTIONS["miniature"] | {"test_examples": 20})
    page = studied.run("recovery", tmp_path, seeds=(3,))
    summary = read_json(page.with_suffix(".json"))
    assert (summary["test_rows"], summary["examples"], summary["seeds"]) == (20, 20, [3])


def test_noise_is_compared_where_there_is_some(studied):
    _, summary = studied("recovery")
    assert "agreement" not in summary["heads"]["DET"]
    for label in ("HET", "HET-H", "HET-XL"):
        agreement = summary["heads"][label]["agreement"]
        assert all(-1 <= value <= 1 for value in agreement["pearson"])
        assert all(0 <= value <= 2 for value in agreement["difference"])
        assert all(value > 0 for value in agreement["scale"])
        assert len(agreement["scale"]) == 2


def test_repeated_study_trains_nothing_and_writes_the_same_page(studied, tmp_path):
    text, summary = studied("recovery")
    before = {file: file.stat().st_mtime_ns for file in studied.cache.rglob("result.json")}
    page = studied.run("recovery", tmp_path)
    assert page.read_text() == text
    assert read_json(page.with_suffix(".json"))["heads"] == summary["heads"]
    assert before == {file: file.stat().st_mtime_ns for file in studied.cache.rglob("result.json")}
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


def test_shift_of_all_logits_is_not_noise():
    # The second head has a noise beside that of the first which moves all logits alike.
    base = HetHead(3, 4, rank=1, temperature=1.0)
    with torch.no_grad():
        for parameter in base.covariance.parameters():
            parameter.zero_()
        base.covariance.factor.copy_(torch.tensor([[1.0, -1.0, 2.0, 0.0]]))
        base.covariance.scale.bias.fill_(1.0)
        base.covariance.residual.bias.fill_(-20.0)
    shifted = HetHead(3, 4, rank=1, temperature=2.0)
    shifted.load_state_dict(base.state_dict())
    with torch.no_grad():
        shifted.covariance.residual.bias.fill_(3.0)  # the same for all four, so nothing among them
    features, classes = torch.randn(2, 3), torch.arange(4).expand(2, 4)
    first, second = (noise_of(head, features, classes) for head in (base, shifted))
    np.testing.assert_allclose(first.correlations, second.correlations, atol=1e-4)
    # 0.5 is the mean of the factor: 0.5, −1.5, 1.5 and −0.5 are left. Their noise is all one normal.
    assert np.sign(first.correlations[0]).tolist() == [-1, 1, -1, -1, 1, -1]
    np.testing.assert_allclose(first.scale, math.sqrt((0.25 + 2.25 + 2.25 + 0.25) / 4), rtol=1e-4)
    np.testing.assert_allclose(second.scale, first.scale / 2, rtol=1e-4)


def test_pearson_equals_numpy():
    values = np.random.default_rng(0).normal(size=(50, 3))
    assert pearson(values, 3 * values + 1) == pytest.approx(1)
    assert pearson(values, -values) == pytest.approx(-1)
    other = values + np.random.default_rng(1).normal(size=(50, 3))
    assert pearson(values, other) == pytest.approx(np.corrcoef(values.ravel(), other.ravel())[0, 1])
    assert pearson(values, np.ones_like(values)) == 0


@pytest.mark.parametrize("data", ["pycode", "synthetic:multi_label=true", "data.npy"])
def test_only_synthetic_data_has_a_true_model(data, tmp_path):
    with pytest.raises(ValueError, match="data must be synthetic with one label for each row"):
        run_study("recovery", options={"data": data}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_true_model_is_a_het_xl_head():
    assert isinstance(true_head_of(TrainConfig(data="synthetic")), HetXLHead)
