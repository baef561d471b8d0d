import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetxl.data.synthetic import load_synthetic
from hetxl.evaluation.scaling import HIGH, fit_temperature
from hetxl.studies.held_out import fitted_result
from hetxl.training.config import TrainConfig
from hetxl.training.model import build_model
from hetxl.training.run import Run, Trained
from support.training import QUIET

DATA = load_synthetic(rows=2000, classes=6, features=4)
SPLIT = DATA.splits["train"]
CONFIG = TrainConfig(head="het-xl", rank=2, eval_samples=16)


@pytest.fixture(scope="module")
def model():
    """A model that was trained for a moment."""
    model = build_model(CONFIG, DATA.input, 6, "softmax").eval()
    inputs, targets = SPLIT.fetch(np.arange(500)).inputs, SPLIT.labels.take(np.arange(500))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(25):
        optimizer.zero_grad()
        model(inputs, targets, generator=torch.Generator().manual_seed(0)).backward()
        optimizer.step()
    return model


def scaled(model, scale):
    """The run of a model whose logits are made larger."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.head.classifier.weight.mul_(scale)
        model.head.classifier.bias.mul_(scale)
    return Trained(
        Run(Path("none"), CONFIG), model, DATA.input, [str(number) for number in range(6)], "softmax", [1] * 6
    )


def test_logits_that_are_too_large_are_put_right(model):
    rows = np.arange(0, 1700, 5)
    usual = fitted_result(scaled(model, 1.0), SPLIT, rows, {"label": "HET-XL", "metrics": {}}, QUIET)
    large = fitted_result(scaled(model, 2.0), SPLIT, rows, {"label": "HET-XL", "metrics": {}}, QUIET)
    assert usual["label"] == "HET-XL"
    assert usual["metrics"]["validation"]["nll"] == pytest.approx(large["metrics"]["validation"]["nll"], abs=0.005)
    assert large["temperature"] == pytest.approx(2 * usual["temperature"], rel=0.03)
    assert usual["metrics"]["validation"]["precision@1"] > 1 / 6
    # Beyond the range it stays at its end.
    assert fitted_result(scaled(model, 300.0), SPLIT, rows, {}, QUIET)["temperature"] == pytest.approx(HIGH, rel=0.02)


def test_no_row_is_measured_with_a_temperature_that_it_was_fitted_to(model):
    run = scaled(model, 1.0)
    run.model.head.covariance = None
    features = SPLIT.fetch(np.arange(400)).inputs
    logits = run.model.head.classifier(run.model.backbone(features)).detach()
    right, wrong = logits.argmax(-1), logits.argmin(-1)
    ids = torch.where(torch.arange(400) % 2 == 0, right, torch.where(torch.arange(400) % 10 == 1, wrong, right))
    split = type(SPLIT)(features, type(SPLIT.labels)(ids.numpy()))
    found = fitted_result(run, split, np.arange(400), {}, QUIET)
    even, odd = (fit_temperature(run.model.head, [features[start::2]], ids[start::2]) for start in (0, 1))
    assert even < 0.3 < odd  # all even rows are right: the surer, the better
    losses = F.cross_entropy(logits[::2] / odd, ids[::2]) + F.cross_entropy(logits[1::2] / even, ids[1::2])
    assert found["metrics"]["validation"]["nll"] == pytest.approx(float(losses) / 2, rel=1e-3)
    assert found["temperature"] == pytest.approx((even + odd) / 2)
