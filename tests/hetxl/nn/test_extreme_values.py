"""Heads at the limits: every method of prediction gives finite probabilities for every finite feature."""

import pytest
import torch

import hetxl
from hetxl.nn.heads import METHODS, bounded
from support.cases import GRID, make

HEADS = ("det", "het", "het-h", "het-xl")
SIGNS = torch.tensor([[1.0, -1, 1, 1], [0, 0, 0, 0], [-1, 0.5, -1, 1]], dtype=torch.float64)


def problems(prediction, link):
    """Names of what is not finite, or not a distribution."""
    values = {name: getattr(prediction, name) for name in ("probs", "entropy", "expected_entropy")}
    if prediction.logits.noise is not None and prediction.classes.shape[-1] > 1:
        values["correlation"] = prediction.correlation
    wrong = [name for name, value in values.items() if not value.isfinite().all()]
    if link == "softmax" and (prediction.probs.double().sum(-1) - 1).abs().max() > 0.02:  # bfloat16 has 8 bits
        wrong.append("sum")
    return wrong


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", HEADS)
def test_predictions_are_finite_for_every_finite_feature(name, link):
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for classes, rank, temperature in ((1, 2, 0.05), (5, 0, 5.0), (5, 2, 0.05)):
            options = {} if name == "det" else {"rank": rank}
            head = hetxl.build_head(name, 4, classes, link=link, temperature=temperature, dtype=dtype, **options).eval()
            for size in (1.0, 1e3, 65504) if dtype == torch.float16 else (1.0, 1e4, 1e20, 3e38):  # logits / τ of 1e4
                for method in METHODS:
                    prediction = head.predict((SIGNS * size).to(dtype), method=method, num_samples=1)
                    wrong += [(dtype, classes, rank, size, method, what) for what in problems(prediction, link)]
    assert wrong == []


SIZES = {torch.float16: (1e3, 65504), torch.bfloat16: (1e4, 1e30), torch.float32: (1e4, 1e30), torch.float64: (1e300,)}


@pytest.mark.slow
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("variant", "covariance", "residual"), GRID)
def test_every_covariance_is_finite_at_both_bounds_of_the_temperature(variant, covariance, residual, link):
    wrong = []
    for dtype, sizes in SIZES.items():
        for classes, rank, raw in ((1, 2, -6e4), (5, 0, 6e4), (5, 2, -6e4)):
            options = {"rank": rank if covariance in ("efficient", "low_rank") else 2} if variant != "det" else {}
            options |= {"covariance": covariance, "residual": residual, "temperature": hetxl.LearnedTemperature()}
            head = make(variant, 4, classes, dtype=dtype, link=link, **options).eval()
            with torch.no_grad():
                head.temperature.raw.fill_(raw)
            for size in sizes:
                for method in METHODS:
                    prediction = head.predict((SIGNS * size).to(dtype), method=method, num_samples=1)
                    wrong += [(dtype, classes, rank, size, method, what) for what in problems(prediction, link)]
    assert wrong == []


@pytest.mark.parametrize("name", HEADS)
def test_large_features_predict_what_the_direction_does(name):
    head = hetxl.build_head(name, 4, 5, rank=2, dtype=torch.float32).eval()
    noise = None if name == "det" else torch.randn(64, head.covariance.size)
    direction = torch.randn(6, 4)
    expected = head.predict(direction * 1e9, noise=noise).probs
    for size in (1e14, 1e25, 1e37):
        torch.testing.assert_close(head.predict(direction * size, noise=noise).probs, expected, rtol=0, atol=1e-5)


def test_large_logits_by_large_weights_stay_finite():
    for name in HEADS:
        head = hetxl.build_head(name, 4, 5, rank=2).eval()
        with torch.no_grad():
            head.classifier.weight.mul_(1e4 / head.classifier.weight.abs().max())
        for method in METHODS:
            assert problems(head.predict(SIGNS.float(), method=method), "softmax") == []


def test_features_within_the_limits_are_not_changed():
    features = torch.randn(7, 4) * torch.logspace(-30, 12, 7)[:, None]
    assert torch.equal(bounded(features), features)
    large = bounded(torch.tensor([[3e38, -3e38, 0.0, 1e37]]))
    assert large.isfinite().all()
    torch.testing.assert_close(large / large.max(), torch.tensor([[1.0, -1, 0, 1 / 30]]))


def test_standardised_features_are_scaled_down_after_the_mean_is_subtracted():
    head = hetxl.DetHead(2, 3, standardize=True).eval()
    with torch.no_grad():
        head.standardize.mean.fill_(1.6e18)
        head.standardize.deviation.fill_(1e17)
        probs = head.predict(torch.tensor([[1.6e18, 1.7e18], [1.7e18, 1.5e18], [3e38, -3e38]])).probs
    assert probs.isfinite().all()
    assert (probs[:2].amax(-1) < 1).all()


@pytest.mark.parametrize("size", [1e6, 1e30])
def test_noise_of_any_finite_size_can_be_initialised(size):
    for name in HEADS[1:]:
        head = hetxl.build_head(name, 4, 5, rank=2, noise_init=size)
        assert all(parameter.isfinite().all() for parameter in head.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tolerance": float("nan")}, ValueError, "tolerance must be at least 0"),
        ({"tolerance": -0.1}, ValueError, "tolerance must be at least 0"),
        ({"generator": 3}, TypeError, r"generator must be a torch\.Generator, found int"),
        ({"num_samples": 10**18}, ValueError, "num_samples must be at most 16,777,216"),
    ],
)
def test_invalid_arguments_of_predict_raise(options, error, message):
    with pytest.raises(error, match=message):
        hetxl.HetXLHead(4, 5, rank=2).predict(torch.randn(2, 4), **options)


def test_invalid_arguments_of_a_head_raise():
    with pytest.raises(ValueError, match="dtype must be a floating-point type"):
        hetxl.HetXLHead(4, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="eval_samples must be at most"):
        hetxl.HetXLHead(4, 5, eval_samples=10**18)
