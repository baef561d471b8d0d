import math

import pytest
import torch
import torch.nn.functional as F

from hetxl.contrastive import NoisyEmbedding
from hetxl.functional.contrastive import noise_scale

B, D = 40, 8
FORMS = [
    {"covariance": "low_rank", "rank": 3},
    {"covariance": "low_rank", "rank": 3, "residual": "diagonal"},
    {"covariance": "efficient", "rank": 3},
    {"covariance": "diagonal"},
    {"covariance": "diagonal", "residual": "diagonal"},
    {"covariance": "full"},
]


def embeddings(count=B, width=D, seed=0):
    drawn = torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(drawn, dim=-1)


def build(seed=0, **options):
    torch.manual_seed(seed)
    return NoisyEmbedding(D, dtype=torch.float64, **options)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_draws_of_the_gaussian(form):
    module, x = build(**form), embeddings().requires_grad_()
    noise = module(x)
    z = module.draw(noise, 2, seeded())
    assert z.shape == (B, 2, module.size)
    assert noise.size == module.size
    weight = torch.randn(B, 2, D, dtype=torch.float64, generator=seeded(1))
    parameters = [x, *module.parameters()]
    plain = x.unsqueeze(1) + noise.draw(z)
    expected = torch.autograd.grad((plain * weight).sum(), parameters, retain_graph=True)
    drawn = module.add_to(x, z)
    torch.testing.assert_close(drawn, plain)
    for actual, value in zip(torch.autograd.grad((drawn * weight).sum(), parameters), expected, strict=True):
        torch.testing.assert_close(actual, value)
    torch.testing.assert_close(module.add_to(3 * x, z, unit=True), plain)
    shared = z[0]
    torch.testing.assert_close(module.add_to(x, shared), x.unsqueeze(1) + noise.draw(shared))


@pytest.mark.parametrize("form", FORMS)
def test_the_score_is_the_size_of_the_noise(form):
    module, x = build(**form), embeddings(1100)
    torch.testing.assert_close(module.scale_of(x), noise_scale(module(x)))
    assert module.scale_of(x[:0]).shape == (0,)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_noise_starts_with_a_length_that_is_a_share_of_the_embeddings(form, share):
    width = 64
    torch.manual_seed(0)
    module = NoisyEmbedding(width, noise_init=share, dtype=torch.float64, **form)
    x = embeddings(200, width)
    length = (math.sqrt(width) * module.scale_of(x)).mean().item()
    assert 0.5 * share < length < 2 * share


def test_reset_parameters_keeps_the_noise_scale():
    module, x = build(noise_init=0.3), embeddings(200)
    before = module.scale_of(x).mean()
    module.reset_parameters()
    torch.testing.assert_close(module.scale_of(x).mean(), before, rtol=0.2, atol=0)


def test_examples_of_a_group_share_coefficients_up_to_a_sign():
    module = build(rank=6, group=2)
    assert module.group_of(B, 1) == 2
    z = module.draw(B, 1, seeded())
    mixing = z[:, 0, :6]
    torch.testing.assert_close(mixing[0::2].abs(), mixing[1::2].abs())
    signs = (mixing[0::2] / mixing[1::2])[:, 0]
    assert set(signs.tolist()) == {1.0, -1.0}
    assert not torch.allclose(z[0::2, 0, 6].abs(), z[1::2, 0, 6].abs())  # the residual's normals are each one's own
    assert not torch.allclose(mixing[0].abs(), mixing[2].abs())


def test_shared_draws_are_standard_normals_and_those_of_two_examples_are_uncorrelated():
    module, batch = build(rank=6, group=4), 80_000
    z = module.draw(batch, 1, seeded())[:, 0]
    assert module.group_of(batch, 1) == 4
    torch.testing.assert_close(z.mT @ z / batch, torch.eye(7, dtype=z.dtype), rtol=0, atol=0.05)
    first, second = z[0::4], z[1::4]
    torch.testing.assert_close(first.mT @ second / len(first), torch.zeros(7, 7, dtype=z.dtype), rtol=0, atol=0.05)
    torch.testing.assert_close(z.pow(4).mean(0), torch.full((7,), 3.0, dtype=z.dtype), rtol=0, atol=0.2)


@pytest.mark.parametrize("batch", [64, 75])
def test_grouped_samples_are_those_of_their_normals(batch):
    module, x = build(rank=8, group=4), embeddings(batch)
    group = module.group_of(batch, 2)
    assert group == 4
    z = module.draw(batch, 2, seeded())
    torch.testing.assert_close(module.add_to(x, z, group), module.add_to(x, z))
    torch.testing.assert_close(module.add_to(x, z, group), x.unsqueeze(1) + module(x).draw(z))


def test_draws_are_shared_only_in_large_batches():
    module = build(rank=15)
    assert module.group_of(16 * 64, 1) == 64
    assert module.group_of(16 * 8 + 3, 1) == 8  # at least sixteen groups
    assert module.group_of(16, 1) == 1
    assert module.group_of(1024, 100) == 1  # the factors cost less than that many samples
    assert build(rank=15, group=1).group_of(1024, 1) == 1
    assert build(rank=15, sampler="antithetic").group_of(1024, 1) == 1
    assert build(rank=15, covariance="efficient").group_of(1024, 1) == 1


def test_draws_come_from_the_generator():
    module = build(rank=6, group=2)
    first, again, other = (module.draw(B, 2, seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"covariance": "lowrank"}, ValueError, "covariance must be one of .* did you mean 'low_rank'"),
        ({"sampler": "gauss"}, ValueError, "sampler must be one of 'iid'"),
        ({"noise_init": 0.0}, ValueError, "noise_init must be positive"),
        ({"group": 0}, ValueError, "group must be at least 1"),
        ({"rank": 1.5}, TypeError, "rank must be an integer"),
    ],
)
def test_invalid_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        NoisyEmbedding(D, **options)


def test_repr_has_the_dimension():
    assert "D=8" in repr(NoisyEmbedding(8))


def test_old_names_of_arguments_warn_and_work():
    with pytest.warns(DeprecationWarning, match="features= is now in_features="):
        assert NoisyEmbedding(features=D).in_features == D  # pyright: ignore[reportCallIssue]
    with pytest.warns(DeprecationWarning, match='is now "iid"'):
        assert NoisyEmbedding(D, sampler="normal").sampler == "iid"
    with pytest.raises(TypeError, match="pass in_features= alone"):
        NoisyEmbedding(in_features=D, features=D)  # pyright: ignore[reportCallIssue]
