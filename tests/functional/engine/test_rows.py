from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetxl.functional import LogitDistribution
from hetxl.functional.engine.gradients import Gradients
from hetxl.functional.engine.inputs import GRADIENTS, gather_inputs
from hetxl.functional.engine.rows import narrow, row_block
from support.cases import COVARIANCES, RESIDUALS, VARIANTS, make, normals

B, D, K, S, TAU = 4, 5, 11, 6, 1.7
ORDERS = ("samples", "factors")
NONE = frozenset()
CASES = [("det", "efficient", "rank1", "samples")] + [
    (variant, covariance, residual, order)
    for variant in VARIANTS
    if variant != "det"
    for covariance in COVARIANCES
    for residual in RESIDUALS
    for order in ORDERS
]


def inputs_of(variant, covariance="efficient", residual="rank1", opaque=False, bias=True):
    head = make(variant, D, K, covariance=covariance, residual=residual, bias=bias)
    if bias:
        torch.nn.init.normal_(head.classifier.bias)
    distribution = head.logit_distribution(torch.randn(B, D, dtype=torch.float64))
    if opaque:
        affine = distribution.classifier
        distribution = LogitDistribution(
            distribution.features, lambda x: affine(x), distribution.noise, distribution.lift
        )
    z = None if head.covariance is None else normals(head, B, samples=S)
    inputs = gather_inputs(distribution, z, TAU)
    return inputs.with_tensors(tuple(None if tensor is None else tensor.detach() for tensor in inputs.tensors()))


def plain_rows(inputs, order):
    """What a block should hold, [K, B, P], as a differentiable function of the inputs."""
    distribution = inputs.distribution()
    if order == "samples":
        rows = distribution.sample(inputs.z)
    else:
        rows = torch.cat((distribution.mean.unsqueeze(-2), distribution.factors), dim=-2)
    return rows.permute(2, 0, 1)


def block_of(inputs, order, examples=slice(0, B), needed=NONE):
    gradients = Gradients(inputs, needed)
    return row_block(inputs, examples, order, torch.float64, gradients), gradients


def needed_of(inputs):
    return frozenset(name for name in GRADIENTS if getattr(inputs, name) is not None)


def found_gradients(inputs, order, gradient, class_block, batch_block=B):
    """Gradients of the inputs from that of the rows [K, B, P], over blocks of classes and of examples."""
    needed = needed_of(inputs)
    gradients = Gradients(inputs, needed)
    for first in range(0, B, batch_block):
        examples = slice(first, min(first + batch_block, B))
        block = row_block(inputs, examples, order, torch.float64, gradients)
        for start in range(0, K, class_block):
            classes = slice(start, min(start + class_block, K))
            block.lift(classes)
            block.backward(classes, gradient[classes, examples].clone())
        block.finish()
    return {name: gradients.of(name) for name in needed}


@pytest.mark.parametrize(("variant", "covariance", "residual", "order"), CASES)
def test_rows_mix_into_the_sampled_logits(variant, covariance, residual, order):
    inputs = inputs_of(variant, covariance, residual)
    block, _ = block_of(inputs, order)
    rows = block.lift(slice(0, K))
    logits = inputs.distribution().sample(inputs.z) / TAU  # [B, S, K]
    if order == "samples":
        found = rows / TAU
    else:
        mixing = torch.cat((torch.ones(B, S, 1, dtype=torch.float64), inputs.z), dim=-1) / TAU  # [1, z] / τ
        found = torch.einsum("knp,nsp->kns", rows, mixing)
    torch.testing.assert_close(found, logits.permute(2, 0, 1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ["het", "het-h", "het-xl-own"])
def test_rows_around_given_mean_logits(variant, order):
    inputs = inputs_of(variant, opaque=True)
    block, _ = block_of(inputs, order)
    torch.testing.assert_close(block.lift(slice(0, K)), plain_rows(inputs, order), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("variant", "covariance", "residual", "order"), CASES)
@settings(max_examples=12)
@given(
    classes=st.tuples(st.integers(0, K - 1), st.integers(1, K)),
    examples=st.tuples(st.integers(0, 3), st.integers(1, 4)),
)
def test_a_block_is_a_slice_of_the_whole(variant, covariance, residual, order, classes, examples):
    torch.manual_seed(0)
    inputs = inputs_of(variant, covariance, residual)
    some = slice(classes[0], min(sum(classes), K))
    few = slice(examples[0], min(sum(examples), B))
    whole, _ = block_of(inputs, order)
    part, _ = block_of(inputs, order, few)
    torch.testing.assert_close(part.lift(some), whole.lift(slice(0, K))[some, few], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("variant", "covariance", "residual", "order"), CASES)
def test_gradients_are_autograds(variant, covariance, residual, order):
    inputs = inputs_of(variant, covariance, residual)
    check_gradients(inputs, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ["het", "het-h", "het-xl", "het-xl-own"])
def test_gradients_without_a_bias(variant, order):
    check_gradients(inputs_of(variant, bias=False), order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ["het", "het-h", "het-xl-own"])
def test_gradients_of_given_mean_logits(variant, order):
    check_gradients(inputs_of(variant, opaque=True), order)


def check_gradients(inputs, order):
    names = sorted(needed_of(inputs) - {"temperature"})
    leaves = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in names}
    tracked = inputs.with_tensors(tuple(leaves.get(name, getattr(inputs, name)) for name in GRADIENTS))
    rows = plain_rows(tracked, order)
    gradient = torch.randn_like(rows)
    expected = dict(zip(names, torch.autograd.grad((rows * gradient).sum(), list(leaves.values())), strict=True))
    # Logits are rows / τ, so with the gradient of the rows at hand that of τ is −⟨rows, gradient⟩ / τ.
    expected["temperature"] = -(rows * gradient).sum().detach() / TAU
    for class_block, batch_block in ((K, B), (4, B), (1, B), (4, 3), (K, 1)):
        found = found_gradients(inputs, order, gradient, class_block, batch_block)
        assert found.keys() == expected.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10, msg=f"{name}")


def test_only_what_is_needed_is_summed():
    inputs = inputs_of("het-xl")
    block, gradients = block_of(inputs, "samples", needed=frozenset({"features"}))
    rows = block.lift(slice(0, K))
    block.backward(slice(0, K), torch.ones_like(rows))
    block.finish()
    assert [value is not None for value in gradients.finished()] == [True] + [False] * 8
    assert not gradients.any_noise
    assert "weight" not in gradients


def test_products_may_be_narrower_than_the_sums():
    inputs = inputs_of("het-xl")
    inputs = inputs.with_tensors(tuple(None if tensor is None else tensor.float() for tensor in inputs.tensors()))
    rows = row_block(inputs, slice(0, B), "samples", torch.bfloat16, Gradients(inputs, NONE)).lift(slice(0, K))
    exact = row_block(inputs, slice(0, B), "samples", torch.float32, Gradients(inputs, NONE)).lift(slice(0, K))
    assert rows.dtype == exact.dtype == torch.float32
    assert 0 < (rows - exact).abs().max() / exact.abs().max() < 0.02


def test_narrow_keeps_what_fits():
    values = torch.randn(3)
    assert narrow(values, torch.float32) is values
    assert narrow(values, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ["het", "het-h", "het-xl", "het-xl-own"])
def test_factors_that_all_examples_share_and_nothing_beside_them(variant, order):
    inputs = inputs_of(variant, "full")
    inputs = replace(inputs, factors=inputs.factors[0])
    block, _ = block_of(inputs, order)
    shared = replace(inputs, factors=inputs.factors.expand(B, -1, -1))
    torch.testing.assert_close(block.lift(slice(0, K)), plain_rows(shared, order), rtol=1e-11, atol=1e-11)
    gradient = torch.randn(K, B, S if order == "samples" else inputs.noise.size + 1, dtype=torch.float64)
    found, expected = (found_gradients(each, order, gradient, 4, 3)["factors"] for each in (inputs, shared))
    torch.testing.assert_close(found, expected.sum(0), rtol=1e-10, atol=1e-10)
