import pytest
import torch
from torch import nn

from hetxl import HetXLHead
from hetxl.evaluation.covariance import logit_covariance
from support.cases import COVARIANCES, RESIDUALS, VARIANTS, make


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "det"])
def test_covariance_is_that_of_the_distribution(variant, covariance, residual):
    head = make(variant, covariance=covariance, residual=residual)
    distribution = head.logit_distribution(torch.randn(3, 5, dtype=torch.float64))
    classes = torch.tensor([[0, 3, 6], [5, 1, 2], [4, 0, 1]])
    with torch.no_grad():
        expected = distribution.covariance(classes)
    torch.testing.assert_close(logit_covariance(distribution, classes), expected)


def test_classes_of_one_bucket_share_its_noise():
    head = make("het-h", buckets=2, residual="diagonal", covariance="diagonal")
    distribution = head.logit_distribution(torch.randn(1, 5, dtype=torch.float64))
    classes = torch.arange(7).unsqueeze(0)
    found = logit_covariance(distribution, classes)[0] > 0
    assert torch.equal(found, head.hash.unsqueeze(0) == head.hash.unsqueeze(1))


def test_an_opaque_classifier_has_a_covariance_too():
    inner = nn.Linear(5, 7)
    head = HetXLHead(5, 7, rank=2, classifier=nn.Sequential(inner))
    plain = HetXLHead(5, 7, rank=2, classifier=inner)
    plain.covariance.load_state_dict(head.covariance.state_dict())
    features, classes = torch.randn(2, 5), torch.tensor([[0, 1], [6, 2]])
    found = logit_covariance(head.logit_distribution(features), classes)
    expected = logit_covariance(plain.logit_distribution(features), classes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not found.requires_grad


def test_without_noise_it_is_zero():
    distribution = make("det").logit_distribution(torch.randn(2, 5, dtype=torch.float64))
    assert torch.equal(logit_covariance(distribution, torch.zeros(2, 3, dtype=torch.int64)), torch.zeros(2, 3, 3))
