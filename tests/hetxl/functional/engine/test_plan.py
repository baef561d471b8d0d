import pytest
import torch

from hetxl.functional import (
    Affine,
    GaussianNoise,
    LogitDistribution,
    check_targets,
    mc_log_normalisers,
    mc_log_probs,
    mc_nll,
    mc_predict,
    plan,
    reference,
)
from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.plan import IMPLS, choose_impl, plan_for
from support.cases import LINKS, VARIANTS, make, normals, targets_for

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
    chosen = plan(batch, 256, classes, 256, 51, samples, link=link, memory_budget=budget)
    assert 1 <= chosen.batch_block <= batch
    assert 1 <= chosen.class_block <= classes
    assert 1 <= chosen.sample_block <= samples
    assert chosen.bytes <= 1.05 * budget


def test_many_classes_are_gone_through_in_two_passes_only_when_they_must():
    assert plan(**PAPER, num_samples=1000).passes == 1
    assert plan(8, 256, 10_000_000, 256, 51, 1000).passes == 2
    assert plan(8, 256, 10_000_000, 256, 51, 1000, link="sigmoid").passes == 1


def test_plan_text_has_order_sizes_and_cost():
    text = str(plan(**PAPER, num_samples=1000))
    assert text.startswith("factors first for B=64, D=2,048, K=21,843, N=2,048, Q=51, S=1,000: 52 rows an example")
    assert "GFLOP" in text
    assert "MiB" in text


def test_no_noise_is_one_sample():
    chosen = plan(64, 2048, 1000, 0, 0, 1000)
    assert (chosen.order, chosen.rows) == ("samples", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "factor"}, "order must be one of"),
        ({"memory_budget": 0}, "memory_budget must be at least 1, found 0"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**PAPER, num_samples=10, **options)


def test_double_precision_takes_twice_the_memory():
    single, double = (plan(**PAPER | {"batch": 1}, num_samples=1000, dtype=d) for d in (torch.float32, torch.float64))
    assert double.bytes == 2 * single.bytes


def inputs_of(variant, **options):
    head = make(variant, 6, 9, **options)
    distribution = head.logit_distribution(torch.randn(4, 6, dtype=head.classifier.weight.dtype))
    z = None if distribution.noise is None else normals(head, 4, samples=8)
    return gather_inputs(distribution, z, 1.0)


def test_the_plan_has_the_sizes_of_the_inputs():
    assert plan_for(inputs_of("het-xl"), "softmax").sizes == {"B": 4, "D": 6, "K": 9, "N": 6, "Q": 3, "S": 8}
    assert plan_for(inputs_of("het"), "softmax").sizes == {"B": 4, "D": 6, "K": 9, "N": 9, "Q": 3, "S": 8}
    assert plan_for(inputs_of("det"), "softmax").rows == 1


def test_the_precision_of_products():
    inputs = inputs_of("het-xl", dtype=torch.float32)
    assert inputs.product_precision() == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert inputs.product_precision() == torch.bfloat16
        assert inputs_of("het-xl").product_precision() == torch.float64  # which autocast leaves alone
    assert inputs_of("det", dtype=torch.bfloat16).product_precision() == torch.bfloat16


def uncovered_cases():
    """Cases that the blocks do not cover, with what the error says of them."""
    features, noise = torch.randn(2, 3), GaussianNoise(None, None, torch.ones(2, 3))
    opaque = LogitDistribution(features, Affine(torch.randn(5, 3)), noise)
    head = make("het", 3, 5)
    distribution = head.logit_distribution(features.double())
    return [
        (opaque, torch.randn(4, 1), "noise through a classifier that is not linear"),
        (distribution, normals(head, 2).requires_grad_(), "normals that require a gradient"),
    ]


def test_auto_takes_the_blocks_wherever_they_cover_the_case():
    head = make("het", 3, 5)
    distribution = head.logit_distribution(torch.randn(2, 3, dtype=torch.float64))
    assert choose_impl("auto", distribution, normals(head, 2)) is None
    assert choose_impl("reference", distribution, normals(head, 2)) is reference
    for uncovered, z, reason in uncovered_cases():
        assert choose_impl("auto", uncovered, z) is reference
        with pytest.raises(ValueError, match=f'impl="blocked" does not cover {reason}; use impl="auto"'):
            choose_impl("blocked", uncovered, z)
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'blocked', 'reference', found 'triton'"):
        choose_impl("triton", distribution, None)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_implementations_give_the_same_numbers(variant, link):
    head = make(variant, 6, 9, link=link)
    distribution = head.logit_distribution(torch.randn(4, 6, dtype=torch.float64))
    z = None if distribution.noise is None else normals(head, 4, samples=8)
    targets = check_targets(targets_for(head, 4), torch.Size((4,)), 9, head.link)
    options = {"temperature": 1.3, "link": head.link}
    for primitive in (
        lambda impl: mc_nll(distribution, z, targets, impl=impl, **options),
        lambda impl: mc_log_probs(distribution, z, impl=impl, **options),
        lambda impl: mc_log_normalisers(distribution, z, temperature=1.3, impl=impl),
        lambda impl: mc_predict(distribution, z, impl=impl, **options).log_probs,
    ):
        auto, blocked, plain = (primitive(impl) for impl in IMPLS)
        assert torch.equal(auto, blocked)
        torch.testing.assert_close(blocked, plain, rtol=1e-10, atol=1e-10)
