import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import IGNORE_INDEX, LabelLists, Targets, check_targets
from hetxl.functional.engine.sigmoid import LIMIT, LabelBlocks, mean_sigmoid_rows
from hetxl.functional.links import log_mean_exp

S = 5
EXTREMES = [
    [0.0] * S,
    [1e4] * S,
    [-1e4] * S,
    [100.0] * S,
    [-100.0] * S,
    [1e4, -1e4, 0.0, 100.0, -100.0],
    [1e4, 100.0, 90.0, 85.0, 80.5],
    [-1e4, -100.0, -90.0, -85.0, -80.5],
    [-1e4, -1e4, -1e4, -1e4, 3.0],
    [1e4, 1e4, 1e4, 1e4, -3.0],
    [LIMIT, LIMIT, LIMIT, LIMIT, LIMIT],
    [-LIMIT, -LIMIT - 1e-9, -LIMIT + 1e-9, -79.0, -81.0],
    [79.0, 81.0, 80.0, 103.0, 104.0],
    [709.0, 745.0, 746.0, 800.0, 1000.0],
]


def exact(logits):
    """log p̄ and log(1 − p̄) in float64, without leaving the logarithm."""
    logits = logits.double()
    return log_mean_exp(F.logsigmoid(logits), dim=-1), log_mean_exp(F.logsigmoid(-logits), dim=-1)


def check_gradients(logits, rtol, atol):
    """Any loss a log p̄ + b log(1 − p̄) has the gradient σ(u) σ(−u) (a / Σσ(u) − b / Σσ(−u))."""
    of_p, of_not_p = torch.randn(logits.shape[:-1]).double(), torch.randn(logits.shape[:-1]).double()
    leaf = logits.double().requires_grad_()
    log_p, log_not_p = exact(leaf)
    (expected,) = torch.autograd.grad((of_p * log_p + of_not_p * log_not_p).sum(), leaf)
    work = logits.clone()
    means = mean_sigmoid_rows(work, backward=True)
    factor = of_p * means.per_p - of_not_p * means.per_not_p
    torch.testing.assert_close(work.double() * factor.unsqueeze(-1), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_means_at_extreme_logits(dtype, tolerance):
    logits = torch.tensor(EXTREMES, dtype=dtype)
    means = mean_sigmoid_rows(logits.clone(), backward=False)
    for mean, expected in zip(means[:2], exact(logits), strict=True):
        assert torch.isfinite(mean).all()
        # A logarithm near 0 is log(1 − tiny): exact to an ulp of the 1, not of the tiny.
        torch.testing.assert_close(mean.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradients_at_extreme_logits(dtype, tolerance):
    torch.manual_seed(0)
    check_gradients(torch.tensor(EXTREMES, dtype=dtype), tolerance, tolerance)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("near", [60.0, 79.0, 80.5, 85.0])
def test_many_samples_beyond_one(near, sign):
    # In float32 σ(−89) is 0, yet a thousand samples that are e^9.5 times less likely than one add 7 % to its share.
    logits = torch.full((2, 1000), sign * (near + 9.5))
    logits[:, 0] = sign * near
    means = mean_sigmoid_rows(logits.clone(), backward=False)
    for mean, expected in zip(means[:2], exact(logits), strict=True):
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
    check_gradients(logits, 1e-5, 1e-5)


@given(
    st.lists(st.lists(st.floats(-300, 300), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from([1.0, 30.0]),
)
def test_means_and_gradients_are_exact_for_any_logits(rows, scale):
    torch.manual_seed(0)
    logits = torch.tensor(rows, dtype=torch.float64) * scale
    means = mean_sigmoid_rows(logits.clone(), backward=False)
    for mean, expected in zip(means[:2], exact(logits), strict=True):
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    check_gradients(logits, 1e-11, 1e-11)


@pytest.mark.parametrize("samples", [1, 2, 7, 1000])
def test_any_number_of_samples(samples):
    logits = 3 * torch.randn(4, 3, samples, dtype=torch.float64)
    means = mean_sigmoid_rows(logits.clone(), backward=False)
    p = torch.sigmoid(logits).mean(-1)
    torch.testing.assert_close(means.log_p, p.log())
    torch.testing.assert_close(means.log_not_p, (1 - p).log())
    torch.testing.assert_close(means.per_p, 1 / (samples * p))
    torch.testing.assert_close(means.per_not_p, 1 / (samples * (1 - p)))
    check_gradients(logits, 1e-11, 1e-11)


def test_the_logits_become_the_derivative_of_the_sigmoid():
    logits = torch.randn(3, S, dtype=torch.float64)
    expected = torch.sigmoid(logits) * torch.sigmoid(-logits)
    mean_sigmoid_rows(logits, backward=True)
    torch.testing.assert_close(logits, expected)


def test_no_loss_at_a_certain_and_right_answer():
    means = mean_sigmoid_rows(torch.tensor([[1e4, 2e4], [-1e4, -2e4]]), backward=True)
    assert means.log_p[0] == 0
    assert means.log_not_p[1] == 0
    # And for the wrong one the loss of the nearer sample, less log S for the other.
    assert means.log_not_p[0].item() == pytest.approx(-1e4 - math.log(2), rel=1e-6)
    assert means.log_p[1].item() == pytest.approx(-1e4 - math.log(2), rel=1e-6)


B, K = 6, 11
LIKE = torch.empty(0, dtype=torch.float64)
SOFT = torch.rand(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IDS = torch.tensor([3, 0, 10, 5, 7, 7])
LISTS = [[0, 4], [], [10], [1, 2, 3], list(range(K)), [5]]


def matrix_of_lists():
    out = torch.zeros(B, K, dtype=torch.float64)
    for example, classes in enumerate(LISTS):
        out[example, classes] = 1
    return out


SPARSE = SOFT * (SOFT > 0.6)
FORMS = {
    "dense": (SOFT, SOFT),
    "integers": ((SOFT > 0.5).long(), (SOFT > 0.5).double()),
    "ids": (IDS, torch.nn.functional.one_hot(IDS, K).double()),
    "lists": (LISTS, matrix_of_lists()),
    "sparse": (SPARSE.to_sparse(), SPARSE),
    "empty": ([[]] * B, torch.zeros(B, K, dtype=torch.float64)),
}


def slices(total):
    """Any slice with at least one entry."""
    pairs = st.tuples(st.integers(0, total - 1), st.integers(1, total))
    return pairs.map(lambda pair: slice(pair[0], min(total, pair[0] + pair[1])))


@pytest.mark.parametrize("form", FORMS)
@given(examples=slices(B), classes=slices(K))
def test_a_block_is_a_slice_of_the_matrix(form, examples, classes):
    targets, matrix = FORMS[form]
    blocks = LabelBlocks(check_targets(targets, torch.Size([B]), K, "sigmoid"), LIKE)
    torch.testing.assert_close(blocks.block(examples, classes), matrix[examples, classes].T, rtol=0, atol=0)


def test_a_label_named_twice_is_one_label():
    blocks = LabelBlocks(Targets(lists=LabelLists.from_lists([[2, 2, 2], [1]])), LIKE)
    assert blocks.block(slice(0, 2), slice(0, 4)).T.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("form", FORMS)
def test_blocks_have_the_precision_of_the_sums(form):
    targets, matrix = FORMS[form]
    like = torch.empty(0, dtype=torch.float32)
    block = LabelBlocks(check_targets(targets, torch.Size([B]), K, "sigmoid"), like).block(slice(0, B), slice(0, K))
    assert block.dtype == torch.float32
    torch.testing.assert_close(block, matrix.T.float(), rtol=0, atol=0)


def test_a_block_of_examples_that_are_left_out_can_be_made():
    # An ignored id is read as class 0; the example's weight of 0 takes it out of the loss.
    blocks = LabelBlocks(Targets(ids=torch.tensor([IGNORE_INDEX, 2])), LIKE)
    assert blocks.block(slice(0, 2), slice(0, 3)).shape == (3, 2)


def test_a_batch_of_several_dimensions_is_flattened():
    for targets in (Targets(ids=IDS.view(2, 3)), Targets(dense=torch.nn.functional.one_hot(IDS, K).view(2, 3, K))):
        block = LabelBlocks(targets, LIKE).block(slice(2, 5), slice(0, K))
        assert block.argmax(0).tolist() == IDS[2:5].tolist()
