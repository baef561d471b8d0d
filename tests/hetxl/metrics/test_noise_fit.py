"""Noise for a trained classifier: found where the labels have it, left out where they do not."""

import pytest
import torch
import torch.nn.functional as F

from hetxl.functional.flips import flipped
from hetxl.functional.links import log_mean_exp
from hetxl.metrics import fit_noise, noise_fit
from hetxl.nn import DetHead, HetXLHead

D, K = 6, 5


def trained(link: str = "softmax", scale: float = 3.0) -> DetHead:
    """Return a classifier with known weights, on features whose scales differ."""
    generator = torch.Generator().manual_seed(0)
    head = DetHead(D, K, link=link).eval()
    with torch.no_grad():
        head.classifier.weight.copy_(scale * torch.randn(K, D, generator=generator) / SCALES)
        head.classifier.bias.copy_(torch.randn(K, generator=generator) - head.classifier.weight @ SHIFT)
    return head


SCALES, SHIFT = torch.tensor([1.0, 10.0, 0.1, 1.0, 1.0, 1.0]), torch.tensor([0.0, 30.0, 0.0, 0.0, 1.0, 0.0])


def rows(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) * SCALES + SHIFT


def noisy_labels(head: DetHead, features: torch.Tensor) -> torch.Tensor:
    """Draw labels as noise in the feature space gives them: the class of the most probable logit there."""
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(2)) * SCALES
    with torch.no_grad():
        return head(features + noise * torch.tensor([1.5, 1.5, 0, 0, 0, 0])).argmax(-1)


def test_noise_is_found_and_helps_on_new_rows():
    head, features = trained(), rows(1200)
    labels = noisy_labels(head, features)
    fit = fit_noise(head, features[:800], labels[:800], folds=2, steps=60)
    assert fit.choice in ("constant noise", "noise")
    assert fit.has_noise
    noisy = HetXLHead(D, K, rank=10, classifier=head.classifier).eval()
    fit.apply(noisy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        assert torch.equal(noisy.logit_distribution(features).mean, head.logit_distribution(features).mean)
        after = float(noisy.loss(features[800:], labels[800:], generator=generator))
        before = float(head.loss(features[800:], labels[800:]))
    assert after < min(before - 0.05, fit.losses["temperature"])
    assert after == pytest.approx(fit.losses[fit.choice], abs=0.1)  # the folds told the truth


def test_right_probabilities_stay_as_they_are():
    head, features = trained(scale=1.0), rows(600)
    with torch.no_grad():
        labels = torch.multinomial(head(features).exp(), 1, generator=torch.Generator().manual_seed(3))[:, 0]
    fit = fit_noise(head, features, labels, folds=2, steps=40)
    assert not fit.has_noise
    assert fit.temperature == pytest.approx(1.0, abs=0.2)
    assert "chosen: " in fit.describe()


def test_labels_that_are_any_class_alike_are_found():
    head, features = trained(), rows(900)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        labels = torch.multinomial(head(features).exp(), 1, generator=generator)[:, 0]
    flips = torch.rand(len(labels), generator=generator) < 0.3
    labels = torch.where(flips, torch.randint(K, labels.shape, generator=generator), labels)
    fit = fit_noise(head, features[:500], labels[:500], steps=30)
    assert fit.helps
    assert fit.flip_rate == pytest.approx(0.3, abs=0.1)
    applied = DetHead(D, K, classifier=head.classifier).eval()
    noise_fit.NoiseFit("flips", {}, fit.temperature, fit.flip_rate).apply(applied)
    with torch.no_grad():
        assert applied.loss(features[500:], labels[500:]) < head.loss(features[500:], labels[500:]) - 0.2


def test_a_choice_must_be_better_by_two_standard_errors():
    reference = torch.ones(100, dtype=torch.float64)
    gain = torch.tensor([0.0, 0.2], dtype=torch.float64).repeat(50)  # 0.1 on average, standard error 0.01
    assert noise_fit._choose({"temperature": reference, "flips": reference - gain}) == "flips"
    assert noise_fit._choose({"temperature": reference, "flips": reference - gain + 0.085}) == "temperature"


def test_written_out_gradients_are_those_of_autograd():
    head, features = trained(), (rows(60) - SHIFT) / SCALES
    weight, bias = head.classifier.weight.detach(), head.classifier.bias.detach()
    labels = torch.randint(K, (60,), generator=torch.Generator().manual_seed(6))
    problem = noise_fit._Problem(weight, bias, "softmax", flip_rate=0.0, rank=2, steps=4, seed=0)
    plain, part = problem.head(), torch.arange(10, 50)
    plain.flip_rate = 0.1
    start = plain.covariance.factor * (noise_fit.SHARED_START / noise_fit.START)
    factor, log_tau = start.clone().requires_grad_(), torch.zeros(()).requires_grad_()
    problem._train_shared([plain], features, labels, [part])

    directions = weight - weight.mean(0)
    unit = directions.square().sum(1).mean().sqrt()
    draws, order = (torch.Generator().manual_seed(0) for _ in range(2))
    for step in problem._steps((factor, log_tau)):
        batch = part[torch.randint(len(part), (noise_fit.SHARED_BATCH,), generator=order)]
        half = torch.randn(noise_fit.SHARED_SAMPLES // 2, 2, generator=draws)
        sampled = (F.linear(features[batch], weight, bias) / log_tau.exp()).unsqueeze(1)
        sampled = sampled + torch.cat((half, -half)) @ factor @ directions.T / unit
        own = sampled.log_softmax(-1)[torch.arange(len(batch)), :, labels[batch]]
        prior = factor.square().sum() / noise_fit.SHARED_PRIOR + log_tau.square() / noise_fit.TEMPERATURE_PRIOR
        (prior / (2 * len(part)) - flipped(log_mean_exp(own, 1), 0.1, K).mean()).backward()
        step()
    torch.testing.assert_close(plain.covariance.factor, (factor * log_tau.exp() / unit).detach())
    assert float(plain.temperature()) == pytest.approx(float(log_tau.detach().exp()), rel=1e-5)
    assert (factor - start).abs().max() > 0.01


def test_several_labels_are_fitted():
    head, features = trained("sigmoid"), rows(400)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        noise = 1.5 * torch.randn(features.shape, generator=generator) * SCALES
        labels = (head.logit_distribution(features + noise).mean > 0).long()
    fit = fit_noise(head, features, labels, folds=2, steps=40)
    assert min(fit.losses, key=lambda name: fit.losses[name]) != "none"
    assert fit.losses[fit.choice] < fit.losses["none"]


def test_the_fit_depends_on_the_seed_alone():
    head, features = trained(), rows(200)
    labels = noisy_labels(head, features)
    torch.manual_seed(5)
    first = fit_noise(head, features, labels, folds=2, steps=5)
    state = torch.random.get_rng_state()
    second = fit_noise(head, features, labels, folds=2, steps=5)
    assert first.losses == second.losses
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("features", "message"),
    [(rows(3), "at least 6 labelled rows"), (torch.full((20, D), torch.nan), "features must be finite")],
)
def test_wrong_rows_are_refused(features: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        fit_noise(trained(), features, torch.zeros(len(features), dtype=torch.int64))
