import pytest
import torch

from hetxl.functional import plan

PAPER = {"batch": 64, "in_features": 2048, "num_classes": 21_843, "noise_features": 2048, "size": 51}


@pytest.mark.parametrize(
    ("samples", "order"), [(1, "samples"), (16, "samples"), (51, "samples"), (64, "factors"), (1000, "factors")]
)
def test_the_cheaper_order_is_chosen(samples, order):
    assert plan(**PAPER, num_samples=samples).order == order


def test_factors_first_is_fourteen_times_less_work_at_a_thousand_samples():
    forced = {order: plan(**PAPER, num_samples=1000, order=order).flops for order in ("samples", "factors")}
    assert 13 < forced["samples"] / forced["factors"] < 15


def test_an_opaque_classifier_takes_samples_only():
    assert plan(**PAPER, num_samples=1000, linear=False).order == "samples"
    with pytest.raises(ValueError, match='order="factors" needs a linear classifier'):
        plan(**PAPER, num_samples=1000, linear=False, order="factors")


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("classes", [1, 7, 1000, 21_843, 1_000_000, 30_000_000])
@pytest.mark.parametrize("samples", [1, 16, 64, 1000])
@pytest.mark.parametrize("batch", [1, 32, 4096])
@pytest.mark.parametrize("budget", [2**26, 2**28])
def test_the_budget_is_kept(batch, samples, classes, link, budget):
    made = plan(batch, 256, classes, 256, 51, samples, link=link, memory_budget=budget)
    assert 1 <= made.batch_block <= batch
    assert 1 <= made.class_block <= classes
    assert 1 <= made.sample_block <= samples
    assert made.bytes <= 1.05 * budget


def test_many_classes_are_gone_through_in_two_passes_only_when_they_must():
    assert plan(**PAPER, num_samples=1000).passes == 1
    assert plan(8, 256, 10_000_000, 256, 51, 1000).passes == 2
    assert plan(8, 256, 10_000_000, 256, 51, 1000, link="sigmoid").passes == 1


def test_a_plan_can_be_read():
    text = str(plan(**PAPER, num_samples=1000))
    assert text.startswith("factors first for B=64, D=2,048, K=21,843, N=2,048, Q=51, S=1,000: 52 rows an example")
    assert "GFLOP" in text
    assert "MiB" in text


def test_no_noise_is_one_sample():
    made = plan(64, 2048, 1000, 0, 0, 1000)
    assert (made.order, made.rows) == ("samples", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "factor"}, "order must be one of"),
        ({"memory_budget": 0}, "memory_budget must be at least 1, found 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**PAPER, num_samples=10, **options)


def test_double_precision_takes_twice_the_memory():
    single, double = (plan(**PAPER | {"batch": 1}, num_samples=1000, dtype=d) for d in (torch.float32, torch.float64))
    assert double.bytes == 2 * single.bytes
