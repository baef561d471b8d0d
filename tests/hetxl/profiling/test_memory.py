"""The memory of a training step, by formula: what it is made of, and how many classes fit."""

import pytest

from hetxl.profiling.memory import largest_num_classes, training_memory


def test_memory_of_a_linear_classifier_has_known_values():
    actual = training_memory(255, 1000, batch=1, samples=1, size=0)
    assert actual.weights == actual.gradients == 1000 * 256 * 4
    assert actual.moments == 2 * actual.weights
    assert actual.index == 0
    assert actual.total == 4 * actual.weights + actual.blocks
    assert training_memory(255, 1000, batch=1, samples=1, size=0, moments=1, width=8).moments == 1000 * 256 * 8


def test_blocks_stop_at_the_budget():
    small, large = (training_memory(64, classes, memory_budget=10**8).blocks for classes in (10**4, 10**7))
    assert small <= large <= 10**8


def test_sparse_gradients_do_not_grow_with_the_classes():
    few, many = (training_memory(64, K, classifier="sampled", sparse=True, active=500) for K in (10**5, 10**7))
    assert few.gradients == many.gradients
    assert few.blocks == many.blocks
    assert many.weights == 100 * few.weights
    dense = training_memory(64, 10**7, classifier="sampled", active=500)
    assert dense.gradients > dense.weights


def test_an_index_holds_the_rows_once_more():
    actual = training_memory(64, 10**6, classifier="retrieved", sparse=True)
    assert actual.index == actual.weights + 8 * 10**6


@pytest.mark.parametrize("options", [{}, {"classifier": "sampled", "sparse": True}, {"size": 0, "samples": 1}])
def test_the_largest_number_of_classes_is_the_last_that_fits(options):
    memory = 2 * 2**30
    actual = largest_num_classes(128, memory, **options)
    assert training_memory(128, actual, **options).total <= memory < training_memory(128, actual + 1, **options).total
    assert largest_num_classes(128, 1, **options) == 0


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="num_classes must be"):
        training_memory(64, 0)
    with pytest.raises(ValueError, match="classifier must be"):
        training_memory(64, 10, classifier="hashed")
