from functools import partial

import pytest
import torch

from hetxl import LearnedTemperature
from hetxl.functional import LabelLists, Targets, Weights, check_targets, engine, reference
from support.cases import LINKS, VARIANTS, make, normals, targets_for


def setting(variant, link):
    head = make(variant, 3, 4, link=link, temperature=LearnedTemperature()).double()
    features = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    z = None if head.covariance is None else normals(head, 2, samples=3)
    return head, features, z, check_targets(targets_for(head, 2), torch.Size([2]), 4, link)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_second_derivatives_pass_gradgradcheck(variant, link):
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
    products = []
    for function in (engine.mc_nll, reference.mc_nll):
        loss = function(head.logit_distribution(features), z, targets, temperature=head.temperature(), link=link)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        products.append(torch.autograd.grad(sum((g * g).sum() for g in gradients), parameters))
    torch.testing.assert_close(*products)


@pytest.mark.parametrize("link", LINKS)
def test_a_graph_can_be_gone_through_twice(link):
    head, features, z, targets = setting("het-xl", link)
    loss = engine.mc_nll(head.logit_distribution(features), z, targets, temperature=head.temperature(), link=link)
    first = torch.autograd.grad(loss, features, retain_graph=True)
    second = torch.autograd.grad(2 * loss, features)
    torch.testing.assert_close(second[0], 2 * first[0])


def test_only_needed_gradients_are_computed():
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
    options = {"temperature": head.temperature().detach(), "excluded": torch.tensor([3, -1])}
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(
            lambda x: engine.mc_log_normalisers(head.logit_distribution(x), z, **options), (features,), fast_mode=True
        )


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_second_derivatives_under_autocast(variant, link):
    head = make(variant, 3, 4, link=link, temperature=LearnedTemperature(), dtype=torch.float32)
    features, targets = torch.randn(2, 3), targets_for(head, 2)
    z = None if head.covariance is None else normals(head, 2, samples=3, dtype=torch.float32)
    derivatives = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = features.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = head(leaf.to(dtype), targets, noise=z) + head(leaf.to(dtype), noise=z).square().mean()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        derivatives.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    torch.testing.assert_close(*derivatives, rtol=0.1, atol=0.05 * float(derivatives[1].abs().max()))


def test_unsupported_gradients_of_weights_and_labels_raise():
    rows = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    weight, class_weight = rows.detach()[:, 0].requires_grad_(), rows.detach()[0].requires_grad_()
    labels = LabelLists(torch.tensor([0, 1]), torch.tensor([3, 1]), weight, 2)
    cases = [
        ("softmax", Targets(ids=torch.tensor([1, 2])), Weights(example=weight), "weight"),
        ("softmax", Targets(ids=torch.tensor([1, 2])), Weights(classes=class_weight), "class_weight"),
        ("sigmoid", Targets(dense=rows), Weights(), "targets"),
        ("sigmoid", Targets(lists=labels), Weights(), "targets"),
    ]
    for link, targets, weights, name in cases:
        head, features, z, _ = setting("het-xl", link)
        call = partial(engine.mc_nll, head.logit_distribution(features), z, targets, temperature=1.0, link=link)
        with pytest.raises(ValueError, match=rf"^{name} requires a gradient, .* pass {name}.detach\(\)"):
            call(weights=weights)
        with torch.no_grad():
            assert torch.isfinite(call(weights=weights))


def test_rows_of_probabilities_and_their_weights_get_a_gradient():
    head, features, z, _ = setting("het-xl", "softmax")
    rows = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    weight, class_weight = rows.detach()[:, 0].requires_grad_(), rows.detach()[0].requires_grad_()
    gradients = []
    for function in (engine.mc_nll, reference.mc_nll):
        loss = function(
            head.logit_distribution(features),
            z,
            Targets(dense=rows),
            temperature=1.0,
            link="softmax",
            weights=Weights(weight, class_weight),
        )
        gradients.append(torch.autograd.grad(loss, (rows, weight, class_weight)))
    torch.testing.assert_close(*gradients)
