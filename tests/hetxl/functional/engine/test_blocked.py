"""The fused evaluation against the plain one: every head, link, covariance, order, target form and reduction, with
blocks that do not divide the sizes."""

import pytest
import torch

from hetxl import LearnedTemperature
from hetxl.functional import LabelLists, Weights, check_targets, engine, reference
from support.cases import GRID, LINKS, VARIANTS, make, normals, targets_for

B, D, K, S = 7, 5, 13, 5
BUDGETS = [None, 3000, 900]  # bytes: everything at once; blocks of examples; also blocks of classes


def head_of(variant, dtype=torch.float64, **options):
    head = make(variant, D, K, dtype=dtype, temperature=LearnedTemperature(init=1.3), **options)
    return head.to(dtype)


def results(function, head, features, z, gradient, **options):
    """The output of an evaluation and the gradients of features and parameters."""
    features = features.detach().requires_grad_()
    head.zero_grad()
    distribution = head.logit_distribution(features)
    output = function(
        distribution,
        None if distribution.noise is None else z,
        temperature=head.temperature(),
        link=head.link,
        **options,
    )
    output.backward(gradient(output))
    values = {"output": output.detach(), "features": features.grad}
    return values | {name: parameter.grad for name, parameter in head.named_parameters()}


def assert_same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name in actual:
        scale = expected[name].abs().max() + 1e-30
        assert float((actual[name] - expected[name]).abs().max() / scale) < tolerance, name


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("variant", "covariance", "residual"), GRID)
def test_engine_equals_the_reference_for_every_head(variant, link, covariance, residual, order, budget):
    head = head_of(variant, link=link, covariance=covariance, residual=residual)
    features, z = torch.randn(B, D, dtype=torch.float64), normals(head, B, samples=S)
    targets = check_targets(targets_for(head, B), torch.Size([B]), K, link)
    weights = torch.randn(B, K, dtype=torch.float64)
    for reduction in ("mean", "none"):
        case = {"targets": targets, "order": order, "reduction": reduction}
        gradient = lambda output: 1.7 * torch.ones_like(output) + torch.arange(output.numel()).view(output.shape)  # noqa: E731
        expected = results(reference.mc_nll, head, features, z, gradient, **case)
        assert_same(results(engine.mc_nll, head, features, z, gradient, memory_budget=budget, **case), expected, 1e-10)
    expected = results(reference.mc_log_probs, head, features, z, lambda _: weights, order=order)
    actual = results(engine.mc_log_probs, head, features, z, lambda _: weights, order=order, memory_budget=budget)
    assert_same(actual, expected, 1e-10)


IDS = torch.tensor([3, 0, 12, -100, 7, 7, 5])
SOFT = torch.rand(B, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FORMS = [
    ("softmax", IDS),
    ("softmax", SOFT / SOFT.sum(-1, keepdim=True)),
    ("sigmoid", IDS),
    ("sigmoid", SOFT),
    ("sigmoid", (SOFT > 0.7).double()),
    ("sigmoid", [[0, 4], [], [12], [1, 2, 3], [7], [7, 8], [5]]),
    ("sigmoid", (SOFT * (SOFT > 0.6)).to_sparse()),
]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("link", "labels"), FORMS)
def test_every_form_of_target(link, labels, weighted, reduction, order, budget):
    head = head_of("het-xl", link=link)
    features, z = torch.randn(B, D, dtype=torch.float64), normals(head, B, samples=S)
    targets = check_targets(labels, torch.Size([B]), K, link)
    weights = Weights()
    if weighted:
        smoothing = 0.1 if link == "softmax" else 0.0
        weights = Weights(torch.rand(B, dtype=torch.float64), torch.rand(K, dtype=torch.float64), smoothing)
    case = {"targets": targets, "order": order, "reduction": reduction, "weights": weights}
    expected = results(reference.mc_nll, head, features, z, torch.ones_like, **case)
    actual = results(engine.mc_nll, head, features, z, torch.ones_like, memory_budget=budget, **case)
    assert_same(actual, expected, 1e-10)


@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_single_precision_at_a_larger_size(variant, link, order):
    # Loss to 1e-6, gradients to 1e-5 of the double-precision ones: 60 samples, 300 classes, blocks that do not divide.
    wide = make(variant, 32, 301, link=link, rank=6, train_samples=60)
    wide.double()
    narrow = make(variant, 32, 301, link=link, rank=6, dtype=torch.float32)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict(narrow.state_dict())
    features, z = torch.randn(9, 32), normals(narrow, 9, samples=60, dtype=torch.float32)
    targets = check_targets(torch.randint(301, (9,)), torch.Size([9]), 301, link)
    expected = results(
        reference.mc_nll, wide, features.double(), z.double(), torch.ones_like, targets=targets, order="samples"
    )
    actual = results(
        engine.mc_nll, narrow, features, z, torch.ones_like, targets=targets, order=order, memory_budget=2**18
    )
    assert float((actual["output"] - expected["output"]).abs() / expected["output"]) < 1e-6
    assert_same(actual, expected, 1e-5)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", ["det", "het-xl"])
def test_an_opaque_mean_is_left_alone(variant, link):
    # The mean logits of an opaque classifier reach the engine as they are: it must not work on them in place.
    weight = torch.randn(K, D, dtype=torch.float64, requires_grad=True)
    extra = {"noise_features": 3} if variant == "het-xl" else {}
    head = make(variant, D, K, link=link, classifier=lambda features: features @ weight.T, **extra)
    features = torch.randn(B, D, dtype=torch.float64)
    distribution = head.logit_distribution(features)
    before = distribution.mean.detach().clone()
    z = normals(head, B)
    targets = check_targets(torch.arange(B), torch.Size([B]), K, link)
    options = {"temperature": 0.7, "link": link}
    z = None if distribution.noise is None else z
    loss = engine.mc_nll(distribution, z, targets, **options)
    assert torch.equal(distribution.mean, before)
    torch.testing.assert_close(loss, reference.mc_nll(distribution, z, targets, **options))
    (gradient,) = torch.autograd.grad(loss, weight)
    (expected,) = torch.autograd.grad(
        reference.mc_nll(head.logit_distribution(features), z, targets, **options), weight
    )
    torch.testing.assert_close(gradient, expected)


def test_lists_need_no_matrix():
    # K = 3,000,000 classes with 4 examples: a [B, K] matrix of labels or logits would be 48 MB; the budget is 4 MB.
    torch.manual_seed(0)
    classes = 3_000_000
    head = make("het-xl", 2, classes, link="sigmoid", rank=1, dtype=torch.float32, memory_budget=2**22, train_samples=2)
    lists = LabelLists.from_lists([[5, 2_999_999], [], [17], [123_456]])
    with torch.no_grad():
        loss = head.loss(torch.randn(4, 2), lists, noise=torch.zeros(2, 2))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("variant", ["det", "het-xl"])
def test_slices_that_stay_in_the_cache(variant, monkeypatch):
    # Sliced into 32 classes at a time; 71 leaves a rest. The labels are in the first, the middle and the last slice.
    monkeypatch.setattr("hetxl.functional.engine.blocked.CACHED_LOGITS", 1)
    head = make(variant, D, 71, dtype=torch.float64).double()
    features, z = torch.randn(B, D, dtype=torch.float64), normals(head, B, samples=S)
    ids = torch.tensor([0, 31, 32, 40, 63, 64, 70])
    case = {"targets": check_targets(ids, torch.Size([B]), 71, "softmax"), "order": "samples", "reduction": "sum"}
    expected = results(reference.mc_nll, head, features, z, torch.ones_like, **case)
    assert_same(results(engine.mc_nll, head, features, z, torch.ones_like, **case), expected, 1e-10)


@pytest.mark.parametrize("order", ["samples", "factors"])
def test_log_probabilities_that_underflow(order):
    # Some classes of some examples are far below the smallest float32; the others are computed the fast way.
    head = head_of("het-xl", dtype=torch.float32)
    features, z = torch.randn(B, D), normals(head, B, samples=S, dtype=torch.float32)
    features[:2] *= 2000
    distribution = head.logit_distribution(features)
    expected = reference.mc_log_probs(distribution, z, temperature=1.0, link="softmax", order=order)
    log_probs = engine.mc_log_probs(distribution, z, temperature=1.0, link="softmax", order=order)
    assert expected.min() < -500
    torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("budget", [*BUDGETS, 30_000])
@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_normalisers_equal_the_reference(variant, order, budget, excluded):
    head = head_of(variant)
    features, z = torch.randn(B, D, dtype=torch.float64), normals(head, B, samples=S)
    classes = torch.tensor([0, 12, -1, 5, 5, -1, 3]) if excluded else None
    gradient = lambda output: torch.arange(output.numel()).view(output.shape) - 9.5  # noqa: E731

    def with_options(function, **options):
        return lambda distribution, z, link, **more: function(distribution, z, excluded=classes, **more, **options)

    expected = results(with_options(reference.mc_log_normalisers, order=order), head, features, z, gradient)
    fused = with_options(engine.mc_log_normalisers, order=order, memory_budget=budget)
    assert_same(results(fused, head, features, z, gradient), expected, 1e-10)


def test_the_log_normaliser_of_nothing():
    # The only class is left out: nothing that an exponential sees, and gradients without NaN.
    head = make("het-xl", D, 1)
    features = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    excluded = torch.tensor([0, -1])
    distribution, z = head.logit_distribution(features), normals(head, 2, samples=S)
    normalisers = engine.mc_log_normalisers(distribution, z, temperature=1.0, excluded=excluded)
    assert (normalisers[0] <= -1e29).all()
    torch.testing.assert_close(normalisers[1], distribution.sample(z)[1, :, 0])
    own = torch.zeros(2, S, dtype=torch.float64, requires_grad=True)
    torch.logaddexp(normalisers, own)[0].sum().backward()
    assert torch.isfinite(features.grad).all()
    assert (own.grad[0] == 1).all()
