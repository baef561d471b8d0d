"""Noise without the factors of the batch, against the factors themselves."""

import pytest
import torch
import torch.nn.functional as F

from hetxl.contrastive import ContrastiveLoss
from hetxl.contrastive import low_rank_noise as draws
from hetxl.contrastive.low_rank_noise import add_noise
from hetxl.functional.noise import residual_scale

B, S, D, R = 12, 2, 4, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def inputs(bias=True, residual=True):
    """Embeddings, weight and bias of the factors and of the residual."""
    return (
        normal(B, D),
        normal(D * R, D, seed=1),
        normal(D * R, seed=2) if bias else None,
        normal(D, D, seed=3) if residual else None,
        normal(D, seed=4) if residual else None,
    )


def plain(x, weight, bias, residual_weight, residual_bias, z, rows):
    factors = F.linear(x, weight, bias)
    factors = factors.unflatten(-1, (R, D)) if rows else factors.unflatten(-1, (D, R)).mT
    out = x.unsqueeze(1) + z[..., :R] @ factors
    if residual_weight is None:
        return out
    return out + z[..., R:] * residual_scale(F.linear(x, residual_weight, residual_bias)).unsqueeze(1)


def assert_same(operands, z, **options):
    leaves = [tensor for tensor in operands if tensor is not None and tensor.requires_grad]
    actual = add_noise(*operands, z, R, **options)
    x, *others = operands
    x = F.normalize(x, dim=-1) if options.get("unit") else x
    expected = plain(x, *others, z, options.get("rows", False))
    torch.testing.assert_close(actual, expected)
    weight = normal(*actual.shape, seed=9).detach()
    actual, expected = (torch.autograd.grad((value * weight).sum(), leaves) for value in (actual, expected))
    for computed, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(computed, reference)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks, the last of them smaller."""
    monkeypatch.setattr(draws, "BLOCK", 5)
    monkeypatch.setattr(draws, "GROUPS", 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("residual", [0, 1, D])
def test_noise_is_that_of_the_factors_and_the_residual(residual, rows, bias):
    assert_same(inputs(bias, residual > 0), normal(B, S, R + residual, seed=5).detach(), rows=rows)


def shared_normals(group, size=R + 1):
    """Normals whose first R columns are the same in groups, but for the sign."""
    z = normal(B, S, size, seed=5).detach()
    firsts = torch.arange(B) // group * group
    z[..., :R] = z[firsts, :, :R] * torch.tensor([1.0, -1.0, -1.0] * 4, dtype=torch.float64)[:, None, None]
    return z


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", [2, 3, 5, 12])
def test_noise_of_groups_is_that_of_their_examples(group, bias):
    assert_same(inputs(bias), shared_normals(group), group=group)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("group", [1, 5])
def test_gradients_are_right(group, unit):
    operands, z = inputs(), shared_normals(5)
    assert torch.autograd.gradcheck(
        lambda *tensors: add_noise(*tensors, z, R, group=group, unit=unit), operands, fast_mode=True
    )


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize("alone", range(5))
def test_gradients_are_made_for_what_needs_them(alone, group, unit):
    operands = tuple(tensor.requires_grad_(index == alone) for index, tensor in enumerate(inputs()))
    assert_same(operands, shared_normals(5), group=group, unit=unit)


@pytest.mark.parametrize("residual", [0, 1, D])
@pytest.mark.parametrize("samples", [1, S])
def test_embeddings_are_brought_to_length_1(samples, residual):
    operands = inputs(residual=residual > 0)
    with torch.no_grad():
        operands[0][3] *= 100
        operands[0][7] = 0  # which stays as it is, as under F.normalize
        operands[0][8] *= 1e-14
    assert_same(operands, normal(B, samples, R + residual, seed=5).detach(), unit=True, overwrite=True)


def test_nothing_is_kept_where_there_is_no_backward_pass():
    operands, z = inputs(), shared_normals(5)
    with torch.no_grad():
        actual = add_noise(*operands, z, R, unit=True)
    torch.testing.assert_close(actual, add_noise(*operands, z, R, unit=True).detach())
    assert not actual.requires_grad


def test_two_backward_passes_find_the_same():
    operands, z = inputs(), shared_normals(5)
    total = add_noise(*operands, z, R, group=5, unit=True).square().sum()
    first = torch.autograd.grad(total, operands, retain_graph=True)
    for computed, reference in zip(first, torch.autograd.grad(total, operands), strict=True):
        assert torch.equal(computed, reference)


def test_autocast_does_not_narrow_the_noise():
    operands = tuple(value.detach().float() for value in inputs())
    z = shared_normals(5).float()
    expected = add_noise(*operands, z, R, group=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = add_noise(*operands, z, R, group=5)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("samples", [1, S])
@pytest.mark.parametrize("group", [1, 3])
def test_a_gradient_that_may_be_overwritten(samples, group):
    z = normal(B, samples, R + D, seed=5).detach()
    z[..., :R] = z[torch.arange(B) // group * group, :, :R]
    assert_same(inputs(), z, group=group, overwrite=True)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("noise", ["both", "none"])
def test_a_penalty_on_gradients_is_refused(link, noise):
    image, text = normal(4, 3), normal(4, 3, seed=1)
    loss = ContrastiveLoss(3, link=link, noise=noise, rank=2)
    value = loss(image, text, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="leave create_graph=True out"):
        torch.autograd.grad(value, image, create_graph=True)


def test_draws_have_no_second_gradients():
    x, weight = normal(4, 3), normal(6, 3, seed=1)
    drawn = add_noise(x, weight, None, None, None, normal(4, 1, 2, seed=2).detach(), 2)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(drawn.sum(), x, create_graph=True)
    assert torch.autograd.grad(add_noise(x, weight, None, None, None, torch.zeros(4, 1, 2, dtype=x.dtype), 2).sum(), x)
