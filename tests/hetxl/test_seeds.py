"""Seeds that are derived from others, by splitmix64."""

import numpy as np

from hetxl._seeds import derive_seed, some_rows, splitmix64


def test_derived_seeds_differ_with_every_part():
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert 0 <= derive_seed(2**70, -5) < 2**63
    parts = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1), (2**32,), (2**63,)]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    assert len({derive_seed(seed, step) for seed in range(30) for step in range(30)}) == 900


def test_hash_is_splitmix64():
    # The first outputs of the published generator from state 0 and 1234567.
    assert int(splitmix64(np.zeros(1, dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert int(splitmix64(np.array([1234567], dtype=np.uint64))[0]) == 6457827717110365317


def test_some_rows_are_a_bounded_sample_in_their_order():
    assert some_rows(np.arange(10), 10).tolist() == list(range(10))
    rows = some_rows(np.arange(100, 200), 7, seed=3)
    assert len(np.unique(rows)) == 7
    assert rows.min() >= 100
    assert (np.diff(rows) > 0).all()
