"""Predictions of the top classes with noise for few of them, against all classes sampled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetxl import HetXLHead
from hetxl.functional.engine import candidates
from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.logit_rows import Workspace
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


def test_the_rough_variance_ranks_classes_like_the_exact_one():
    """Noise that moves the classes along one axis, beside isotropic noise."""
    head, features = trained_like(noise=0.5)
    with torch.no_grad():
        weight = head.get_parameter("classifier.weight")
        weight.mul_(0.6 ** torch.arange(D))
        weight.sub_(weight.mean(0))
    inputs = inputs_of(head, features)
    rows = candidates.rows_of(inputs)
    assert rows is not None
    rough = rows.in_order(candidates.rough_variance(inputs, rows)).detach()
    exact = head.logit_distribution(features).variance.detach()
    assert 0.5 < float(rough.mean() / exact.mean()) < 2
    both = torch.stack((rough, exact)).log()
    both = both - both.mean(-1, keepdim=True)
    correlation = (both[0] * both[1]).sum(-1) / both.norm(dim=-1).prod(0)
    assert correlation.mean() > 0.8
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


@pytest.mark.parametrize("classes", [K, K + 37])
def test_clusters_hold_each_class_once_and_near_rows(classes):
    head = HetXLHead(D, classes, rank=2).eval()
    weight = head.get_parameter("classifier.weight").detach()
    weight.copy_(torch.randn(classes, D) * 0.6 ** torch.arange(D))
    inputs = inputs_of(head, torch.randn(2, D))
    rows = candidates.rows_of(inputs)
    assert rows is not None
    assert torch.equal(rows.classes[rows.classes >= 0].sort().values, torch.arange(classes))
    ids = torch.arange(classes, dtype=torch.float32).expand(2, -1)
    assert torch.equal(rows.in_order(rows.classes.expand(2, -1).float()), ids)
    assert candidates.rows_of(inputs) is rows
    clustered = weight[rows.classes.clamp(min=0)].view(rows.num_clusters, -1, D)
    assert clustered.var(1).sum(-1).mean() < 0.5 * weight.var(0).sum()
    with torch.no_grad():  # changed in place, they are computed again
        head.get_parameter("classifier.weight").mul_(-1).add_(torch.randn(classes, D))
    changed = candidates.rows_of(inputs_of(head, torch.randn(2, D)))
    assert changed is not None
    assert not torch.equal(changed.classes, rows.classes)


@pytest.mark.parametrize("variant", ["het-xl", "het-xl-own"])
@pytest.mark.parametrize("classes", [K, K + 37])
def test_rows_known_along_their_principal_axes_alone_do_as_well(monkeypatch, variant, classes):
    monkeypatch.setattr(candidates, "WHOLE_ROWS", 0)
    monkeypatch.setattr(candidates, "AXES", 8)
    torch.manual_seed(0)
    head = make(variant, D, classes, dtype=torch.float32, rank=4, noise_init=0.1).eval()
    with torch.no_grad():
        head.get_parameter("classifier.weight").normal_()
    features = head.get_parameter("classifier.weight").detach()[:24] * 12 / D + 0.3 * torch.randn(24, D)
    few, whole = head.predict(features, top_k=5), head.predict(features)
    assert total_variation(few, whole).max() <= WORST
    assert (few.left_out > 0).any()
    torch.testing.assert_close(few.entropy, whole.entropy, rtol=0.05, atol=0.05)
    torch.testing.assert_close(few.expected_entropy, whole.expected_entropy, rtol=0.05, atol=0.05)


def test_the_largest_of_many_are_those_of_a_sort():
    values = torch.randn(5, 4096)
    places = candidates.largest(values, 100)
    torch.testing.assert_close(values.gather(1, places).sort(descending=True).values, values.topk(100).values)


@pytest.mark.parametrize("variant", ["het-xl", "het-xl-own", "het"])
@torch.no_grad()
def test_a_selection_weighs_as_much_as_all_classes(variant):
    head, features = trained_like(noise=0.1, variant=variant)
    inputs = inputs_of(head, features)
    rows = candidates.rows_of(inputs)
    selection = candidates.Selection(inputs, 5, rows, Workspace(torch.zeros(())))
    probs = candidates.mean_logits(inputs).softmax(-1)
    own = selection.classes[selection.likeliest]
    tail = probs.scatter(1, own, 0.0)
    torch.testing.assert_close(selection.rest, tail.sum(-1))
    torch.testing.assert_close(selection.entropies.sum(-1), torch.special.entr(tail).sum(-1))
    for row, likeliest in zip(probs, own, strict=True):
        assert set(row.topk(5).indices.tolist()) <= set(likeliest.tolist())
    some = torch.tensor([3, 7])
    places, weight = selection.draw(some, 64)
    torch.testing.assert_close(weight.sum(-1), selection.rest[some])
    assert (tail[some].gather(1, selection.classes[places]) > 0).all()
    assert inputs.noise is not None
    if rows is None:
        assert variant == "het"
        return
    assert selection.means is not None
    for cluster in (0, 5):
        members = rows.classes.view(rows.num_clusters, -1)[cluster]
        mass = tail[:, members]
        torch.testing.assert_close(selection.mass[:, cluster], mass.sum(-1))
        means = mass @ inputs.noise.lift.weight[members] / mass.sum(-1, keepdim=True)
        torch.testing.assert_close(selection.means[:, cluster], means)


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


@pytest.mark.parametrize("variant", ["het-xl", "het-xl-own", "het"])
def test_stated_classes_have_the_probabilities_of_all(variant):
    head, features = trained_like(noise=0.1, variant=variant)
    whole = head.predict(features)
    best = whole.probs.argmax(-1)
    # A likely class, one that is stated twice, and any two.
    classes = torch.stack((best, best, torch.arange(24), torch.randint(K, (24,))), 1)
    few = head.predict(features, classes=classes)
    assert torch.equal(few.indices, classes)
    assert (few.left_out > 0).any()
    torch.testing.assert_close(few.log_probs, whole.log_probs.gather(1, classes), rtol=0, atol=0.02)
    torch.testing.assert_close(few.entropy, whole.entropy, rtol=0.05, atol=0.05)
    assert torch.equal(few.top_class, best)
    folded = head.predict(features.view(4, 6, D), classes=classes.view(4, 6, 4))
    torch.testing.assert_close(folded.log_probs, few.log_probs.view(4, 6, 4))


@pytest.mark.parametrize("options", [{"link": "sigmoid"}, {"flip_rate": 0.1}, {"num_classes": 7}, {"noise_scale": 0.0}])
def test_stated_classes_are_read_from_all_where_few_do_not_apply(options):
    torch.manual_seed(0)
    head = HetXLHead(**({"in_features": 4, "num_classes": K, "rank": 2} | options)).eval()
    features, classes = torch.randn(3, 4), torch.tensor([[1, 5], [6, 0], [2, 2]])
    few, whole = head.predict(features, classes=classes), head.predict(features)
    torch.testing.assert_close(few.log_probs, whole.log_probs.gather(1, classes))
    torch.testing.assert_close(few.entropy, whole.entropy)


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        (torch.zeros(3, 1, dtype=torch.int64), {"top_k": 1}, "exclude each other"),
        (torch.zeros(3, 1), {}, "torch.int64"),
        (torch.zeros(2, 1, dtype=torch.int64), {}, "shape"),
        (torch.full((3, 1), 7), {}, "0 … 6"),
        (torch.full((3, 1), -100), {}, "0 … 6"),
    ],
)
def test_errors_of_stated_classes(classes, options, message):
    head = HetXLHead(4, 7, rank=2).eval()
    with pytest.raises((ValueError, TypeError), match=message):
        head.predict(torch.randn(3, 4), classes=classes, **options)
