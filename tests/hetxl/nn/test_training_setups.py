"""What training loops do around a head: accumulate gradients, checkpoint activations, replicate and restore."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.cases import LINKS, VARIANTS, make, normals, targets_for

B, D, K = 6, 5, 9


class Classifier(nn.Module):
    """A backbone of one layer with a head, called with targets for the loss."""

    def __init__(self, head):
        super().__init__()
        self.backbone = nn.Linear(D, D, dtype=torch.float64)
        self.head = head

    def forward(self, features, targets, wrap=lambda function, *args: function(*args), **options):
        hidden = torch.tanh(self.backbone(features))
        return wrap(lambda x: self.head(x, targets, **options), hidden)


def model_of(variant, link, **options):
    model = Classifier(make(variant, D, K, link=link, **options))
    return model, torch.randn(B, D, dtype=torch.float64), targets_for(model.head, B)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(actual, expected, tolerance=1e-12):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_accumulated_over_halves_are_those_of_the_whole(variant, link):
    model, features, targets = model_of(variant, link)
    z = None if model.head.covariance is None else normals(model.head, B)
    model(features, targets, noise=z).backward()
    expected = gradients(model)
    model.zero_grad()
    for part in (slice(0, B // 2), slice(B // 2, B)):
        (model(features[part], targets[part], noise=None if z is None else z[part]) / 2).backward()
    assert_same(gradients(model), expected)


def test_sums_over_unequal_parts_are_those_of_the_whole():
    model, features, targets = model_of("het-xl", "softmax")
    z, weight = normals(model.head, B), torch.rand(B, dtype=torch.float64)
    model(features, targets, noise=z, weight=weight).backward()
    expected = gradients(model)
    model.zero_grad()
    for part in (slice(0, 1), slice(1, B)):
        loss = model(features[part], targets[part], noise=z[part], weight=weight[part], reduction="sum")
        (loss / weight.sum()).backward()
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sampler", ["orthogonal", "iid", "antithetic", "sobol"])
@pytest.mark.parametrize("link", LINKS)
def test_checkpointed_heads_draw_the_same_noise_again(link, sampler, reentrant):
    model, features, targets = model_of("het-xl", link, sampler=sampler)
    results = []
    for wrap in (None, lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant)):
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(features, targets, **({} if wrap is None else {"wrap": wrap}))
        torch.randn(3)  # somebody else draws between the passes
        loss.backward()
        results.append({"loss": loss.detach()} | gradients(model))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_head_can_be_checkpointed(variant, reentrant):
    model, features, targets = model_of(variant, "softmax")
    results = []
    for wrap in (None, lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant)):
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(features, targets, reduction="none", **({} if wrap is None else {"wrap": wrap}))
        loss.sum().backward()
        results.append({"loss": loss.detach()} | gradients(model))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints_under_autocast(autocast):
    model, features, targets = model_of("het-xl", "softmax")
    model, features = model.float(), features.float()
    results = []
    for wrap in (None, lambda function, *args: checkpoint(function, *args, use_reentrant=False)):
        model.zero_grad()
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(features, targets, **({} if wrap is None else {"wrap": wrap}))
        loss.backward()
        results.append({"loss": loss.detach()} | gradients(model))
    assert_same(results[1], results[0], 1e-6)


def test_a_copy_trains_like_the_original():
    # As weight averaging and evaluation copies do.
    model, features, targets = model_of("het-h", "sigmoid")
    twin, z = copy.deepcopy(model), normals(model.head, B)
    for each in (model, twin):
        each(features, targets, noise=z).backward()
    assert_same(gradients(twin), gradients(model), 0)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_of_one_step_do_not_leak_into_the_next(set_to_none):
    # The engine scales its gradients in place: autograd must not be handed the same memory twice.
    model, features, targets = model_of("het-xl", "softmax")
    z = normals(model.head, B)
    model(features, targets, noise=z).backward()
    expected = gradients(model)
    for _ in range(2):
        model.zero_grad(set_to_none=set_to_none)
        model(features, targets, noise=z).backward()
        assert_same(gradients(model), expected)
    (3 * model(features, targets, noise=z)).backward()
    assert_same(gradients(model), {name: 4 * value for name, value in expected.items()})


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_generator_under_checkpointing_is_refused_rather_than_drawn_from_again(reentrant):
    model, features, targets = model_of("het-xl", "softmax")
    features.requires_grad_()

    def wrap(function, *args):
        return checkpoint(function, *args, use_reentrant=reentrant)

    loss = model(features, targets, wrap, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="generator= cannot be used under activation checkpointing"):
        loss.backward()
