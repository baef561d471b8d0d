import pytest
import torch

from hetxl.studies.measure import (
    HeadSize,
    Step,
    peaks_of,
    predicted_bytes,
    seconds_of,
    step_of,
    warm_up,
)

SIZE = HeadSize(16, 40, 3)


@pytest.mark.parametrize("name", ["det", "het", "het-h", "het-xl"])
@pytest.mark.parametrize("way", ["engine", "paper"])
def test_a_step_leaves_gradients(name, way):
    head = SIZE.build(name)
    step_of(head, Step(name, way, 4, 5))()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())


def test_both_ways_have_the_same_expectation():
    gradients = []
    for way in ("engine", "paper"):
        head = SIZE.build("het-xl")
        step_of(head, Step("het-xl", way, 4, 4000))()
        gradients.append(head.classifier.weight.grad)
    assert torch.allclose(*gradients, atol=0.01)


def test_building_leaves_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = (SIZE.build("het").classifier.weight for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(2), expected)


def test_times():
    calls = []
    assert seconds_of(lambda: calls.append(1), 3, 10.0) >= 0
    assert len(calls) == 4  # one warms up
    calls.clear()
    seconds_of(lambda: calls.append(1), 3, -1.0)
    assert len(calls) == 1


def test_warming_up_leaves_nothing_behind():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    warm_up("het-h")
    assert torch.equal(torch.rand(2), expected)


def test_predictions_of_memory():
    head = HeadSize(64, 5000, 10).build("het-xl", device="meta")
    gradients = 4 * sum(parameter.numel() for parameter in head.parameters())
    small, large = (predicted_bytes(head, Step("het-xl", "paper", 8, samples)) for samples in (10, 1000))
    assert (large - gradients) == 100 * (small - gradients)
    # With few samples the two gradients of W are more than those.
    few = predicted_bytes(head, Step("het-xl", "paper", 1, 1))
    assert few == gradients + 2 * 4 * 64 * 5000 < small
    # Ours has a budget for its blocks.
    assert predicted_bytes(head, Step("het-xl", "engine", 8, 1000), budget=2**24) <= gradients + 2**24
    det = HeadSize(64, 5000, 10).build("det", device="meta")
    assert predicted_bytes(det, Step("det", "engine", 8, 1)) == 4 * (64 * 5000 + 5000) + 4 * 8 * 5000


def test_peaks_are_near_their_predictions():
    size = HeadSize(64, 4000, 10)
    steps = [Step("het-xl", "paper", 16, samples) for samples in (20, 100)]
    told = []
    peaks = peaks_of(size, steps, told.append)
    assert told == [2]
    for step, peak in zip(steps, peaks, strict=True):
        assert 0.5 < peak / predicted_bytes(size.build("het-xl", device="meta"), step) < 2
