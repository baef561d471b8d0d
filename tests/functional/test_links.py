import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import log_mean_exp, mean_sigmoid, mean_softmax, sigmoid_entropy, softmax_entropy

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
    found = entropy(log_probs)
    assert found[1] == 0
    torch.testing.assert_close(found[0], entropy(log_probs[:1, :2])[0])
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    assert gradient.isfinite().all()
