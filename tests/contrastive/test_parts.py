"""Losses with their gradients at once, and a part at a time; the ring itself is in test_gather."""

import pytest
import torch

from hetxl.contrastive.parts import loss_in_parts
from hetxl.contrastive.queries import Queries, summed_loss

N, K, D, S = 5, 11, 4, 2


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def given():
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-0.8, dtype=torch.float64, requires_grad=True)
    return normal(N, S, D), normal(K, D, seed=1), scale, bias


def in_parts(samples, keys, scale, bias, chunk, offset=3):
    return loss_in_parts(samples, keys, link="sigmoid", scale=scale, bias=bias, chunk=chunk, offset=offset)


@pytest.mark.parametrize("chunk", [1, 4, 11, 50, None])
def test_parts_add_up(chunk):
    leaves = samples, keys, scale, bias = given()
    own = torch.arange(3, 3 + N)
    expected = summed_loss(Queries.explicit(samples), keys, own, link="sigmoid", scale=scale, bias=bias)
    found = in_parts(*leaves, chunk)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(3 * found, leaves), torch.autograd.grad(3 * expected, leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_gradients_are_the_slopes():
    # Not gradcheck, which goes backward twice.
    leaves, step = given(), 1e-5
    gradients = torch.autograd.grad(in_parts(*leaves, 4), leaves)
    generator = torch.Generator().manual_seed(5)
    for place, gradient in enumerate(gradients):
        way = torch.randn(gradient.shape, dtype=torch.float64, generator=generator)
        values = []
        for sign in (1, -1):
            moved = [leaf.detach() + sign * step * way if at == place else leaf for at, leaf in enumerate(leaves)]
            values.append(in_parts(*moved, 4).detach())
        torch.testing.assert_close((values[0] - values[1]) / (2 * step), (gradient * way).sum(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("samples", [1, S])
def test_the_softmax_at_once(samples):
    drawn, keys, scale, _ = given()
    leaves = drawn[:, :samples], keys, scale
    own = torch.arange(3, 3 + N)
    expected = summed_loss(Queries.explicit(leaves[0]), keys, own, link="softmax", scale=scale)
    found = loss_in_parts(*leaves[:2], link="softmax", scale=scale, bias=None, offset=3)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_a_second_backward_pass_is_refused():
    leaves = given()
    loss = in_parts(*leaves, 4)
    torch.autograd.grad(loss, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it again"):
        torch.autograd.grad(loss, leaves)


def test_only_what_needs_a_gradient_gets_one():
    samples, keys, scale, _ = given()
    loss = in_parts(samples.detach(), keys, scale.detach(), None, 4)
    assert torch.autograd.grad(loss, keys)[0].shape == keys.shape
    with torch.no_grad():
        torch.testing.assert_close(in_parts(samples, keys, scale, None, 4), loss.detach())
    assert not in_parts(samples.detach(), keys.detach(), scale.detach(), None, 4).requires_grad


def test_what_is_kept_for_backward_is_the_gradients():
    leaves = given()
    node = in_parts(*leaves, 4).grad_fn
    assert node.saved_tensors == ()
    kept = node.gradients.all()
    assert [gradient.shape for gradient in kept] == [leaf.shape for leaf in leaves]
    assert not any(gradient.requires_grad for gradient in kept)
