"""The order of examples: a permutation of every epoch, computed where it is asked for."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl.training.order import Order, derive, mix


@given(rows=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 50))
def test_every_epoch_is_a_permutation(rows, seed, epoch):
    found, seeds = Order(rows, seed).of(epoch * rows, (epoch + 1) * rows)
    assert (found.dtype, seeds.dtype) == (np.int64, np.int64)
    np.testing.assert_array_equal(np.sort(found), np.arange(rows))
    assert len(np.unique(seeds)) == rows
    assert (seeds >= 0).all()


@pytest.mark.parametrize("rows", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097])
def test_around_powers_of_two(rows):
    np.testing.assert_array_equal(np.sort(Order(rows, 1).of(rows, 2 * rows)[0]), np.arange(rows))


@given(cuts=st.lists(st.integers(0, 350), min_size=1, max_size=6))
def test_pieces_make_the_whole_across_epochs(cuts):
    order = Order(100, 3)
    places = sorted({0, 350, *cuts})
    pieces = [order.of(start, stop) for start, stop in pairwise(places)]
    whole = order.of(0, 350)
    for number in range(2):
        np.testing.assert_array_equal(np.concatenate([piece[number] for piece in pieces]), whole[number])


def test_epochs_and_seeds_differ():
    rows = 1000
    first, other = Order(rows, 0), Order(rows, 1)
    orders = [first.of(epoch * rows, (epoch + 1) * rows)[0] for epoch in range(3)] + [other.of(0, rows)[0]]
    for number, one in enumerate(orders):
        for two in orders[:number]:
            # Two unrelated permutations agree in one place on average.
            assert (one == two).sum() < 10
    np.testing.assert_array_equal(Order(rows, 0).of(0, rows)[0], orders[0])


def test_a_row_has_another_seed_in_every_epoch():
    rows = 50
    order = Order(rows, 0)
    by_row = np.empty((20, rows), dtype=np.int64)
    for epoch in range(20):
        found, seeds = order.of(epoch * rows, (epoch + 1) * rows)
        by_row[epoch, found] = seeds
    assert len(np.unique(by_row)) == by_row.size
    assert not np.isin(Order(rows, 1).of(0, rows)[1], by_row).any()


def test_the_order_looks_random():
    rows = 20_000
    found = Order(rows, 0).of(0, rows)[0]
    # The rank correlation with the place, and of neighbours, is about normal with deviation 1/√n.
    assert abs(np.corrcoef(found, np.arange(rows))[0, 1]) < 4 / rows**0.5
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 4 / rows**0.5
    # Every row comes first about equally often over seeds: 400 draws of 8, χ² with 7 degrees of freedom.
    firsts = np.bincount([Order(8, seed).of(0, 1)[0][0] for seed in range(400)], minlength=8)
    assert ((firsts - 50) ** 2 / 50).sum() < 24


def test_a_hundred_million_rows_cost_a_batch():
    order = Order(10**8, 0)
    tracemalloc.start()
    try:
        rows, _ = order.of(5 * 10**7, 5 * 10**7 + 256)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(rows)) == 256
    assert rows.max() < 10**8
    assert peak < 200_000


def test_derive():
    assert derive(1, 2) == derive(1, 2)
    assert 0 <= derive(2**70, -5) < 2**63
    parts = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1), (2**32,), (2**63,)]
    assert len({derive(*part) for part in parts}) == len(parts)
    assert len({derive(seed, step) for seed in range(30) for step in range(30)}) == 900


def test_mix_is_splitmix64():
    # The first outputs of the published generator from state 0 and 1234567.
    assert int(mix(np.zeros(1, dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert int(mix(np.array([1234567], dtype=np.uint64))[0]) == 6457827717110365317


def test_no_rows():
    with pytest.raises(ValueError, match="rows must be at least 1, found 0"):
        Order(0, 0)
