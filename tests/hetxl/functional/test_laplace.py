"""The posterior of a last layer against Hessians by autograd."""

import pytest
import torch
import torch.nn.functional as F

from hetxl.functional.laplace import laplace_variance, last_layer_curvature, weight_covariance, with_one

N, D, K = 40, 3, 4


def problem(seed=0, scale=1.0):
    """Return features [N, D], W [K, D] and b [K], in double precision."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((N, D), (K, D), (K,))
    features, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return features, scale * weight, scale * bias


def blocks(features, weight, bias, link, temperature=1.0):
    """Return the block of each class [K, D + 1, D + 1] of the Hessian of the summed loss, by autograd.

    The loss is convex and linear in its labels, so any labels have the same Hessian: Gauss–Newton is exact.
    """
    labels = torch.arange(N) % K

    def loss(parameters):
        logits = with_one(features, D + 1) @ parameters.T / temperature
        if link == "softmax":
            return F.cross_entropy(logits, labels, reduction="sum")
        return F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, K).double(), reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, torch.cat((weight, bias.unsqueeze(-1)), -1))
    return torch.stack([hessian[k, :, k] for k in range(K)])


def curvature_of(features, weight, bias, link, batch=7, **options):
    return last_layer_curvature(features.split(batch), lambda x: F.linear(x, weight, bias), link=link, **options)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_the_posterior_is_that_of_the_full_hessian_where_classes_are_equally_probable(link):
    features, weight, bias = problem(scale=0.0)
    precision = 0.7
    expected = torch.linalg.inv(blocks(features, weight, bias, link) + precision * torch.eye(D + 1))
    torch.testing.assert_close(weight_covariance(curvature_of(features, weight, bias, link), precision), expected)


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_sum_of_all_blocks_and_the_trace_of_each_are_exact(link, temperature):
    features, weight, bias = problem(1)
    curvature = curvature_of(features, weight, bias, link, temperature=temperature)
    product = curvature.vectors @ torch.diag(curvature.values) @ curvature.vectors.T
    actual, expected = curvature.classes[:, None, None] * product, blocks(features, weight, bias, link, temperature)
    torch.testing.assert_close(actual.sum(0), expected.sum(0))
    torch.testing.assert_close(torch.einsum("kii->k", actual), torch.einsum("kii->k", expected))


def test_one_example_has_an_exact_posterior_whatever_its_probabilities():
    features, weight, bias = problem(2)
    features = features[:1].expand(N, D)
    expected = torch.linalg.inv(blocks(features, weight, bias, "sigmoid") + 2.0 * torch.eye(D + 1))
    torch.testing.assert_close(weight_covariance(curvature_of(features, weight, bias, "sigmoid"), 2.0), expected)


def test_variance_of_logits_is_the_quadratic_form_of_the_covariance():
    features, weight, bias = problem(3)
    curvature = curvature_of(features, weight, bias, "softmax")
    inputs, covariance = with_one(features, D + 1), weight_covariance(curvature, 0.3)
    expected = torch.einsum("ni,kij,nj->nk", inputs, covariance, inputs)
    torch.testing.assert_close(laplace_variance(features, curvature, 0.3), expected)


def test_a_sample_of_the_rows_stands_for_all_of_them():
    features, weight, bias = problem(4)
    whole = curvature_of(features.repeat(3, 1), weight, bias, "softmax")
    sample = curvature_of(features, weight, bias, "softmax", rows=3 * N)
    torch.testing.assert_close(weight_covariance(whole, 0.5), weight_covariance(sample, 0.5))
    torch.testing.assert_close(whole.square, sample.square)


def test_a_classifier_without_bias_has_no_posterior_of_one():
    features, weight, _ = problem(5)
    curvature = last_layer_curvature([features], lambda x: x @ weight.T, bias=False)
    assert weight_covariance(curvature, 1.0).shape == (K, D, D)
    assert laplace_variance(features, curvature, 1.0).shape == (N, K)


def test_no_features_are_an_error():
    with pytest.raises(ValueError, match="batches is empty"):
        last_layer_curvature([], lambda x: x)
