"""Sums in half precision are formed in single."""

import pytest
import torch

from hetxl.functional.precision import accumulate, without_autocast


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
    assert accumulate(torch.ones(2, dtype=dtype)).dtype == expected


def test_products_keep_their_precision():
    one = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (one @ one).dtype == torch.bfloat16
        with without_autocast(one.device):
            assert (one @ one).dtype == torch.float32
    with without_autocast(torch.device("meta")):  # which has no autocast
        assert (one.to("meta") @ one.to("meta")).is_meta
