import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional.engine.softmax import (
    MeanLogProbs,
    Mixer,
    Normalisers,
    column_max,
    exp_columns,
    factors_nll,
    log_probs_gradient,
    log_softmax_columns,
    subtract_at_targets,
    sum_of_softmax,
)
from hetxl.functional.links import log_mean_exp, mean_softmax

G, K, S, P = 3, 7, 5, 4
LIKE = torch.empty(0, dtype=torch.float64)
SCALES = [0.0, 1.0, 30.0, 1e4]  # at 1e4 every probability but one underflows
SIZES = [(G, K, S, P), (1, K, S, P), (G, 1, S, P), (G, K, 1, P), (2, 5, 7, 1)]


def naive_nll(logits, ids):
    """−log p̄[y] of logits [g, S, K]."""
    log_p = torch.log_softmax(logits, -1).gather(-1, ids.view(-1, 1, 1).expand(*logits.shape[:2], 1)).squeeze(-1)
    return -log_mean_exp(log_p, dim=-1)


def tensor(*shape, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64)


def close(actual, expected, tolerance=1e-11):
    """Equal relative to the largest entry."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("class_major", [False, True])
@pytest.mark.parametrize("sizes", [(G, K, S), (7, 64, 16), (2, 32, 16), (1, 6, 16)])
def test_exp_columns_give_softmax_and_normaliser(sizes, class_major, scale):
    logits = tensor(*sizes, scale=scale)
    work = logits.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    work = work if class_major else logits.clone()
    top, total = exp_columns(work)
    torch.testing.assert_close(top, logits.amax(1), rtol=0, atol=0)
    assert top.shape == total.shape == logits.sum(1).shape
    close(top + total.log(), logits.logsumexp(1))
    close(work / total.unsqueeze(1), logits.softmax(1))


@pytest.mark.parametrize("class_major", [False, True])
@pytest.mark.parametrize("sizes", [(3, 8, 16), (1, 12, 8), (5, 7, 16), (2, 6, 32), (4, 10, 3)])
def test_the_maximum_is_that_of_every_column(sizes, class_major):
    group, classes, samples = sizes
    logits = torch.randn(classes, group, samples).transpose(0, 1) if class_major else torch.randn(*sizes)
    assert torch.equal(column_max(logits), logits.amax(1))
    assert torch.equal(column_max(logits[..., ::2]), logits[..., ::2].amax(1))


@pytest.mark.parametrize("group", [1, 2, G])
def test_mixer_computes_samples_and_gradients(group):
    # The buffers are made for more than is used, and are used again.
    mixer = Mixer(G, K + 2, P, S + 1, LIKE)
    for _ in range(2):
        rows, mixing = tensor(K, group, P), tensor(group, S, P)
        mixer.start(rows)
        logits = mixer.sample(mixing)
        close(logits, torch.einsum("kgp,gsp->gks", rows, mixing))
        values, factor = tensor(group, K, S), torch.rand(group, dtype=torch.float64)
        mixer.add(values, mixing)
        once = torch.einsum("gks,gsp->kgp", values, mixing)
        close(mixer.gradient(), once)
        mixer.add(values, mixing, factor)
        close(mixer.gradient(), once * factor[:, None] + once)
        mixer.add(values, mixing)
        close(mixer.gradient(), once * factor[:, None] + 2 * once)


@pytest.mark.parametrize("class_major", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_sum_of_softmax_matches_torch(class_major, scale):
    logits = tensor(G, K, S, scale=scale)
    work = logits.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    work = work if class_major else logits.clone()
    entropies = torch.ones(G, dtype=torch.float64)
    sums = sum_of_softmax(work, torch.empty(2 * logits.numel(), dtype=torch.float64), entropies)
    probs = logits.softmax(1)
    close(sums, probs.sum(-1))
    close(entropies, 1 + torch.special.entr(probs).sum((1, 2)))


@pytest.mark.parametrize("sample_block", [1, 2, 3, S, S + 4])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("sizes", SIZES)
def test_factors_nll_equals_the_naive_loss(sizes, scale, sample_block):
    group, classes, samples, width = sizes
    rows = tensor(classes, group, width, scale=scale).requires_grad_()
    mixing, ids = tensor(group, samples, width), torch.randint(classes, (group,))
    expected = naive_nll(torch.einsum("kgp,gsp->gsk", rows, mixing), ids)
    mixer = Mixer(group, classes, width, min(sample_block, samples), LIKE)
    mixer.start(rows.detach())
    losses, factor = factors_nll(mixer, mixing, ids, sample_block, backward=True)
    close(losses, expected.detach())
    (gradient,) = torch.autograd.grad(expected.sum(), rows)
    close(mixer.gradient() * factor.unsqueeze(-1), gradient, 1e-11 * max(1, scale))
    mixer.start(rows.detach())
    assert torch.equal(factors_nll(mixer, mixing, ids, sample_block, backward=False)[0], losses)


def test_the_best_sample_may_come_last():
    # Each sample is 1,000 nats better than the one before: what was summed so far must be forgotten.
    rows = torch.tensor([[[1.0]], [[0.0]]], dtype=torch.float64).requires_grad_()  # [K, 1, P]: u = (z, 0)
    mixing = torch.tensor([[[-3000.0], [-2000.0], [-1000.0]]], dtype=torch.float64)  # [1, S, P]
    ids = torch.tensor([0])
    mixer = Mixer(1, 2, 1, 1, LIKE)
    mixer.start(rows.detach())
    losses, factor = factors_nll(mixer, mixing, ids, 1, backward=True)
    assert losses.item() == pytest.approx(1000 + math.log(3))
    (expected,) = torch.autograd.grad(naive_nll(torch.einsum("kgp,gsp->gsk", rows, mixing), ids).sum(), rows)
    close(mixer.gradient() * factor.unsqueeze(-1), expected)


@given(start=st.integers(0, K), size=st.integers(1, K), ids=st.lists(st.integers(0, K - 1), min_size=G, max_size=G))
def test_subtract_at_targets(start, size, ids):
    torch.manual_seed(0)
    rows, values, ids = tensor(size, G, P), tensor(G, P), torch.tensor(ids)
    expected = rows.clone()
    for example, label in enumerate(ids.tolist()):
        if start <= label < start + size:
            expected[label - start, example] -= values[example]
    subtract_at_targets(rows, ids, values, start)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("class_block", [1, 3, K])
@pytest.mark.parametrize("sample_block", [1, 2, S])
def test_normalisers_over_blocks_of_classes_and_samples(class_block, sample_block, scale):
    logits, ids = tensor(G, K, S, scale=scale), torch.randint(K, (G,))
    normalisers = Normalisers(LIKE, G, S)
    for start in range(0, K, class_block):
        for first in range(0, S, sample_block):
            samples = slice(first, min(first + sample_block, S))
            normalisers.add(logits[:, start : start + class_block, samples].clone(), ids, samples, start)
    normaliser, log_p = normalisers.finished()
    close(normaliser, logits.logsumexp(1))
    close(log_p, logits.log_softmax(1)[torch.arange(G), ids])


@pytest.mark.parametrize("scale", SCALES)
def test_log_softmax_of_columns_works_in_place(scale):
    logits = tensor(G, K, S, scale=scale)
    expected = logits.log_softmax(1)
    log_probs = log_softmax_columns(logits)
    assert log_probs is logits
    close(log_probs, expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("sample_block", [1, 2, 3, S])
def test_mean_log_probs_over_blocks_of_samples(sample_block, scale):
    logits = tensor(G, S, K, scale=scale)
    mean = MeanLogProbs(LIKE, G, K)
    for first in range(0, S, sample_block):
        mean.add(logits[:, first : first + sample_block].log_softmax(-1).mT.clone())
    close(mean.finished(), mean_softmax(logits))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("samples", [1, S])
def test_log_probs_gradient_matches_autograd(samples, scale):
    logits = tensor(G, K, samples, scale=scale).requires_grad_()
    mean, gradient = mean_softmax(logits.mT), tensor(G, K)
    (expected,) = torch.autograd.grad((mean * gradient).sum(), logits)
    log_probs = logits.detach().log_softmax(1)
    close(log_probs_gradient(log_probs, mean.detach(), gradient, samples), expected)
