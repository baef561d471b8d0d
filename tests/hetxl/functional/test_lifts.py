import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import GaussianNoise, HashLift, IdentityLift, LinearLift, hash_classes, lifts

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


def gaussian(size, form, residual, batch):
    """Noise of one of the forms that the covariances make."""
    options = {"dtype": torch.float64}
    factors = {"shared": (3, size), "own": (*batch, 3, size)}.get(form)
    return GaussianNoise(
        None if factors is None else torch.randn(*factors, **options),
        torch.randn(*batch, size, **options) if form == "shared" else None,
        torch.rand(*batch, size, **options),
        residual,
    )


@pytest.mark.parametrize("kind", ["identity", "hash", "linear"])
@pytest.mark.parametrize("form", ["shared", "own", "none"])
@pytest.mark.parametrize("residual", ["rank1", "diagonal"])
@pytest.mark.parametrize("batch", [(3,), (2, 3), (), (0,)])
def test_variances_and_covariances_are_those_of_the_basis(kind, form, residual, batch, monkeypatch):
    apply, size = lift(kind)
    noise = gaussian(size, form, residual, batch)
    basis = apply(noise.basis())  # [..., Q, K]
    torch.testing.assert_close(apply.variance(noise), basis.square().sum(-2))
    classes = torch.randint(K, (*batch, 4))
    some = basis.gather(-1, classes.unsqueeze(-2).expand(*batch, basis.shape[-2], 4))
    torch.testing.assert_close(apply.covariance(noise, classes), some.mT @ some)
    monkeypatch.setattr(lifts, "ELEMENTS", 20)  # a few classes at a time
    torch.testing.assert_close(apply.variance(noise), basis.square().sum(-2))


def test_classes_of_one_bucket_share_its_noise():
    buckets = hash_classes(K, 2)
    noise = gaussian(2, "none", "diagonal", (1,))
    correlated = HashLift(buckets).covariance(noise, torch.arange(K).unsqueeze(0))[0] > 0
    assert torch.equal(correlated, buckets.unsqueeze(0) == buckets.unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["shared", "own", "none"])
@pytest.mark.parametrize("kind", ["identity", "hash", "linear"])
def test_noise_in_half_precision_is_summed_in_single(kind, form, dtype):
    apply, size = lift(kind)
    if kind == "linear":
        apply = LinearLift(apply.weight.float())
    wide = gaussian(size, form, "rank1", (3,))
    parts = (wide.factors, wide.scale, wide.residual)
    noise = GaussianNoise(*(None if part is None else part.to(dtype) for part in parts))
    rounded = GaussianNoise(*(None if part is None else part.to(dtype).float() for part in parts))
    classes = torch.tensor([[0, 3], [6, 1], [2, 2]])
    for actual, expected in (
        (apply.variance(noise), apply.variance(rounded)),
        (apply.covariance(noise, classes), apply.covariance(rounded, classes)),
    ):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected)
    assert apply(noise.basis()).shape == (3, noise.size, K)


def test_the_hash_lift_is_the_matrix_of_the_paper():
    buckets = hash_classes(K, N)
    matrix = torch.zeros(N, K, dtype=torch.float64)
    matrix[buckets, torch.arange(K)] = 1
    noise = torch.randn(3, N, dtype=torch.float64)
    torch.testing.assert_close(HashLift(buckets)(noise), noise @ matrix)


FIRST = [5, 0, 9, 4, 7, 0, 3, 0, 9, 0, 1, 6]
SEVENTH = [4, 9, 4, 9, 6, 7, 6, 2, 0, 6, 3, 0]


def test_the_hash_is_fixed():
    # Written down once: a saved HET-H head must mean the same on every machine and in every version.
    assert hash_classes(12, 10).tolist() == FIRST
    assert hash_classes(12, 10, seed=7).tolist() == SEVENTH


def splitmix64(index, seed):
    """The same hash in unbounded Python integers."""
    mask = 2**64 - 1
    x = (index * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(st.integers(1, 300), st.integers(1, 400), st.integers(0, 2**70))
def test_hash_agrees_with_exact_integers(classes, buckets, seed):
    assert hash_classes(classes, buckets, seed).tolist() == [splitmix64(k, seed) % buckets for k in range(classes)]


def test_a_class_keeps_its_bucket_when_classes_are_added():
    assert torch.equal(hash_classes(500, 32)[:100], hash_classes(100, 32))


def test_buckets_are_filled_evenly():
    # 100,000 classes in 100 buckets: 1,000 each, standard deviation 31.5; allowed are five.
    counts = hash_classes(100_000, 100).bincount(minlength=100)
    assert (counts - 1000).abs().max() < 158
