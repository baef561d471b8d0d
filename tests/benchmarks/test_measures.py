"""benchmarks/_measures.py: the distance between a prediction and its top classes."""

import pytest
import torch


@pytest.fixture(scope="module")
def measures(load):
    return load("_measures")


def test_the_top_of_the_same_prediction_is_at_no_distance(measures):
    full = torch.rand(3, 10).softmax(-1)
    assert measures.total_variation(*full.topk(4), full).abs().max() == 0


def test_classes_outside_the_top_count_as_one(measures):
    full = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    top, indices = torch.tensor([[0.6, 0.3]]), torch.tensor([[0, 1]])
    # (0.6, 0.3, 0.1) against (0.5, 0.3, 0.2)
    assert measures.total_variation(top, indices, full).item() == pytest.approx(0.1)
