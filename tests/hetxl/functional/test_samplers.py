import math

import pytest
import torch

from hetxl.functional import (
    SAMPLERS,
    Affine,
    ClassifierLift,
    GaussianNoise,
    LogitDistribution,
    Targets,
    draw_normals,
    mc_nll,
)

NAMES = list(SAMPLERS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("batch", "samples", "size"), [(3, 7, 4), (2, 1, 5), (1, 20, 3), (0, 4, 3), (2, 3, 0), (2, 5, 1)]
)
def test_samplers_return_the_requested_shape(name, batch, samples, size):
    z = SAMPLERS[name](batch, samples, size, generator=generator())
    assert z.shape == (batch, samples, size)
    assert z.dtype == torch.float32
    assert torch.isfinite(z).all()
    assert SAMPLERS[name](batch, samples, size, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("samples", [1, 4, 11])
def test_each_draw_is_standard_normal(name, samples):
    # Over 40,000 examples, for each draw by itself: mean ± 0.005, covariance ± 0.007 (one standard error), fourth
    # moment 3 ± 0.049. Allowed are five standard errors. So any function of one draw has the right mean.
    z = SAMPLERS[name](40_000, samples, 3, generator=generator(), dtype=torch.float64)
    assert z.mean(0).abs().max() < 0.025
    covariance = torch.einsum("bsi,bsj->sij", z, z) / len(z)
    assert (covariance - torch.eye(3, dtype=torch.float64)).abs().max() < 0.036
    assert (z.pow(4).mean(0) - 3).abs().max() < 0.25


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_independent(name):
    # 20,000 calls of two examples: the correlation of their first draws is 0 ± 0.007.
    calls = 400 if name == "sobol" else 20_000
    draws = SAMPLERS[name]
    if name == "sobol":  # one net for each call
        pairs = torch.stack([draws(2, 1, 2, generator=generator(seed)) for seed in range(calls)])[:, :, 0]
    else:
        pairs = draws(2 * calls, 2, 2, generator=generator())[:, 0].reshape(calls, 2, 2)
    assert (pairs[:, 0] * pairs[:, 1]).mean(0).abs().max() < 5 / math.sqrt(calls)


@pytest.mark.parametrize("name", ["antithetic", "orthogonal"])
def test_draws_come_in_opposite_pairs(name):
    z = SAMPLERS[name](5, 9, 3, generator=generator())
    assert torch.equal(z[:, 0:8:2], -z[:, 1:8:2])


def test_orthogonal_directions_are_orthogonal_within_a_block():
    z = SAMPLERS["orthogonal"](4, 24, 5, generator=generator(), dtype=torch.float64)[:, ::2]  # 12 directions of size 5
    for start in (0, 5, 10):
        block = z[:, start : start + 5]
        gram = block @ block.mT
        assert (gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-10


def test_orthogonal_lengths_are_chi_distributed():
    # Chi squared with 4 degrees of freedom: mean 4, variance 8; over 40,000 lengths ± 0.014 and ± 0.12.
    lengths = SAMPLERS["orthogonal"](10_000, 8, 4, generator=generator(), dtype=torch.float64)[:, ::2].square().sum(-1)
    assert abs(lengths.mean() - 4) < 0.07
    assert abs(lengths.var() - 8) < 0.6
    # and independent of each other, although their directions are not
    correlation = torch.corrcoef(lengths.T)
    assert (correlation - torch.eye(4, dtype=torch.float64)).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_draws_in_half_precision(name, dtype):
    draws = SAMPLERS[name](2, 6, 3, generator=generator(5), dtype=dtype)
    assert draws.dtype == dtype
    assert draws.float().std() == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("name", NAMES)
def test_a_generator_makes_draws_repeatable(name):
    first = SAMPLERS[name](2, 6, 3, generator=generator(5))
    torch.randn(3)  # the default generator has no part in it
    assert torch.equal(first, SAMPLERS[name](2, 6, 3, generator=generator(5)))
    assert not torch.equal(first, SAMPLERS[name](2, 6, 3, generator=generator(6)))
    torch.manual_seed(1)
    first = SAMPLERS[name](2, 6, 3)
    torch.manual_seed(1)
    assert torch.equal(first, SAMPLERS[name](2, 6, 3))


def error_of(name, samples, repeats=400):
    """Root-mean-square error of log p[y] of one example against 200,000 draws."""
    torch.manual_seed(3)
    options = {"dtype": torch.float64}
    features, weight = torch.randn(1, 8, **options), torch.randn(30, 8, **options)
    gaussian = GaussianNoise(torch.randn(5, 8, **options), None, torch.rand(1, 8, **options))
    distribution = LogitDistribution(features, Affine(weight), gaussian, ClassifierLift(weight))

    def log_prob(z):
        ids = Targets(ids=torch.full((len(z),), 4))
        return -mc_nll(distribution, z, ids, temperature=5.0, link="softmax", order="factors", reduction="none")

    exact = log_prob(SAMPLERS["iid"](1, 200_000, distribution.size, generator=generator(1), **options))
    estimates = log_prob(SAMPLERS[name](repeats, samples, distribution.size, generator=generator(2), **options))
    return float((estimates - exact).square().mean().sqrt())


@pytest.mark.parametrize("name", ["antithetic", "orthogonal", "sobol"])
def test_every_other_sampler_beats_iid(name):
    # 400 repeats: a ratio of two errors is known to about 5 %. Measured ratios are near 0.7 and below.
    assert error_of(name, 64) < 0.85 * error_of("iid", 64)


def test_a_wide_diagonal_residual_is_drawn_in_pairs_beside_the_factors():
    for name in ("orthogonal", "sobol", "antithetic", "iid"):
        z = draw_normals(SAMPLERS[name], 2, 6, 3, 50, generator=generator())
        assert z.shape == (2, 6, 53)
    z = draw_normals(SAMPLERS["orthogonal"], 2, 6, 3, 50, generator=generator())
    assert torch.equal(z[:, ::2], -z[:, 1::2])


def test_sobol_rejects_too_many_dimensions():
    with pytest.raises(ValueError, match=r"at most 21201 dimensions and this noise needs 30000"):
        SAMPLERS["sobol"](1, 2, 30_000)
