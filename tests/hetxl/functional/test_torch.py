"""Sums in half precision are formed in single."""

import pytest
import torch

from hetxl.functional._torch import not_compiled, to_accumulation_dtype, without_autocast


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_widened(dtype, expected):
    assert to_accumulation_dtype(torch.ones(2, dtype=dtype)).dtype == expected


def test_products_keep_their_precision():
    matrix = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
        with without_autocast(matrix.device):
            assert (matrix @ matrix).dtype == torch.float32
    with without_autocast(torch.device("meta")):  # which has no autocast
        assert (matrix.to("meta") @ matrix.to("meta")).is_meta


def test_not_compiled_keeps_the_function_outside_of_compilation():
    def double(values):
        """Twice as much."""
        return 2 * values

    wrapped = not_compiled(double)
    assert (wrapped.__name__, wrapped.__doc__) == ("double", "Twice as much.")
    assert wrapped(3) == 6


def test_the_compiler_does_not_look_inside():
    seen = []

    @not_compiled
    def watched(values):
        seen.append(torch.compiler.is_compiling())
        return 2 * values

    graphs = []

    def backend(module, inputs):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    compiled = torch.compile(lambda values: watched(values + 1) - 3, backend=backend)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert seen == [False]
    assert len(graphs) == 2  # before and after it
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert seen == [False, False]
