"""Losses with their gradients at once, and a part at a time; the ring itself is in test_gather."""

import pytest
import torch
import torch.nn.functional as F

from hetxl.contrastive.chunked_loss import Queries, loss_in_parts, summed_loss
from hetxl.functional import GaussianNoise
from hetxl.functional.links import log_mean_exp

N, K, D, S = 5, 11, 4, 2


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def operands():
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-0.8, dtype=torch.float64, requires_grad=True)
    return normal(N, S, D), normal(K, D, seed=1), scale, bias


def in_parts(samples, keys, scale, bias, chunk, offset=3):
    return loss_in_parts(samples, keys, link="sigmoid", scale=scale, bias=bias, chunk=chunk, offset=offset)


@pytest.mark.parametrize("chunk", [1, 4, 11, 50, None])
def test_loss_in_chunks_equals_the_whole(chunk):
    leaves = samples, keys, scale, bias = operands()
    own = torch.arange(3, 3 + N)
    expected = summed_loss(Queries.explicit(samples), keys, own, link="sigmoid", scale=scale, bias=bias)
    actual = in_parts(*leaves, chunk)
    torch.testing.assert_close(actual, expected)
    for computed, reference in zip(
        torch.autograd.grad(3 * actual, leaves), torch.autograd.grad(3 * expected, leaves), strict=True
    ):
        torch.testing.assert_close(computed, reference)


def test_gradients_are_the_slopes():
    # Not gradcheck, which goes backward twice.
    leaves, step = operands(), 1e-5
    gradients = torch.autograd.grad(in_parts(*leaves, 4), leaves)
    generator = torch.Generator().manual_seed(5)
    for index, gradient in enumerate(gradients):
        way = torch.randn(gradient.shape, dtype=torch.float64, generator=generator)
        values = []
        for sign in (1, -1):
            moved = [leaf.detach() + sign * step * way if at == index else leaf for at, leaf in enumerate(leaves)]
            values.append(in_parts(*moved, 4).detach())
        torch.testing.assert_close((values[0] - values[1]) / (2 * step), (gradient * way).sum(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("samples", [1, S])
def test_softmax_loss_in_one_chunk_equals_the_whole(samples):
    drawn, keys, scale, _ = operands()
    leaves = drawn[:, :samples], keys, scale
    own = torch.arange(3, 3 + N)
    expected = summed_loss(Queries.explicit(leaves[0]), keys, own, link="softmax", scale=scale)
    actual = loss_in_parts(*leaves[:2], link="softmax", scale=scale, bias=None, offset=3)
    torch.testing.assert_close(actual, expected)
    for computed, reference in zip(
        torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(computed, reference)


def test_a_second_backward_pass_is_refused():
    leaves = operands()
    loss = in_parts(*leaves, 4)
    torch.autograd.grad(loss, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it again"):
        torch.autograd.grad(loss, leaves)


def test_only_what_needs_a_gradient_gets_one():
    samples, keys, scale, _ = operands()
    loss = in_parts(samples.detach(), keys, scale.detach(), None, 4)
    assert torch.autograd.grad(loss, keys)[0].shape == keys.shape
    with torch.no_grad():
        torch.testing.assert_close(in_parts(samples, keys, scale, None, 4), loss.detach())
    assert not in_parts(samples.detach(), keys.detach(), scale.detach(), None, 4).requires_grad


def test_only_gradients_are_stored_for_backward():
    leaves = operands()
    node = in_parts(*leaves, 4).grad_fn
    assert node.saved_tensors == ()
    stored = node.gradients.all()
    assert [gradient.shape for gradient in stored] == [leaf.shape for leaf in leaves]
    assert not any(gradient.requires_grad for gradient in stored)


N, K, D, S = 5, 7, 4, 3


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
def test_loss_of_explicit_draws_equals_the_plain_loss(link, samples, budget):
    drawn, keys = normal(N, samples, D), normal(K, D, seed=1)
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-0.8, dtype=torch.float64, requires_grad=True) if link == "sigmoid" else None
    own = torch.tensor([3, 0, 6, 2, 2])
    queries = Queries.explicit(drawn)
    torch.testing.assert_close(queries.samples, drawn)
    actual = summed_loss(queries, keys, own, link=link, scale=scale, bias=bias, memory_budget=budget)
    expected = plain(drawn, keys, own, link, scale, 0.0 if bias is None else bias)
    torch.testing.assert_close(actual, expected)
    leaves = [tensor for tensor in (drawn, keys, scale, bias) if tensor is not None]
    for computed, reference in zip(
        torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(computed, reference)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_gaussian_queries_give_the_loss_of_their_samples(link):
    noise = GaussianNoise(normal(N, 2, D, seed=2), residual=normal(N, D, seed=3))
    features, keys, z = normal(N, D), normal(K, D, seed=1), normal(N, S, 3, seed=4).detach()
    queries = Queries(features, noise, z)
    scale, own = torch.tensor(1.7, dtype=torch.float64), torch.arange(N)
    torch.testing.assert_close(queries.samples, features.unsqueeze(1) + noise.draw(z))
    actual = summed_loss(queries, keys, own, link=link, scale=scale)
    expected = plain(queries.samples, keys, own, link, scale, 0.0)
    torch.testing.assert_close(actual, expected)
    leaves = [features, keys, noise.factors, noise.residual]
    for computed, reference in zip(
        torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(computed, reference)


def test_a_sigmoid_query_whose_own_key_is_elsewhere_has_no_pair_here():
    drawn, keys = normal(N, 1, D), normal(K, D, seed=1)
    own = torch.tensor([-1, 7, 3, -20, 100])
    scale = torch.tensor(1.7, dtype=torch.float64)
    actual = summed_loss(Queries.explicit(drawn), keys, own, link="sigmoid", scale=scale)
    torch.testing.assert_close(actual, plain(drawn, keys, own, "sigmoid", scale, 0.0))


def test_draws_of_another_precision():
    noise = GaussianNoise(normal(N, 2, D, seed=2), residual=normal(N, D, seed=3))
    features, z = normal(N, D).detach(), normal(N, S, 3, seed=4).detach()
    actual = Queries(features.float(), noise, z.float()).samples
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, Queries(features, noise, z).samples.float())
