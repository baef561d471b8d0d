import torch
from hypothesis import given
from hypothesis import strategies as st

from hetxl.functional import hash_classes

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
def test_it_agrees_with_exact_integers(classes, buckets, seed):
    assert hash_classes(classes, buckets, seed).tolist() == [splitmix64(k, seed) % buckets for k in range(classes)]


def test_a_class_keeps_its_bucket_when_classes_are_added():
    assert torch.equal(hash_classes(500, 32)[:100], hash_classes(100, 32))


def test_buckets_are_filled_evenly():
    # 100,000 classes in 100 buckets: 1,000 each, standard deviation 31.5; allowed are five.
    counts = hash_classes(100_000, 100).bincount(minlength=100)
    assert (counts - 1000).abs().max() < 158
