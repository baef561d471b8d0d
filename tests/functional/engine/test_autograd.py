import pytest
import torch

from hetxl import LearnedTemperature
from hetxl.functional import check_targets, engine, reference
from support.cases import LINKS, VARIANTS, make, normals, targets_for


def setting(variant, link):
    head = make(variant, 3, 4, link=link, temperature=LearnedTemperature()).double()
    features = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    z = None if head.covariance is None else normals(head, 2, samples=3)
    return head, features, z, check_targets(targets_for(head, 2), torch.Size([2]), 4, link)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_second_derivatives(variant, link):
    head, features, z, targets = setting(variant, link)
    options = {"temperature": head.temperature().detach(), "link": link}
    for reduction in ("mean", "none"):

        def loss(x, reduction=reduction):
            return engine.mc_nll(head.logit_distribution(x), z, targets, reduction=reduction, **options)

        assert torch.autograd.gradgradcheck(loss, (features,), fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda x: engine.mc_log_probs(head.logit_distribution(x), z, **options), (features,), fast_mode=True
    )


@pytest.mark.parametrize("link", LINKS)
def test_a_hessian_vector_product_is_the_plain_one(link):
    head, features, z, targets = setting("het-xl", link)
    parameters = list(head.parameters())
    found = []
    for function in (engine.mc_nll, reference.mc_nll):
        loss = function(head.logit_distribution(features), z, targets, temperature=head.temperature(), link=link)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        found.append(torch.autograd.grad(sum((g * g).sum() for g in gradients), parameters))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("link", LINKS)
def test_a_graph_can_be_gone_through_twice(link):
    head, features, z, targets = setting("het-xl", link)
    loss = engine.mc_nll(head.logit_distribution(features), z, targets, temperature=head.temperature(), link=link)
    first = torch.autograd.grad(loss, features, retain_graph=True)
    second = torch.autograd.grad(2 * loss, features)
    torch.testing.assert_close(second[0], 2 * first[0])


def test_nothing_is_computed_that_nobody_needs():
    head, features, z, targets = setting("het-xl", "softmax")
    options = {"temperature": 1.0, "link": "softmax"}
    with torch.no_grad():
        assert not engine.mc_nll(head.logit_distribution(features), z, targets, **options).requires_grad
    head.requires_grad_(False)
    loss = engine.mc_nll(head.logit_distribution(features), z, targets, **options)
    assert loss.grad_fn.needed == {"features", "scale", "residual"}
    loss.backward()
    assert features.grad is not None
    assert head.classifier.weight.grad is None


def test_normals_that_need_a_gradient_get_one():
    head, features, z, targets = setting("het-xl", "softmax")
    z.requires_grad_()
    engine.mc_nll(head.logit_distribution(features), z, targets, temperature=1.0, link="softmax").backward()
    assert z.grad.abs().sum() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_derivatives_of_the_log_normaliser(variant):
    head, features, z, _ = setting(variant, "softmax")
    options = {"temperature": head.temperature().detach(), "left_out": torch.tensor([3, -1])}
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(
            lambda x: engine.mc_log_normalisers(head.logit_distribution(x), z, **options), (features,), fast_mode=True
        )
