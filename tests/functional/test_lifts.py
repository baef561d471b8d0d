import pytest
import torch

from hetxl.functional import HashLift, IdentityLift, LinearLift, hash_classes

K, N = 7, 4


def lift(kind):
    """A lift and its size N."""
    if kind == "identity":
        return IdentityLift(), K
    if kind == "hash":
        return HashLift(hash_classes(K, N)), N
    return LinearLift(torch.randn(K, N, dtype=torch.float64)), N


@pytest.mark.parametrize("kind", ["identity", "hash", "linear"])
def test_lifts_are_linear(kind):
    apply, size = lift(kind)
    a, b = torch.randn(2, 3, size, dtype=torch.float64)
    assert apply(a).shape == (3, K)
    torch.testing.assert_close(apply(2 * a - b), 2 * apply(a) - apply(b))


@pytest.mark.parametrize("kind", ["identity", "hash", "linear"])
@pytest.mark.parametrize("batch", [(3,), (2, 3), ()])
def test_select_gives_the_stated_classes(kind, batch):
    apply, size = lift(kind)
    noise = torch.randn(*batch, 5, size, dtype=torch.float64)
    classes = torch.randint(K, (*batch, 2))
    expected = apply(noise).gather(-1, classes.unsqueeze(-2).expand(*batch, 5, 2))
    torch.testing.assert_close(apply.select(noise, classes), expected)


def test_the_hash_lift_is_the_matrix_of_the_paper():
    buckets = hash_classes(K, N)
    matrix = torch.zeros(N, K, dtype=torch.float64)
    matrix[buckets, torch.arange(K)] = 1
    noise = torch.randn(3, N, dtype=torch.float64)
    torch.testing.assert_close(HashLift(buckets)(noise), noise @ matrix)
