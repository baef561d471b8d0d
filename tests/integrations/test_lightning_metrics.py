"""What is measured in Lightning, and which Lightning it is."""

import sys

import numpy as np
import pytest
import torch

from hetxl import DetHead, HetHead
from hetxl.evaluation import calibration_error
from hetxl.integrations.lightning_metrics import (
    NOISE_CLASSES,
    CalibrationError,
    draws,
    import_lightning,
    noise_scale,
    pl,
)
from support.cases import VARIANTS, make
from support.records import with_confidence


def test_the_calibration_error_is_that_of_evaluation():
    rng = np.random.default_rng(0)
    confidence, hit = rng.random(200).astype(np.float32), rng.random(200) < 0.6
    metric = CalibrationError()
    for start in range(0, 200, 64):
        metric.update(torch.from_numpy(confidence[start : start + 64]), torch.from_numpy(hit[start : start + 64]))
    assert float(metric.compute()) == pytest.approx(calibration_error(with_confidence(confidence, hit)), rel=1e-6)
    metric.reset()
    metric.update(torch.empty(0), torch.empty(0))
    assert torch.isnan(metric.compute())


def test_it_is_no_part_of_a_state_dict():
    metric = CalibrationError()
    metric.update(torch.rand(3), torch.ones(3))
    assert metric.state_dict() == {}


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_noise_scale_is_the_spread_of_sampled_logits(variant, link):
    head = make(variant, link=link, temperature=0.5, noise_init=1.0)
    features = torch.randn(7, 5, dtype=torch.float64)
    found = noise_scale(head, features)
    if head.covariance is None:
        assert found == 0
        return
    with torch.no_grad():
        logits = head.logit_distribution(features).sample(torch.randn(20_000, head.covariance.size).double())
    expected = (logits / 0.5).var(-2).mean(-1).sqrt().median()
    assert found == pytest.approx(float(expected), rel=0.02)


def test_the_noise_scale_of_many_classes_looks_at_some():
    head = HetHead(4, 10 * NOISE_CLASSES, rank=2, temperature=1.0, residual="diagonal", noise_init=1.0)
    features = torch.randn(5, 4)
    with torch.no_grad():
        exact = head.logit_distribution(features).variance.mean(-1).sqrt().median()
    assert noise_scale(head, features) == pytest.approx(float(exact), rel=0.1)
    assert noise_scale(DetHead(4, 3), features) == 0


def test_draws_are_the_same_each_time_and_leave_no_trace():
    torch.manual_seed(3)
    first = torch.randn(4, generator=draws(torch.device("cpu"), 7))
    after = torch.randn(4)
    assert torch.equal(first, torch.randn(4, generator=draws(torch.device("cpu"), 7)))
    assert not torch.equal(first, torch.randn(4, generator=draws(torch.device("cpu"), 8)))
    torch.manual_seed(3)
    assert torch.equal(after, torch.randn(4))


def test_which_lightning(monkeypatch):
    assert pl is import_lightning() is sys.modules["lightning.pytorch"]
    with monkeypatch.context() as patch:
        for name in ("lightning", "lightning.pytorch"):
            patch.setitem(sys.modules, name, None)  # as if it were not installed
        assert import_lightning().__name__ == "pytorch_lightning"
        patch.setitem(sys.modules, "pytorch_lightning", None)
        with pytest.raises(ImportError, match=r"pip install lightning"):
            import_lightning()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "lightning.pytorch")
        assert import_lightning().__name__ == "pytorch_lightning"  # it is in use, and the other is not
    assert import_lightning() is pl
