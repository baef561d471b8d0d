"""The order of examples: a permutation of every epoch, computed where it is asked for."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl_train.loaders import Order


@given(rows=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 50))
def test_every_epoch_is_a_permutation(rows, seed, epoch):
    permuted, seeds = Order(rows, seed).of(epoch * rows, (epoch + 1) * rows)
    assert (permuted.dtype, seeds.dtype) == (np.int64, np.int64)
    np.testing.assert_array_equal(np.sort(permuted), np.arange(rows))
    assert len(np.unique(seeds)) == rows
    assert (seeds >= 0).all()


@pytest.mark.parametrize("rows", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097])
def test_around_powers_of_two(rows):
    np.testing.assert_array_equal(np.sort(Order(rows, 1).of(rows, 2 * rows)[0]), np.arange(rows))


@given(cuts=st.lists(st.integers(0, 350), min_size=1, max_size=6))
def test_pieces_make_the_whole_across_epochs(cuts):
    order = Order(100, 3)
    bounds = sorted({0, 350, *cuts})
    pieces = [order.of(start, stop) for start, stop in pairwise(bounds)]
    whole = order.of(0, 350)
    for number in range(2):
        np.testing.assert_array_equal(np.concatenate([piece[number] for piece in pieces]), whole[number])


def test_epochs_and_seeds_differ():
    rows = 1000
    first, other = Order(rows, 0), Order(rows, 1)
    orders = [first.of(epoch * rows, (epoch + 1) * rows)[0] for epoch in range(3)] + [other.of(0, rows)[0]]
    for number, order in enumerate(orders):
        for later in orders[:number]:
            # Two unrelated permutations agree in one place on average.
            assert (order == later).sum() < 10
    np.testing.assert_array_equal(Order(rows, 0).of(0, rows)[0], orders[0])


def test_a_row_has_another_seed_in_every_epoch():
    rows = 50
    order = Order(rows, 0)
    by_row = np.empty((20, rows), dtype=np.int64)
    for epoch in range(20):
        permuted, seeds = order.of(epoch * rows, (epoch + 1) * rows)
        by_row[epoch, permuted] = seeds
    assert len(np.unique(by_row)) == by_row.size
    assert not np.isin(Order(rows, 1).of(0, rows)[1], by_row).any()


def test_the_order_looks_random():
    rows = 20_000
    permuted = Order(rows, 0).of(0, rows)[0]
    # The rank correlation with the place, and of neighbours, is about normal with deviation 1/√n.
    assert abs(np.corrcoef(permuted, np.arange(rows))[0, 1]) < 4 / rows**0.5
    assert abs(np.corrcoef(permuted[1:], permuted[:-1])[0, 1]) < 4 / rows**0.5
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


def test_order_of_no_rows_raises():
    with pytest.raises(ValueError, match="rows must be at least 1, found 0"):
        Order(0, 0)
