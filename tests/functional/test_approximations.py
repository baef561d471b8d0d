import pytest
import torch

from hetxl.functional import APPROXIMATIONS, approximate_log_probs, mean_sigmoid, mean_softmax

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
def test_without_noise_they_are_exact(link, method):
    mean, factors = gaussian(0.0)
    log_p, log_not_p = approximate_log_probs(method, mean, factors, link)
    expected = mean.softmax(-1) if link == "softmax" else mean.sigmoid()
    torch.testing.assert_close(log_p.exp(), expected)
    if log_not_p is not None:
        torch.testing.assert_close(log_not_p.exp(), 1 - expected)


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
@pytest.mark.parametrize("method", APPROXIMATIONS)
def test_they_are_distributions_however_large_the_noise(method, scale):
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
