"""Predictions of the top classes with noise for few of them, against all classes sampled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetxl import HetXLHead
from hetxl.functional.engine import candidates
from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.predict import TOLERANCE
from support.cases import make, normals

K, D = 2048, 16
WORST = 1e-3
"""Total variation that no example may exceed."""


def trained_like(noise=0.3, peak=12.0, link="softmax", variant="het-xl", seed=0, **options):
    """A head whose features point at classes, as after training, and features of some examples [n, D]."""
    torch.manual_seed(seed)
    head = make(variant, D, K, dtype=torch.float32, rank=4, link=link, noise_init=noise, **options).eval()
    with torch.no_grad():
        head.get_parameter("classifier.weight").normal_()
    weight = head.get_parameter("classifier.weight").detach()
    features = weight[torch.randint(K, (24,))] * peak / D + 0.3 * torch.randn(24, D)
    return head, features


def total_variation(few, whole):
    difference = few.probs - whole.probs.gather(-1, few.indices)
    return (difference.abs().sum(-1) + difference.sum(-1).abs()) / 2


def inputs_of(head, features, samples=64):
    z = head.covariance.fixed_draws(head.sampler, samples, 0)
    return gather_inputs(head.logit_distribution(features), z, head.temperature())


@pytest.mark.parametrize("variant", ["het-xl", "het-xl-own", "het", "het-h"])
def test_top_classes_are_those_of_all_classes(variant):
    head, features = trained_like(noise=0.1, variant=variant)
    few, whole = head.predict(features, top_k=5), head.predict(features)
    assert total_variation(few, whole).max() <= WORST
    assert (few.left_out > 0).any()  # some were predicted from few classes
    assert torch.equal(few.indices[:, 0], whole.probs.argmax(-1))
    torch.testing.assert_close(few.entropy, whole.entropy, rtol=0.05, atol=0.05)
    torch.testing.assert_close(few.expected_entropy, whole.expected_entropy, rtol=0.05, atol=0.05)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.01, 0.1, 0.3, 1.0, 3.0]),
    peak=st.sampled_from([0.0, 6.0, 12.0, 20.0]),
    temperature=st.sampled_from([0.3, 1.0]),
    top_k=st.sampled_from([1, 5, 20]),
)
def test_no_head_is_far_from_all_classes(seed, noise, peak, temperature, top_k):
    head, features = trained_like(noise, peak, seed=seed, temperature=temperature)
    few, whole = head.predict(features, top_k=top_k, num_samples=64), head.predict(features, num_samples=64)
    assert total_variation(few, whole).max() <= WORST


def test_large_noise_is_left_to_all_classes():
    head, features = trained_like(noise=3.0, temperature=0.3)
    few, whole = head.predict(features, top_k=5), head.predict(features)
    assert torch.equal(few.left_out, torch.zeros(len(features)))
    torch.testing.assert_close(few.probs, whole.probs.topk(5).values)


def test_noise_lifts_classes_whose_probabilities_underflow():
    torch.manual_seed(0)
    head = HetXLHead(D, K, temperature=0.05, noise_init=1.0).eval()
    features = 12 * torch.randn(16, D)
    few, whole = head.predict(features, top_k=1), head.predict(features)
    assert total_variation(few, whole).max() <= WORST
    torch.testing.assert_close(few.entropy, whole.entropy, rtol=0, atol=5e-3)


def test_draws_that_are_no_pairs_or_each_example_has_its_own():
    head, features = trained_like(noise=0.1)
    for noise in (normals(head, samples=33, dtype=torch.float32), normals(head, 24, samples=64, dtype=torch.float32)):
        few, whole = head.predict(features, top_k=5, noise=noise), head.predict(features, noise=noise)
        assert total_variation(few, whole).max() <= WORST


def test_the_rough_variance_is_that_of_isotropic_noise():
    head, features = trained_like(noise=0.5)
    inputs = inputs_of(head, features)
    rough, exact = candidates.rough_variance(inputs), head.logit_distribution(features).variance
    weight = head.get_parameter("classifier.weight")
    norms = (weight - weight.mean(0)).square().sum(-1)
    assert head.covariance is not None
    mean = head.covariance(features).variance().mean(-1, keepdim=True)
    torch.testing.assert_close(rough, norms * mean)
    assert 0.5 < float((rough.mean() / exact.mean()).detach()) < 2
    het, features = trained_like(noise=0.5, variant="het-h", temperature=0.5)
    torch.testing.assert_close(
        candidates.rough_variance(inputs_of(het, features)), het.logit_distribution(features).variance / 0.25
    )


def test_factors_at_some_classes_are_those_of_the_lifted_basis():
    for variant in ("het-xl", "het-xl-own", "het", "het-h"):
        for covariance in ("efficient", "low_rank", "diagonal", "full"):
            head = make(variant, 5, 7, covariance=covariance)
            features, classes = torch.randn(3, 5, dtype=torch.float64), torch.randint(7, (3, 4))
            distribution = head.logit_distribution(features)
            rows = candidates.factors_at(distribution.noise, distribution.lift, classes)
            index = classes.unsqueeze(-1).expand(-1, -1, distribution.size)
            torch.testing.assert_close(rows, distribution.factors.expand(3, -1, -1).mT.gather(1, index))


def test_the_classes_of_a_selection_weigh_as_much_as_all():
    head, features = trained_like(noise=0.1)
    inputs = inputs_of(head, features)
    mean = candidates.mean_logits(inputs)
    selection = candidates.Selection(mean, candidates.rough_variance(inputs), 5, TOLERANCE)
    everyone = torch.arange(len(features))
    seen = []
    for examples, classes in selection.groups(everyone, 100):
        log_p, weight, drawn, rest = selection.weights(examples, classes)
        torch.testing.assert_close(weight.sum(-1) + torch.where(drawn.any(-1), 0.0, rest), torch.ones(len(examples)))
        probs = mean[examples].softmax(-1)
        torch.testing.assert_close(log_p.exp(), torch.where(classes < 0, 0.0, probs.gather(1, classes.clamp(min=0))))
        assert torch.equal(selection.counts[examples], (classes >= 0).sum(-1))
        certain = (classes >= 0) & ~drawn
        for row, own, sure in zip(probs, classes, certain, strict=True):
            # The likeliest count by themselves, each once.
            assert set(row.topk(5).indices.tolist()) <= set(own[sure].tolist())
            assert len(own[own >= 0].unique()) == (own >= 0).sum()
        seen.append(examples)
    assert torch.equal(torch.cat(seen).sort().values, everyone)


def test_labels_of_the_sigmoid_are_those_of_all():
    head, features = trained_like(noise=0.1, link="sigmoid", bias_init=-6.0)
    few, whole = head.predict(features, top_k=5), head.predict(features)
    torch.testing.assert_close(few.probs, whole.probs.topk(5).values, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(few.entropy, whole.entropy, rtol=0.03, atol=0.05)
    torch.testing.assert_close(few.expected_entropy, whole.expected_entropy, rtol=0.03, atol=0.05)


@pytest.mark.parametrize(
    "options", [{"residual": "diagonal"}, {"num_classes": 7}, {"num_classes": 1}, {"tolerance": 0.0}]
)
def test_all_classes_are_sampled_where_few_would_not_pay(options):
    torch.manual_seed(0)
    tolerance = options.pop("tolerance", TOLERANCE)
    head = HetXLHead(**({"in_features": 4, "num_classes": K, "rank": 2} | options)).eval()
    features = torch.randn(3, 4)
    prediction = head.predict(features, top_k=1, tolerance=tolerance)
    assert prediction.left_out is None
    torch.testing.assert_close(prediction.probs, head.predict(features).probs.topk(1).values)
