"""Backbones by name: what each takes and gives."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from hetxl.data.dataset import InputSpec
from hetxl.training.backbones import Backbone, build_backbone
from hetxl.training.networks import Cnn, Mlp
from support.training import small

FEATURES, TOKENS, PICTURES, GREY = (
    InputSpec("features", (6,)),
    InputSpec("tokens", (3,), 20),
    InputSpec("image", (3, 32, 32)),
    InputSpec("image", (1, 32, 32)),
)


def inputs_for(spec, batch=2):
    if spec.kind == "tokens":
        return torch.randint(spec.vocabulary, (batch, *spec.shape))
    return torch.randn(batch, *spec.shape)


def build(name, spec, **options) -> Any:
    return build_backbone(small(backbone=name, pretrained=False, **options), spec)


@pytest.mark.parametrize(
    ("name", "spec", "features"),
    [
        ("none", FEATURES, 6),
        ("mlp", FEATURES, 128),
        ("mlp", TOKENS, 128),
        ("cnn", PICTURES, 256),
        ("cnn", GREY, 256),
        ("timm:test_resnet", PICTURES, 96),
        ("timm:test_resnet", GREY, 96),
        ("timm:mobilenetv3_small_050", PICTURES, 1024),  # its num_features is another
        ("hf:mobilenet_v2", PICTURES, 1280),  # states no size of its features
        ("hf:segformer", PICTURES, 256),  # has no pooled output, and its last layer is a map
    ],
)
def test_features(name, spec, features):
    backbone = build(name, spec)
    assert backbone.out_features == features
    assert backbone.eval()(inputs_for(spec)).shape == (2, features)


@pytest.mark.parametrize("frozen", [False, True])
def test_normalised_features_have_the_length_of_as_many_unit_ones(frozen):
    backbone = build("mlp", FEATURES, features=9, width=8, normalize_features=True, frozen=frozen)
    inputs = inputs_for(FEATURES, 5)
    found = backbone(inputs)
    torch.testing.assert_close(found.norm(dim=-1), torch.full((5,), 3.0))
    plain = backbone.body(inputs)
    torch.testing.assert_close(found * plain.norm(dim=-1, keepdim=True) / 3, plain)
    assert found.requires_grad != frozen
    assert build("none", FEATURES, normalize_features=True)(torch.zeros(1, 6)).eq(0).all()  # nothing to divide by


def test_auto_goes_by_the_input():
    assert isinstance(build("auto", FEATURES).body, nn.Identity)
    assert isinstance(build("auto", TOKENS).body[1], Mlp)
    assert isinstance(build("auto", PICTURES, width=8, depth=1).body, Cnn)


def test_grey_pictures_are_read_place_by_place():
    grey, colour = (build("cnn", spec, width=8, depth=1).body for spec in (GREY, PICTURES))
    assert (grey.last.in_features, colour.last.in_features) == (32 * 16, 64)
    assert (grey.body[0].in_channels, colour.body[0].in_channels) == (1, 3)


def test_options_of_the_networks():
    mlp = build("mlp", TOKENS, features=7, width=10, depth=3, embedding=5, dropout=0.25)
    assert mlp.out_features == 7
    assert mlp.body[0].table.weight.shape == (20, 5)
    assert mlp.body[1].first.weight.shape == (10, 15)
    assert (len(mlp.body[1].hidden), mlp.body[1].last[2].p) == (2, 0.25)
    cnn = build("cnn", PICTURES, features=9, width=8, depth=1)
    assert (cnn.out_features, cnn.body.body[0].out_channels, len(cnn.body.body)) == (9, 8, 5)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("none", TOKENS, "backbone 'none' is for features, but this data is tokens; use 'mlp' or leave --backbone out"),
        ("none", PICTURES, "backbone 'none' is for features, but this data is pictures; use 'cnn'"),
        ("cnn", FEATURES, "backbone 'cnn' is for pictures, but this data is features; use 'none'"),
        ("mlp", PICTURES, "backbone 'mlp' is for features and tokens; for pictures use 'cnn'"),
        ("timm:resnet18", TOKENS, "backbone 'timm:resnet18' is for pictures, but this data is tokens"),
        ("hf:resnet", FEATURES, "backbone 'hf:resnet' is for pictures, but this data is features"),
        ("resnet18", PICTURES, "backbone"),
        ("timm:", PICTURES, "backbone"),
        ("timm:resnet81", PICTURES, "backbone 'timm:resnet81' names none of"),
        ("hf:mobilebert", PICTURES, "backbone 'hf:mobilebert' takes input_ids, and not pictures; use a vision model"),
        ("hf:levit", PICTURES, "backbone 'hf:levit' does not take pictures of 32 × 32"),
    ],
)
def test_what_does_not_fit_is_said(name, spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name, spec)


@pytest.mark.parametrize(
    ("name", "spec", "options"),
    [
        ("none", FEATURES, {"width": 1024}),
        ("none", FEATURES, {"dropout": 0.5}),
        ("cnn", PICTURES, {"dropout": 0.5}),
        ("mlp", FEATURES, {"embedding": 8}),
        ("timm:resnet18", PICTURES, {"depth": 4}),
    ],
)
def test_options_that_a_backbone_does_not_have_are_refused(name, spec, options):
    (option,) = options
    with pytest.raises(ValueError, match=f"{option} = .* is nothing that backbone '{name}' has.*leave it out"):
        build(name, spec, **options)


def test_no_published_weights():
    import timm

    without = next(name for name in timm.list_models() if not timm.is_model_pretrained(name))
    with pytest.raises(ValueError, match=f"'timm:{without}' has no published weights; use --no-pretrained"):
        build_backbone(small(backbone=f"timm:{without}"), PICTURES)


def test_probing_leaves_no_trace():
    backbone = build("timm:test_resnet", PICTURES)
    assert all(module.training for module in backbone.modules())
    counts = [value for name, value in backbone.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert not any(counts)


def test_frozen_stays_in_evaluation_mode_without_gradients():
    backbone = build("timm:test_resnet", PICTURES, frozen=True)
    model = nn.Sequential(backbone, nn.Linear(backbone.out_features, 2))
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    model.train()
    assert model[1].training
    assert not any(module.training for module in backbone.body.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    found = backbone(inputs_for(PICTURES))
    assert not found.requires_grad
    model(inputs_for(PICTURES)).sum().backward()
    assert model[1].weight.grad is not None
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    model.eval()
    model.train()
    assert not backbone.body.training


def test_a_backbone_that_is_trained():
    body = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    backbone = Backbone(body, 4)
    assert backbone.eval().body.training is False
    assert backbone.train().body.training is True
    backbone(inputs_for(FEATURES)).sum().backward()
    assert body[0].weight.grad is not None
