import itertools

import pytest
import torch
import torch.nn.functional as F

from hetxl.contrastive.chunked_loss import sigmoid_loss
from hetxl.functional import log_mean_exp

N, K, D, S = 6, 9, 4, 3
ALL = (True, True, True, True)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def operands(query_samples, key_samples):
    scale, bias = (torch.tensor(value, dtype=torch.float64) for value in (1.7, -0.8))
    return normal(N, query_samples, D), normal(K, key_samples, D, seed=1), scale, bias


def plain(queries, keys, scale, bias, offset):
    samples = max(queries.shape[1], keys.shape[1])
    sides = queries.expand(-1, samples, -1), keys.expand(-1, samples, -1)
    logits = scale * torch.einsum("nsd,ksd->snk", *sides) + bias
    signs = torch.full((len(queries), len(keys)), -1.0, dtype=logits.dtype)
    for i in range(len(queries)):
        if 0 <= offset + i < len(keys):
            signs[i, offset + i] = 1.0
    return -log_mean_exp(F.logsigmoid(signs * logits), dim=0).sum()


@pytest.mark.parametrize("budget", [None, 1, 500, 4000])
@pytest.mark.parametrize(("query_samples", "key_samples"), [*itertools.product((1, S), (1, S))])
@pytest.mark.parametrize("offset", [0, 3, 7, -4, 40])
def test_loss_and_gradients_are_those_of_two_plain_lines(query_samples, key_samples, offset, budget):
    values = operands(query_samples, key_samples)
    leaves = [value.clone().requires_grad_() for value in values]
    expected = plain(*leaves, offset)
    loss, actual = sigmoid_loss(*values, ALL, offset=offset, memory_budget=budget)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for computed, reference in zip(actual, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(computed, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("need", [*itertools.product((True, False), repeat=4)])
def test_only_requested_gradients_are_computed(need):
    values = operands(S, 1)
    loss, actual = sigmoid_loss(*values, need)
    whole, every = sigmoid_loss(*values, ALL)
    assert torch.equal(loss, whole)
    for needed, computed, reference in zip(need, actual, every, strict=True):
        assert (computed is None) != needed
        assert computed is None or torch.equal(computed, reference)


@pytest.mark.parametrize("samples", [1, S])
def test_logits_of_a_thousand(samples):
    queries, keys = (1000 * normal(N, samples, D, dtype=torch.float32) for _ in range(2))
    scale = torch.tensor(1.0)
    loss, actual = sigmoid_loss(queries, keys, scale, None, (True, True, True, False))
    assert loss.isfinite()
    assert all(each.isfinite().all() for each in actual if each is not None)


def test_float32_over_many_blocks():
    count = 1500
    queries, keys = F.normalize(normal(2, count, 1, 16), dim=-1)
    scale, bias = torch.tensor(10.0), torch.tensor(-10.0)
    exact, slopes = sigmoid_loss(queries, keys, scale.double(), bias.double(), ALL)
    loss, actual = sigmoid_loss(queries.float(), keys.float(), scale, bias, ALL, memory_budget=2**20)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    for computed, reference in zip(actual, slopes, strict=True):
        assert computed.dtype == torch.float32
        torch.testing.assert_close(computed.double(), reference, rtol=1e-4, atol=1e-5)


def test_loss_without_queries_is_zero():
    _, keys, scale, bias = operands(1, 1)
    loss, actual = sigmoid_loss(keys[:0], keys, scale, bias, ALL)
    assert loss == 0
    assert actual[0] is not None
    assert actual[0].shape == (0, 1, D)
