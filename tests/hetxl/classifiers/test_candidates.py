"""Prediction among candidates: exact where nothing is left over, right in the mean otherwise."""

import pytest
import torch

from hetxl import DetHead, HetXLHead
from hetxl.classifiers import LinearClassifier
from hetxl.classifiers.retrieved import predict_among
from hetxl.functional import mc_predict
from hetxl.functional.engine.inputs import gather_inputs

B, D, K, S, R = 9, 6, 60, 32, 3
DOUBLE = {"dtype": torch.float64}
BUDGET = 2**28


def problem(link="softmax", residual="rank1", bias=True, kind=HetXLHead):
    """A distribution over the logits with its normals, and the classes of each example by falling mean logit."""
    torch.manual_seed(0)
    options = {"rank": R, "noise_init": 0.2, "residual": residual} if kind is HetXLHead else {}
    head = kind(D, K, classifier=LinearClassifier(D, K, bias=bias, **DOUBLE), link=link, **options, **DOUBLE)
    with torch.no_grad():
        head.classifier.weight.normal_(std=1.5)
        distribution = head.logit_distribution(torch.randn(B, D, **DOUBLE))
        order = distribution.mean.argsort(-1, descending=True)
    z = torch.randn(B, S, distribution.size, **DOUBLE) if distribution.size else None
    return distribution, z, order


def test_the_problem_has_noise_that_matters():
    distribution, z, _ = problem()
    prediction = exactly(distribution, z, "softmax", None)
    assert (prediction.entropy - prediction.expected_entropy).min() > 0.05


def exactly(distribution, z, link, top_k):
    options = {"temperature": 1.3, "link": link, "top_k": top_k, "tolerance": 0}
    return mc_predict(distribution, z, **options)


def among(distribution, z, classes, others, link, top_k, **options):
    options = {"order": None, "budget": BUDGET, **options}
    inputs = gather_inputs(distribution, z, 1.3)
    return predict_among(inputs, classes, others, link=link, top_k=top_k, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", [None, "samples", "factors"])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_all_classes_between_candidates_and_others(link, order, bias):
    distribution, z, classes = problem(link, bias=bias)
    prediction = among(distribution, z, classes[:, :20], torch.arange(K), link, 4, order=order)
    expected = exactly(distribution, z, link, 4)
    for name in ("log_probs", "indices", "entropy", "expected_entropy"):
        torch.testing.assert_close(getattr(prediction, name), getattr(expected, name), msg=name)
    whole = exactly(distribution, z, link, None).log_probs.exp()
    outside = whole.scatter(-1, classes[:, :20], 0.0)
    if link == "softmax":
        torch.testing.assert_close(prediction.left_out, outside.sum(-1))
    else:
        assert (prediction.left_out >= outside.amax(-1) - 1e-12).all()


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_without_noise_and_with_a_diagonal_residual(link):
    for options in ({"kind": DetHead}, {"residual": "diagonal"}):
        distribution, z, classes = problem(link, **options)
        prediction = among(distribution, z, classes[:, :20], torch.arange(K), link, 3)
        torch.testing.assert_close(prediction.log_probs, exactly(distribution, z, link, 3).log_probs)


def test_nothing_is_left_when_all_classes_are_candidates():
    distribution, z, classes = problem()
    prediction = among(distribution, z, classes, torch.tensor([3, 9]), "softmax", 4)
    expected = exactly(distribution, z, "softmax", 4)
    torch.testing.assert_close(prediction.log_probs, expected.log_probs)
    torch.testing.assert_close(prediction.entropy, expected.entropy)
    assert (prediction.left_out == 0).all()


def test_the_rest_is_estimated_without_bias():
    distribution, _, classes = problem(kind=DetHead)
    classes = classes[:, :20]
    log_probs = (distribution.mean / 1.3).log_softmax(-1)
    inside = log_probs.gather(-1, classes).logsumexp(-1)
    weight = (-torch.expm1(inside)).log() - inside  # of the rest beside the candidates
    ratios = []
    for seed in range(400):
        others = torch.randperm(K, generator=torch.Generator().manual_seed(seed))[:15].sort().values
        share = among(distribution, None, classes, others, "softmax", 1).left_out
        ratios.append(share / (1 - share))
    ratios = torch.stack(ratios)
    error = ratios.std(0) / len(ratios) ** 0.5
    assert ((ratios.mean(0) - weight.exp()).abs() < 4.5 * error).all()
    assert (ratios.std(0) > 0).all()


def test_a_small_budget_changes_nothing():
    distribution, z, classes = problem()
    others = torch.arange(0, K, 3)
    large, small = (among(distribution, z, classes[:, :8], others, "softmax", 2, budget=size) for size in (BUDGET, 1))
    for first, second in zip(large, small, strict=True):
        torch.testing.assert_close(first, second)
