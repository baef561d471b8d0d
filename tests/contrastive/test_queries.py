import pytest
import torch
import torch.nn.functional as F

from hetxl.contrastive.queries import Queries, summed_loss
from hetxl.functional import GaussianNoise
from hetxl.functional.links import log_mean_exp

N, K, D, S = 5, 7, 4, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(samples, keys, own, link, scale, bias):
    logits = scale * samples @ keys.T + bias
    if link == "softmax":
        log_p = log_mean_exp(torch.log_softmax(logits, -1), dim=1)
        return -log_p[torch.arange(len(own)), own].sum()
    labels = torch.arange(K) == own[:, None]
    signs = torch.where(labels, 1.0, -1.0).unsqueeze(1)
    return -log_mean_exp(F.logsigmoid(signs * logits), dim=1).sum()


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("samples", [1, S])
@pytest.mark.parametrize("budget", [None, 300])
def test_explicit_draws(link, samples, budget):
    drawn, keys = normal(N, samples, D), normal(K, D, seed=1)
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-0.8, dtype=torch.float64, requires_grad=True) if link == "sigmoid" else None
    own = torch.tensor([3, 0, 6, 2, 2])
    queries = Queries.explicit(drawn)
    torch.testing.assert_close(queries.samples, drawn)
    found = summed_loss(queries, keys, own, link=link, scale=scale, bias=bias, memory_budget=budget)
    expected = plain(drawn, keys, own, link, scale, 0.0 if bias is None else bias)
    torch.testing.assert_close(found, expected)
    leaves = [tensor for tensor in (drawn, keys, scale, bias) if tensor is not None]
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_draws_of_a_gaussian(link):
    noise = GaussianNoise(normal(N, 2, D, seed=2), residual=normal(N, D, seed=3))
    features, keys, z = normal(N, D), normal(K, D, seed=1), normal(N, S, 3, seed=4).detach()
    queries = Queries(features, noise, z)
    scale, own = torch.tensor(1.7, dtype=torch.float64), torch.arange(N)
    torch.testing.assert_close(queries.samples, features.unsqueeze(1) + noise.draw(z))
    found = summed_loss(queries, keys, own, link=link, scale=scale)
    expected = plain(queries.samples, keys, own, link, scale, 0.0)
    torch.testing.assert_close(found, expected)
    leaves = [features, keys, noise.factors, noise.residual]
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_a_sigmoid_query_whose_own_key_is_elsewhere_has_no_pair_here():
    drawn, keys = normal(N, 1, D), normal(K, D, seed=1)
    own = torch.tensor([-1, 7, 3, -20, 100])
    scale = torch.tensor(1.7, dtype=torch.float64)
    found = summed_loss(Queries.explicit(drawn), keys, own, link="sigmoid", scale=scale)
    torch.testing.assert_close(found, plain(drawn, keys, own, "sigmoid", scale, 0.0))


def test_draws_of_another_precision():
    noise = GaussianNoise(normal(N, 2, D, seed=2), residual=normal(N, D, seed=3))
    features, z = normal(N, D).detach(), normal(N, S, 3, seed=4).detach()
    found = Queries(features.float(), noise, z.float()).samples
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, Queries(features, noise, z).samples.float())
