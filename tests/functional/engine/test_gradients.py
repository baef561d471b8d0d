import pytest
import torch

from hetxl.functional.engine.gradients import Gradients, gradient_products
from hetxl.functional.engine.inputs import gather_inputs
from support.cases import make, normals

B, D, K = 3, 5, 6


def inputs_of(dtype=torch.float64):
    head = make("het-xl", D, K, dtype=dtype)
    return gather_inputs(head.logit_distribution(torch.randn(B, D, dtype=dtype)), normals(head, B, dtype=dtype), 1.0)


def test_gradients_come_in_the_precision_of_their_inputs_and_are_summed_in_a_wider_one():
    head = make("het-xl", D, K, dtype=torch.bfloat16)
    distribution = head.logit_distribution(torch.randn(B, D, dtype=torch.bfloat16))
    inputs = gather_inputs(distribution, normals(head, B, dtype=torch.bfloat16), 1.0)
    gradients = Gradients(inputs, frozenset({"bias", "weight"}))
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


@pytest.mark.parametrize("blocks", [[(0, 6)], [(0, 4), (4, 6)], [(0, 4)]])
def test_the_first_product_writes_and_the_others_add(blocks):
    gradients = Gradients(inputs_of(), frozenset({"weight"}))
    expected = torch.zeros(K, D, dtype=torch.float64)
    for _ in range(2):
        for start, stop in blocks:
            left, right = torch.randn(stop - start, 2, dtype=torch.float64), torch.randn(2, D, dtype=torch.float64)
            gradients.add_product("weight", slice(start, stop), left, right)
            expected[start:stop] += left @ right
    torch.testing.assert_close(gradients.of("weight"), expected)


def test_products_go_where_they_are_told():
    gradients = Gradients(inputs_of(), frozenset())
    left, right = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    out = torch.empty(4, 2, dtype=torch.float64)
    assert gradients.product(left, right, out) is out
    torch.testing.assert_close(out, left @ right)
    narrow = torch.empty(4, 2, dtype=torch.float64)
    gradients.product(left.float(), right.float(), narrow)
    torch.testing.assert_close(narrow, left @ right, rtol=1e-5, atol=1e-5)
    first = gradients.product(left, right)
    assert gradients.product(left, right).data_ptr() == first.data_ptr()


def test_gradients_are_not_multiplied_in_float16():
    assert gradient_products(torch.float16) == torch.float32
    assert gradient_products(torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("scale", [None, 1.0, -2.5])
def test_a_scale_of_one_or_another(scale):
    gradients = Gradients(inputs_of(), frozenset({"bias"}))
    gradients.add("bias", torch.arange(K, dtype=torch.float64))
    found = gradients.finished(None if scale is None else torch.tensor(scale))[2]
    assert torch.equal(found, (scale or 1.0) * torch.arange(K, dtype=torch.float64))
