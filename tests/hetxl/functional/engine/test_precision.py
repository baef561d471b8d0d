"""Half precision: products are narrow, sums are not. Gradients are compared with those of float32, relative to the
largest entry of each."""

import math

import pytest
import torch

from hetxl import LearnedTemperature
from support.cases import LINKS, make, normals, targets_for

B, D, K, S = 12, 32, 50, 24
VARIANTS = ("het-xl", "het", "het-h", "het-xl-own")
ORDERS = ("samples", "factors")
COVARIANCES = [("efficient", "rank1"), ("low_rank", "diagonal")]

# Rounding of one operand is 2⁻⁹ = 0.2 % in bfloat16 and 2⁻¹² = 0.02 % in float16; a gradient passes several products.
GRADIENT = {torch.bfloat16: 0.03, torch.float16: 0.004}
LOSS = {torch.bfloat16: 5e-4, torch.float16: 1e-4}
# τ's gradient is one number, a sum of terms of both signs that are much larger than it.
TEMPERATURE = {torch.bfloat16: 0.05, torch.float16: 0.01}


def head_of(variant, link="softmax", covariance="efficient", residual="rank1", classes=K, **options):
    options = {"rank": 3, "temperature": LearnedTemperature(init=1.3), "dtype": torch.float32} | options
    return make(variant, D, classes, link=link, covariance=covariance, residual=residual, **options)


def results(head, features, targets, z, order=None, autocast=None, scale=1.0):
    """Loss, and gradients of features and parameters as float32, unscaled."""
    features = features.detach().clone().requires_grad_()
    head.zero_grad()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = head.loss(features, targets, noise=z, order=order)
    assert loss.dtype == torch.float32
    (loss * scale).backward()
    assert features.grad.dtype == features.dtype
    values = {"loss": loss.detach(), "features": features.grad.float() / scale}
    for name, parameter in head.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        values[name] = parameter.grad.float() / scale
    return values


def assert_near(actual, expected, dtype):
    for name in expected:
        bound = {"loss": LOSS, "temperature.raw": TEMPERATURE}.get(name, GRADIENT)[dtype]
        error = float((actual[name] - expected[name]).abs().max() / expected[name].abs().max())
        assert error < bound, f"{name}: {error:.2g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("covariance", "residual"), COVARIANCES)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_results_are_near_float32(variant, link, covariance, residual, order, dtype):
    head = head_of(variant, link, covariance, residual)
    features, targets = torch.randn(B, D), targets_for(head, B)
    z = normals(head, B, samples=S, dtype=torch.float32)
    expected = results(head, features, targets, z, order)
    assert_near(results(head, features, targets, z, order, autocast=dtype), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_features_of_a_backbone_under_autocast(variant, link, order, dtype):
    # They arrive in half precision; the parameters stay float32.
    head = head_of(variant, link)
    features, targets = torch.randn(B, D).to(dtype), targets_for(head, B)
    z = normals(head, B, samples=S, dtype=torch.float32).to(dtype)
    expected = results(head, features.float(), targets, z.float(), order)
    assert_near(results(head, features, targets, z, order, autocast=dtype), expected, dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("covariance", "residual"), COVARIANCES)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_results_are_near_float32(variant, link, covariance, residual, order):
    head = head_of(variant, link, covariance, residual).to(torch.bfloat16)
    wide = head_of(variant, link, covariance, residual)
    wide.load_state_dict(head.state_dict())
    features, targets = torch.randn(B, D).bfloat16(), targets_for(head, B)
    z = normals(head, B, samples=S, dtype=torch.bfloat16)
    expected = results(wide, features.float(), targets, z.float(), order)
    assert_near(results(head, features, targets, z, order), expected, torch.bfloat16)


@pytest.mark.parametrize("variant", ["det", *VARIANTS])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_and_log_probabilities_of_half_precision_are_finite_and_wide(autocast, link, variant):
    head = head_of(variant, link, dtype=torch.float32 if autocast else torch.bfloat16)
    if not autocast:
        head.to(torch.bfloat16)
    features, targets = torch.randn(B, D), targets_for(head, B)
    features = features if autocast else features.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        each = head.loss(features, targets, reduction="none")
        log_probs = head(features)
    assert each.dtype == torch.float32
    assert torch.isfinite(each).all()
    assert log_probs.dtype == (torch.float32 if autocast else torch.bfloat16)
    assert torch.isfinite(log_probs).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ["het-xl", "het-xl-own"])
def test_forty_thousand_equal_classes(variant, order, dtype):
    # A sum of 40,000 ones is 256 in bfloat16 and 2,048 in float16: the sums must be wide to give log K.
    classes = 40_000
    for link, expected in (("softmax", math.log(classes)), ("sigmoid", classes * math.log(2))):
        head = head_of(variant, link, classes=classes).to(dtype)
        with torch.no_grad():
            for linear in (head.classifier, getattr(head, "projection", None)):
                for parameter in [] if linear is None else linear.parameters():
                    parameter.zero_()
        ids, z = torch.arange(3), normals(head, 3, samples=40, dtype=dtype)
        loss = head.loss(torch.randn(3, D).to(dtype), ids, noise=z, order=order)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-5)
        loss.backward()
        # Softmax: 1 / K for every class, less a third for each of the three labels; over τ.
        p = 1 / classes if link == "softmax" else 0.5
        bias = head.classifier.bias.grad.float() * 1.3
        torch.testing.assert_close(bias[3:], torch.full((classes - 3,), p), rtol=0.01, atol=0)
        torch.testing.assert_close(bias[:3], torch.full((3,), p - 1 / 3), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("link", "scale"), [("softmax", 2.0**12), ("softmax", 2.0**15), ("softmax", 2.0**16), ("sigmoid", 2.0**6)]
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_scaled_loss_of_float16(variant, order, link, scale):
    # As torch.amp.GradScaler does, which starts at 2¹⁶. Probabilities of 1 / K over B · S are below float16's smallest
    # number, 6e-8, before they are scaled; and 2¹⁶ is beyond its largest. The sigmoid's gradients sum over all classes:
    # a scale for which they overflow by themselves would be refused by the scaler.
    head = head_of(variant, link, classes=4000)
    features, targets = torch.randn(32, D), torch.randint(4000, (32,))
    z = normals(head, 32, samples=16, dtype=torch.float32)
    expected = results(head, features, targets, z, order)
    actual = results(head, features, targets, z, order, autocast=torch.float16, scale=scale)
    assert_near(actual, expected, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_with_a_gradient_scaler(dtype):
    head = head_of("het-xl", classes=200)
    backbone = torch.nn.Linear(D, D)
    optimiser = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    features, targets = torch.randn(B, D), torch.randint(200, (B,))
    z = normals(head, B, samples=S, dtype=torch.float32)
    losses = []
    for _ in range(4):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = head.loss(backbone(features), targets, noise=z)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
    # Every step was taken: none was skipped for an infinite gradient.
    assert sorted(losses, reverse=True) == losses
    assert len(set(losses)) == len(losses)
