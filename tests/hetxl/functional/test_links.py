import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import (
    APPROXIMATIONS,
    approximate_log_probs,
    log_mean_exp,
    mean_sigmoid,
    mean_softmax,
    sigmoid_entropy,
    softmax_entropy,
)

LOGITS = st.lists(st.floats(-50, 50), min_size=12, max_size=12).map(
    lambda values: torch.tensor(values, dtype=torch.float64).reshape(3, 4)
)


@given(LOGITS)
def test_means_agree_with_plain_averages(logits):
    torch.testing.assert_close(mean_softmax(logits).exp(), logits.softmax(-1).mean(0))
    log_p, log_not_p = mean_sigmoid(logits)
    torch.testing.assert_close(log_p.exp(), logits.sigmoid().mean(0))
    torch.testing.assert_close(log_p.exp() + log_not_p.exp(), torch.ones(4, dtype=torch.float64))


@given(LOGITS, st.floats(-1e3, 1e3))
def test_a_shift_of_all_logits_changes_no_softmax(logits, shift):
    torch.testing.assert_close(mean_softmax(logits + shift), mean_softmax(logits), atol=1e-9, rtol=1e-9)


@given(LOGITS)
def test_averaging_never_lowers_the_entropy(logits):
    expected = softmax_entropy(logits.log_softmax(-1)).mean()
    assert softmax_entropy(mean_softmax(logits)) >= expected - 1e-12
    expected = sigmoid_entropy(torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)).mean()
    assert sigmoid_entropy(*mean_sigmoid(logits)) >= expected - 1e-12


def test_log_mean_exp_beyond_the_range_of_exp():
    values = torch.tensor([-2000.0, -2000.0, -3000.0])
    torch.testing.assert_close(log_mean_exp(values, 0), torch.tensor(-2000 + math.log(2 / 3)))


@pytest.mark.parametrize("scale", [1e4, 2e5])
def test_extreme_logits_stay_finite(scale):
    logits = torch.tensor([[scale, -scale, 0.0]]).requires_grad_()
    mean_softmax(logits).sum().backward()
    assert torch.isfinite(mean_softmax(logits)).all()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert all(torch.isfinite(part).all() for part in mean_sigmoid(logits))
    assert torch.isfinite(softmax_entropy(mean_softmax(logits))).all()
    assert torch.isfinite(sigmoid_entropy(*mean_sigmoid(logits))).all()


@pytest.mark.parametrize("entropy", [softmax_entropy, lambda log_p: sigmoid_entropy(log_p, log_p)])
def test_a_probability_of_zero_adds_nothing_to_the_entropy(entropy):
    log_probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64).log().requires_grad_()
    entropies = entropy(log_probs)
    assert entropies[1] == 0
    torch.testing.assert_close(entropies[0], entropy(log_probs[:1, :2])[0])
    (gradient,) = torch.autograd.grad(entropies.sum(), log_probs)
    assert gradient.isfinite().all()


K, Q = 6, 3


def gaussian(scale):
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    return 2 * torch.randn(4, K, **options), scale * torch.randn(4, Q, K, **options)


def exact(mean, factors, link, samples=400_000):
    """Averages over many antithetic samples."""
    z = torch.randn(samples // 2, Q, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = mean.unsqueeze(-2) + torch.cat((z, -z)) @ factors
    return mean_softmax(logits).exp() if link == "softmax" else mean_sigmoid(logits)[0].exp()


# Total variation (softmax) or largest error of a label (sigmoid) with noise of standard deviation √3 · scale.
BOUNDS = {
    "softmax": {
        "mean_field": {0.1: 0.006, 0.5: 0.08},
        "probit": {0.1: 0.008, 0.5: 0.12},
        "taylor": {0.1: 1e-3, 0.5: 0.12},
    },
    "sigmoid": {
        "mean_field": {0.1: 0.002, 0.5: 0.02},
        "probit": {0.1: 0.002, 0.5: 0.02},
        "taylor": {0.1: 1e-3, 0.5: 0.12},
    },
}


@pytest.mark.parametrize("scale", [0.1, 0.5])
@pytest.mark.parametrize("method", APPROXIMATIONS)
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_errors_stay_within_their_bounds(link, method, scale):
    mean, factors = gaussian(scale)
    log_p, _ = approximate_log_probs(method, mean, factors, link)
    error = (log_p.exp() - exact(mean, factors, link)).abs()
    error = error.sum(-1).max() / 2 if link == "softmax" else error.max()
    assert error < BOUNDS[link][method][scale]


@pytest.mark.parametrize("method", APPROXIMATIONS)
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_approximations_are_exact_without_noise(link, method):
    mean, factors = gaussian(0.0)
    log_p, log_not_p = approximate_log_probs(method, mean, factors, link)
    expected = mean.softmax(-1) if link == "softmax" else mean.sigmoid()
    torch.testing.assert_close(log_p.exp(), expected)
    if log_not_p is not None:
        torch.testing.assert_close(log_not_p.exp(), 1 - expected)


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
@pytest.mark.parametrize("method", APPROXIMATIONS)
def test_approximations_are_normalised_for_any_noise(method, scale):
    mean, factors = gaussian(scale)
    log_p, _ = approximate_log_probs(method, mean, factors, "softmax")
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    log_p, log_not_p = approximate_log_probs(method, mean, factors, "sigmoid")
    assert torch.isfinite(log_p).all()
    torch.testing.assert_close(log_p.exp() + log_not_p.exp(), torch.ones(4, K, dtype=torch.float64))


@pytest.mark.parametrize("method", ["mean_field", "taylor"])
def test_noise_that_moves_all_logits_together_changes_nothing(method):
    mean, factors = gaussian(0.5)
    common = torch.randn(4, Q, 1, dtype=torch.float64).expand_as(factors)
    alone, _ = approximate_log_probs(method, mean, torch.zeros_like(factors), "softmax")
    torch.testing.assert_close(approximate_log_probs(method, mean, common, "softmax")[0], alone)
    both = approximate_log_probs(method, mean, factors + common, "softmax")[0]
    torch.testing.assert_close(both, approximate_log_probs(method, mean, factors, "softmax")[0])


def test_taylor_is_the_second_order_term():
    # The error of a second-order expansion in antithetic noise falls with the fourth power of its scale.
    errors = []
    for scale in (0.2, 0.1):
        mean, factors = gaussian(scale)
        log_p, _ = approximate_log_probs("taylor", mean, factors, "softmax")
        # Expectation by Gauss-Hermite quadrature in 3 dimensions: exact to far below the error.
        nodes, weights = (torch.tensor(part) for part in __import__("numpy").polynomial.hermite_e.hermegauss(15))
        grid = torch.cartesian_prod(nodes, nodes, nodes)
        mass = torch.cartesian_prod(weights, weights, weights).prod(-1)
        probs = ((mean.unsqueeze(-2) + grid @ factors).softmax(-1) * (mass / mass.sum()).unsqueeze(-1)).sum(-2)
        errors.append(float((log_p.exp() - probs).abs().max()))
    assert 8 < errors[0] / errors[1] < 32
