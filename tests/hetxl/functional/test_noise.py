import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import MIN_SCALE, GaussianNoise, residual_scale


def noise(kind, rank, size, residual, batch=(3,)):
    """A Gaussian of each form the covariances make."""
    options = {"dtype": torch.float64}
    factors = scale = None
    if kind == "shared":
        factors, scale = torch.randn(rank, size, **options), torch.randn(*batch, size, **options)
    elif kind == "own":
        factors = torch.randn(*batch, rank, size, **options)
    d = None if residual is None else torch.rand(*batch, size, **options) + 0.1
    return GaussianNoise(factors, scale, d, residual or "rank1")


FORMS = [
    ("shared", "rank1"),
    ("shared", "diagonal"),
    ("own", "rank1"),
    ("own", "diagonal"),
    ("none", "rank1"),
    ("none", "diagonal"),
    ("own", None),
]


@pytest.mark.parametrize(("kind", "residual"), FORMS)
@given(rank=st.integers(1, 4), size=st.integers(1, 6), samples=st.integers(1, 5))
def test_draw_is_the_normals_times_the_basis(kind, residual, rank, size, samples):
    gaussian = noise(kind, rank, size, residual)
    z = torch.randn(3, samples, gaussian.size, dtype=torch.float64)
    torch.testing.assert_close(gaussian.draw(z), z @ gaussian.basis())
    shared = z[0]
    torch.testing.assert_close(gaussian.draw(shared), shared @ gaussian.basis())


@pytest.mark.parametrize(("kind", "residual"), FORMS)
def test_samples_have_the_stated_covariance(kind, residual):
    # 200,000 draws: an entry's standard error is at most √(2 Σii Σjj / n) = 0.0032 √(Σii Σjj); allowed are five.
    gaussian = noise(kind, rank=3, size=4, residual=residual, batch=(1,))
    draws = gaussian.draw(torch.randn(1, 200_000, gaussian.size, dtype=torch.float64))[0]
    covariance = gaussian.covariance()[0]
    spread = covariance.diagonal().sqrt()
    error = (draws.T @ draws / len(draws) - covariance).abs() / torch.outer(spread, spread)
    assert error.max() < 0.016


def test_covariances_are_those_of_the_paper():
    v, d = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    factor = torch.randn(2, 4, dtype=torch.float64)
    low_rank = factor * v  # J ∘ (1 vᵀ)
    rank1 = GaussianNoise(factor, v, d, "rank1").covariance()
    torch.testing.assert_close(rank1, low_rank.T @ low_rank + torch.outer(d, d))
    diagonal = GaussianNoise(factor, v, d, "diagonal").covariance()
    torch.testing.assert_close(diagonal, low_rank.T @ low_rank + torch.diag(d**2))


def test_the_residual_scale_is_a_positive_standard_deviation():
    raw = torch.tensor([-200.0, 0.0, 200.0])
    torch.testing.assert_close(residual_scale(raw), torch.tensor([MIN_SCALE, 0.693147 + MIN_SCALE, 200 + MIN_SCALE]))


@pytest.mark.parametrize(("kind", "residual"), FORMS)
def test_projection_multiplies_by_the_basis(kind, residual):
    gaussian, rows = noise(kind, 2, 5, residual), torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(gaussian.project(rows), rows @ gaussian.basis().mT)


def test_of_examples_selects_rows_of_the_basis():
    shared, own = noise("shared", 2, 5, "rank1"), noise("own", 2, 5, None)
    few = shared.of_examples(torch.tensor([2, 0]))
    assert few.factors is shared.factors
    torch.testing.assert_close(few.basis(), shared.basis()[[2, 0]])
    torch.testing.assert_close(own.of_examples(slice(1, 2)).basis(), own.basis()[1:2])


@pytest.mark.parametrize(("kind", "residual"), FORMS)
def test_scaled_noise_has_scaled_draws(kind, residual):
    gaussian = noise(kind, rank=3, size=4, residual=residual)
    z = torch.randn(3, 5, gaussian.size, dtype=torch.float64)
    torch.testing.assert_close(gaussian.scaled(0.3).draw(z), 0.3 * gaussian.draw(z))
    torch.testing.assert_close(gaussian.scaled(0.3).covariance(), 0.09 * gaussian.covariance())
