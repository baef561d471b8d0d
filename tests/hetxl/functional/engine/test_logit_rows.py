import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetxl.functional import LogitDistribution
from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.logit_rows import (
    ClassDraws,
    Context,
    Gradients,
    Workspace,
    gradient_products,
    row_block,
)
from hetxl.functional.noise import GaussianNoise
from support.cases import GRID, NOISY_GRID, make, normals

B, D, K, S, R, TAU = 4, 5, 11, 6, 2, 1.7
ORDERS = ("samples", "factors")
NONE = frozenset()
CASES = [(*GRID[0], "samples"), *((*case, order) for case in NOISY_GRID for order in ORDERS)]


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
    return inputs.with_tensors({name: tensor.detach() for name, tensor in inputs.tensors().items()})


def plain_rows(inputs, order):
    """What a block should hold, [K, B, P], as a differentiable function of the inputs."""
    distribution, z = inputs.distribution_and_normals()
    if order == "samples":
        rows = distribution.sample(z)
    else:
        rows = torch.cat((distribution.mean.unsqueeze(-2), distribution.factors), dim=-2)
    return rows.permute(2, 0, 1)


def block_of(inputs, order, examples=slice(0, B), needed=NONE):
    context = Context.of(inputs, order, torch.float64, needed)
    return row_block(context, examples), context.gradients


def found_gradients(inputs, order, gradient, class_block, batch_block=B):
    """Gradients of the inputs from that of the rows [K, B, P], over blocks of classes and of examples."""
    needed = frozenset(inputs.tensors())
    context = Context.of(inputs, order, torch.float64, needed)
    for first in range(0, B, batch_block):
        examples = slice(first, min(first + batch_block, B))
        block = row_block(context, examples)
        for start in range(0, K, class_block):
            classes = slice(start, min(start + class_block, K))
            block.lift(classes)
            block.backward(classes, gradient[classes, examples].clone())
        block.finish()
    return {name: context.gradients.of(name) for name in needed}


@pytest.mark.parametrize(("variant", "covariance", "residual", "order"), CASES)
def test_rows_mix_into_the_sampled_logits(variant, covariance, residual, order):
    inputs = inputs_of(variant, covariance, residual)
    block, _ = block_of(inputs, order)
    rows = block.lift(slice(0, K))
    distribution, z = inputs.distribution_and_normals()
    logits = distribution.sample(z) / TAU  # [B, S, K]
    if order == "samples":
        mixed = rows / TAU
    else:
        mixing = torch.cat((torch.ones(B, S, 1, dtype=torch.float64), z), dim=-1) / TAU  # [1, z] / τ
        mixed = torch.einsum("knp,nsp->kns", rows, mixing)
    torch.testing.assert_close(mixed, logits.permute(2, 0, 1), rtol=1e-11, atol=1e-11)


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
    tensors = inputs.tensors()
    names = sorted(tensors.keys() - {"temperature"})
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names}
    tracked = inputs.with_tensors(leaves)
    rows = plain_rows(tracked, order)
    gradient = torch.randn_like(rows)
    expected = dict(zip(names, torch.autograd.grad((rows * gradient).sum(), list(leaves.values())), strict=True))
    # Logits are rows / τ, so with the gradient of the rows at hand that of τ is −⟨rows, gradient⟩ / τ.
    expected["temperature"] = -(rows * gradient).sum().detach() / TAU
    for class_block, batch_block in ((K, B), (4, B), (1, B), (4, 3), (K, 1)):
        actual = found_gradients(inputs, order, gradient, class_block, batch_block)
        assert actual.keys() == expected.keys()
        for name in actual:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-10, msg=f"{name}")


def test_only_what_is_needed_is_summed():
    inputs = inputs_of("het-xl")
    block, gradients = block_of(inputs, "samples", needed=frozenset({"features"}))
    rows = block.lift(slice(0, K))
    block.backward(slice(0, K), torch.ones_like(rows))
    block.finish()
    assert [value is not None for value in gradients.finished()] == [True] + [False] * 6
    assert not gradients.any_noise
    assert "weight" not in gradients


def test_products_may_be_narrower_than_the_sums():
    inputs = inputs_of("het-xl")
    inputs = inputs.with_tensors({name: tensor.float() for name, tensor in inputs.tensors().items()})
    rows, exact = (
        row_block(Context.of(inputs, "samples", products), slice(0, B)).lift(slice(0, K))
        for products in (torch.bfloat16, torch.float32)
    )
    assert rows.dtype == exact.dtype == torch.float32
    assert 0 < (rows - exact).abs().max() / exact.abs().max() < 0.02


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", ["het", "het-h", "het-xl", "het-xl-own"])
def test_factors_that_all_examples_share_and_nothing_beside_them(variant, order):
    inputs = inputs_of(variant, "full")
    factors = inputs.noise.gaussian.factors[0]
    inputs = inputs.with_tensors({"factors": factors})
    block, _ = block_of(inputs, order)
    shared = inputs.with_tensors({"factors": factors.expand(B, -1, -1)})
    torch.testing.assert_close(block.lift(slice(0, K)), plain_rows(shared, order), rtol=1e-11, atol=1e-11)
    gradient = torch.randn(K, B, S if order == "samples" else inputs.noise_size + 1, dtype=torch.float64)
    actual, expected = (found_gradients(each, order, gradient, 4, 3)["factors"] for each in (inputs, shared))
    torch.testing.assert_close(actual, expected.sum(0), rtol=1e-10, atol=1e-10)


def sums_of(name):
    inputs = inputs_of("het-xl")
    return Gradients(inputs.tensors(), frozenset({name}), inputs.wide)


def test_gradients_come_in_the_precision_of_their_inputs_and_are_summed_in_a_wider_one():
    head = make("het-xl", D, K, dtype=torch.bfloat16)
    distribution = head.logit_distribution(torch.randn(B, D, dtype=torch.bfloat16))
    inputs = gather_inputs(distribution, normals(head, B, dtype=torch.bfloat16), 1.0)
    gradients = Gradients(inputs.tensors(), frozenset({"bias", "weight"}), inputs.wide)
    for _ in range(300):
        gradients.add("bias", torch.ones(K))
        gradients.add_product("weight", slice(0, 2), torch.ones(2, 1), torch.ones(1, D, dtype=torch.bfloat16))
    # bfloat16 alone would stop at 256.
    assert gradients.of("bias").unique().tolist() == [300]
    assert gradients.of("weight")[:2].unique().tolist() == [300]
    assert gradients.of("weight")[2:].unique().tolist() == [0]
    finished = gradients.finished()
    assert finished[1].dtype == finished[2].dtype == torch.bfloat16
    assert finished[0] is None


@pytest.mark.parametrize("blocks", [[(0, K)], [(0, 4), (4, K)], [(0, 4)]])
def test_the_first_product_writes_and_the_others_add(blocks):
    gradients = sums_of("weight")
    expected = torch.zeros(K, D, dtype=torch.float64)
    for _ in range(2):
        for start, stop in blocks:
            left, right = torch.randn(stop - start, 2, dtype=torch.float64), torch.randn(2, D, dtype=torch.float64)
            gradients.add_product("weight", slice(start, stop), left, right)
            expected[start:stop] += left @ right
    torch.testing.assert_close(gradients.of("weight"), expected)


def test_products_go_to_out_or_to_memory_used_again():
    workspace = Workspace(torch.empty(0, dtype=torch.float64))
    left, right = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    out = torch.empty(4, 2, dtype=torch.float64)
    assert workspace.product(left, right, out) is out
    torch.testing.assert_close(out, left @ right)
    narrow = torch.empty(4, 2, dtype=torch.float64)
    workspace.product(left.float(), right.float(), narrow)
    torch.testing.assert_close(narrow, left @ right, rtol=1e-5, atol=1e-5)
    first = workspace.product(left, right)
    assert workspace.product(left, right).data_ptr() == first.data_ptr()


def test_gradients_are_not_multiplied_in_float16():
    assert gradient_products(torch.float16) == torch.float32
    assert gradient_products(torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("scale", [None, 1.0, -2.5])
def test_a_scale_of_one_or_another(scale):
    gradients = sums_of("bias")
    gradients.add("bias", torch.arange(K, dtype=torch.float64))
    finished = gradients.finished(None if scale is None else torch.tensor(scale))[2]
    assert torch.equal(finished, (scale or 1.0) * torch.arange(K, dtype=torch.float64))


def het_parts(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"factors": (R, K), "scale": (B, K), "residual": (B, K), "mean": (K, B)}
    return {name: torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for name, size in sizes.items()}


def het_normals() -> torch.Tensor:
    return torch.randn(B, S, R + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def noise_of(values: dict[str, torch.Tensor]) -> GaussianNoise:
    return GaussianNoise(values["factors"], values["scale"], values["residual"], "rank1")


@pytest.mark.parametrize("in_memory", [False, True])
def test_logits_are_the_mean_and_the_draws_over_tau(in_memory: bool):
    values, z, tau = het_parts(), het_normals(), torch.tensor(0.7, dtype=torch.float64)
    noise = noise_of(values)
    naive = (values["mean"].T.unsqueeze(1) + noise.draw(z)) / tau  # [n, S, k]
    memory = torch.empty(B * S * K, dtype=torch.float64) if in_memory else None
    logits = ClassDraws.of(noise, z, torch.float64).logits(values["mean"].detach(), tau, memory)
    torch.testing.assert_close(logits, naive.detach(), rtol=1e-12, atol=1e-12)
    if memory is not None:
        assert logits.data_ptr() == memory.data_ptr()


def test_gradients_are_those_of_autograd():
    values, z = het_parts(), het_normals()
    gradient = torch.randn(B, S, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows = values["mean"].T.unsqueeze(1) + noise_of(values).draw(z)
    expected = dict(zip(values, torch.autograd.grad(rows, list(values.values()), gradient), strict=True))
    mean, gradients = ClassDraws.of(noise_of(values), z, torch.float64).backward(gradient.clone())
    for name, value in {**gradients, "mean": mean}.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"factors": None}, False),
        ({"scale": None}, False),
        ({"residual": None}, False),
        ({"residual_kind": "diagonal"}, False),
        ({"factors": torch.zeros(B, R, K, dtype=torch.float64)}, False),  # an example's own
        ({"scale": torch.zeros(B, K, dtype=torch.bfloat16)}, False),
    ],
)
def test_class_draws_apply_to_supported_noise_only(change: dict, fits: bool):
    values = het_parts()
    options = {name: values[name] for name in ("factors", "scale", "residual")} | {"residual_kind": "rank1", **change}
    assert (ClassDraws.of(GaussianNoise(**options), het_normals(), torch.float64) is not None) is fits
