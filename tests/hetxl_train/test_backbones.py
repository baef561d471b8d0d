"""Backbones by name: what each takes and gives."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from hetxl_train.backbones import Backbone, Cnn, Mlp, TokenWindow, build_backbone, layer_depths
from hetxl_train.data.dataset import InputSpec
from support.training import small

FEATURES, TOKENS, IMAGES, GREY = (
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
        ("cnn", IMAGES, 256),
        ("cnn", GREY, 256),
        ("timm:test_resnet", IMAGES, 96),
        ("timm:test_resnet", GREY, 96),
        ("timm:mobilenetv3_small_050", IMAGES, 1024),  # its num_features is another
        ("hf:mobilenet_v2", IMAGES, 1280),  # states no size of its features
        ("hf:segformer", IMAGES, 256),  # has no pooled output, and its last layer is a map
    ],
)
def test_backbones_have_their_feature_sizes(name, spec, features):
    backbone = build(name, spec)
    assert backbone.out_features == features
    assert backbone.eval()(inputs_for(spec)).shape == (2, features)


@pytest.mark.parametrize("frozen", [False, True])
def test_normalised_features_have_the_length_of_as_many_unit_ones(frozen):
    backbone = build("mlp", FEATURES, features=9, width=8, normalize_features=True, frozen=frozen)
    inputs = inputs_for(FEATURES, 5)
    features = backbone(inputs)
    torch.testing.assert_close(features.norm(dim=-1), torch.full((5,), 3.0))
    plain = backbone.body(inputs)
    torch.testing.assert_close(features * plain.norm(dim=-1, keepdim=True) / 3, plain)
    assert features.requires_grad != frozen
    assert build("none", FEATURES, normalize_features=True)(torch.zeros(1, 6)).eq(0).all()  # nothing to divide by


def test_auto_goes_by_the_input():
    assert isinstance(build("auto", FEATURES).body, nn.Identity)
    assert isinstance(build("auto", TOKENS).body[1], Mlp)
    assert isinstance(build("auto", IMAGES, width=8, depth=1).body, Cnn)


def test_grey_images_keep_a_grid_of_features():
    grey, colour = (build("cnn", spec, width=8, depth=1).body for spec in (GREY, IMAGES))
    assert (grey.last.in_features, colour.last.in_features) == (32 * 16, 64)
    assert (grey.body[0].in_channels, colour.body[0].in_channels) == (1, 3)


def test_options_of_the_networks():
    mlp = build("mlp", TOKENS, features=7, width=10, depth=3, embedding=5, dropout=0.25)
    assert mlp.out_features == 7
    assert mlp.body[0].table.weight.shape == (20, 5)
    assert mlp.body[1].first.weight.shape == (10, 15)
    assert (len(mlp.body[1].hidden), mlp.body[1].last[2].p) == (2, 0.25)
    cnn = build("cnn", IMAGES, features=9, width=8, depth=1)
    assert (cnn.out_features, cnn.body.body[0].out_channels, len(cnn.body.body)) == (9, 8, 5)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("none", TOKENS, "backbone 'none' is for features, but this data is tokens; use 'mlp' or leave --backbone out"),
        ("none", IMAGES, "backbone 'none' is for features, but this data is images; use 'cnn'"),
        ("cnn", FEATURES, "backbone 'cnn' is for images, but this data is features; use 'none'"),
        ("mlp", IMAGES, "backbone 'mlp' is for features and tokens; for images use 'cnn'"),
        ("timm:resnet18", TOKENS, "backbone 'timm:resnet18' is for images, but this data is tokens"),
        ("hf:resnet", FEATURES, "backbone 'hf:resnet' is for images, but this data is features"),
        ("resnet18", IMAGES, "backbone"),
        ("timm:", IMAGES, "backbone"),
        ("timm:resnet81", IMAGES, "backbone 'timm:resnet81' is not one of"),
        ("hf:mobilebert", IMAGES, "backbone 'hf:mobilebert' takes input_ids, and not images; use a vision model"),
        ("hf:levit", IMAGES, "backbone 'hf:levit' does not take images of 32 × 32"),
    ],
)
def test_mismatched_backbones_raise(name, spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(name, spec)


@pytest.mark.parametrize(
    ("name", "spec", "options"),
    [
        ("none", FEATURES, {"width": 1024}),
        ("none", FEATURES, {"dropout": 0.5}),
        ("cnn", IMAGES, {"dropout": 0.5}),
        ("mlp", FEATURES, {"embedding": 8}),
        ("timm:resnet18", IMAGES, {"depth": 4}),
    ],
)
def test_options_that_a_backbone_does_not_have_are_refused(name, spec, options):
    (option,) = options
    with pytest.raises(ValueError, match=f"{option} = .* has no effect on backbone '{name}'.*leave it out"):
        build(name, spec, **options)


def test_backbone_without_published_weights_raises():
    import timm

    without = next(name for name in timm.list_models() if not timm.is_model_pretrained(name))
    with pytest.raises(ValueError, match=f"'timm:{without}' has no published weights; use --no-pretrained"):
        build_backbone(small(backbone=f"timm:{without}"), IMAGES)


def test_probing_leaves_no_trace():
    backbone = build("timm:test_resnet", IMAGES)
    assert all(module.training for module in backbone.modules())
    counts = [value for name, value in backbone.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts
    assert not any(counts)


def test_frozen_stays_in_evaluation_mode_without_gradients():
    backbone = build("timm:test_resnet", IMAGES, frozen=True)
    model = nn.Sequential(backbone, nn.Linear(backbone.out_features, 2))
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    model.train()
    assert model[1].training
    assert not any(module.training for module in backbone.body.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    features = backbone(inputs_for(IMAGES))
    assert not features.requires_grad
    model(inputs_for(IMAGES)).sum().backward()
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


NETWORKS = {
    "mlp of depth 1": lambda: (Mlp(6, 16, 1, 5), torch.randn(4, 6)),
    "mlp of depth 3": lambda: (Mlp(6, 16, 3, 5), torch.randn(4, 6)),
    "small cnn": lambda: (Cnn(8, 1, 5, 16), torch.randn(4, 3, 16, 16)),
    "deep cnn": lambda: (Cnn(8, 2, 5, 8), torch.randn(4, 3, 8, 8)),
    "grey cnn": lambda: (Cnn(8, 1, 5, 32, channels=1, places=4), torch.randn(4, 1, 32, 32)),
    "large cnn": lambda: (Cnn(16, 1, 5, 96), torch.randn(4, 3, 96, 96)),
}


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


def test_networks_accept_any_batch_size(network):
    module, inputs = network
    assert module(inputs).shape == (4, 5)
    assert module(inputs[:1]).shape == (1, 5)
    assert module(inputs[:0]).shape == (0, 5)


def test_gradients_reach_every_parameter(network):
    module, inputs = network
    (module(inputs) * torch.randn(4, 5)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_an_example_does_not_see_the_others(network):
    module, inputs = network
    module.train()
    whole = module(inputs)
    changed = inputs.clone()
    changed[1:] = 100 * torch.randn_like(changed[1:])
    torch.testing.assert_close(module(changed)[0], whole[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([module(inputs[:1]), module(inputs[1:])]), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(module(changed)[1], whole[1])


def test_mlp_equals_a_plain_computation():
    module, inputs = Mlp(6, 16, 2, 5), torch.randn(4, 6)
    gelu, (norm, _, _, linear) = torch.nn.functional.gelu, module.hidden[0].children()
    hidden = module.first(inputs)
    hidden = hidden + linear(gelu(norm(hidden)))
    hidden = module.norm(module.last[3](gelu(module.last[0](hidden))))
    torch.testing.assert_close(module(inputs), hidden)


def test_dropout_is_active_only_in_training():
    module, inputs = Mlp(6, 64, 2, 5, dropout=0.5), torch.randn(4, 6)
    assert not torch.equal(module(inputs), module(inputs))
    module.eval()
    assert torch.equal(module(inputs), module(inputs))


def test_a_window_lays_embeddings_side_by_side():
    window = TokenWindow(11, 3, 4)
    tokens = torch.tensor([[1, 2, 10], [0, 0, 1]])
    embeddings = window(tokens)
    assert window.out_features == 12
    assert torch.equal(embeddings, torch.stack([torch.cat([window.table.weight[i] for i in row]) for row in tokens]))
    assert float(window.table.weight.detach().std()) == pytest.approx(0.5, rel=0.4)


def test_stages_double_the_channels_and_halve_the_size():
    module = Cnn(8, 2, 5, 32)
    assert module.body(torch.randn(1, 3, 32, 32)).shape == (1, 64, 4, 4)
    assert Cnn(8, 1, 5, 32, channels=1).body(torch.randn(1, 1, 32, 32)).shape == (1, 64, 4, 4)
    assert Cnn(8, 1, 5, 128).body(torch.randn(1, 3, 128, 128)).shape == (1, 64, 4, 4)
    assert Cnn(8, 1, 5, 32, stages=3).body(torch.randn(1, 3, 32, 32)).shape == (1, 32, 4, 4)
    assert Cnn(8, 1, 5, 128, stages=3).body(torch.randn(1, 3, 128, 128)).shape == (1, 32, 8, 8)


@pytest.mark.parametrize(("size", "cells", "grid"), [(32, 1, 1), (32, 4, 4), (32, 8, 4), (64, 4, 4), (50, 3, 3)])
def test_features_are_read_from_a_grid(size, cells, grid):
    module, images = Cnn(8, 1, 5, size, places=cells), torch.randn(2, 3, size, size)
    assert module.last.in_features == 64 * grid**2
    assert module(images).shape == (2, 5)


def test_only_a_grid_knows_where_things_are():
    body = torch.randn(1, 64, 4, 4)
    turned = body.flip(3)
    mean, grid = Cnn(8, 1, 5, 32), Cnn(8, 1, 5, 32, places=4)
    torch.testing.assert_close(mean.pool(turned).flatten(1), body.mean((2, 3)))
    torch.testing.assert_close(grid.pool(turned), turned)


def test_sizes_that_halving_rounds():
    for size in (8, 9, 31, 33, 95, 96, 97, 131):
        for stages in (3, 4):
            module = Cnn(8, 1, 5, size, channels=1, places=2, stages=stages)
            assert module(torch.randn(1, 1, size, size)).shape == (1, 5)


def test_a_width_that_groups_do_not_divide():
    with pytest.raises(ValueError, match="width of the cnn backbone must be a multiple of 8, found 12"):
        Cnn(12, 1, 5, 32)


def test_centred_features_have_no_mean_over_a_batch():
    module, images = Cnn(8, 1, 5, 32, channels=1, centred=True), 10 + torch.randn(6, 1, 32, 32)
    features = module(images)
    torch.testing.assert_close(features.mean(0), torch.zeros(5), rtol=0, atol=1e-5)
    assert Cnn(8, 1, 5, 32, channels=1)(images).mean(0).abs().max() > 0.1
    module.eval()
    torch.testing.assert_close(module(images)[:1], module(images[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_convnext", "hf:segformer", "cnn"])
def test_depths_count_the_layers_above(name):
    backbone = build(name, InputSpec("image", (3, 160, 160)))
    depths = layer_depths(backbone)
    assert set(depths) == {name for name, _ in backbone.named_parameters()}
    assert min(depths.values()) == 1
    first = max(depths, key=depths.__getitem__)
    assert first == next(iter(depths))  # what is nearest to the images is the deepest
    if name == "timm:test_vit":  # its 6 blocks, and the embedding below them
        assert [depths[f"body.blocks.{block}.mlp.fc1.weight"] for block in range(6)] == [6, 5, 4, 3, 2, 1]
        assert (depths["body.norm.weight"], depths["body.cls_token"]) == (1, 7)


def test_drop_path_drops_residual_branches_in_training():
    backbone = build("timm:test_vit", InputSpec("image", (3, 160, 160)), drop_path=0.5)
    inputs = torch.randn(2, 3, 160, 160)
    assert not torch.equal(backbone.train()(inputs), backbone(inputs))
    assert torch.equal(backbone.eval()(inputs), backbone(inputs))
    for name in ("cnn", "hf:vit"):
        with pytest.raises(ValueError, match="drop_path"):
            build(name, IMAGES, drop_path=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "features"), [("resnet152", 2048), ("vit-l/32", 1024)])
def test_the_papers_backbones_are_those_of_params(name, features):
    from hetxl.profiling.backbones import build_backbone as on_meta

    backbone = build(name, InputSpec("image", (3, 64, 64)))
    assert backbone.out_features == features
    if name == "resnet152":  # of another size, a ViT has other position embeddings
        assert sum(parameter.numel() for parameter in backbone.parameters()) == on_meta(name).parameters


def test_a_classifier_of_transformers_gives_the_features_that_it_classifies(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    theirs = ViTForImageClassification(ViTConfig(**options, image_size=32, patch_size=8, num_labels=3)).eval()
    theirs.save_pretrained(tmp_path)
    backbone = build_backbone(small(backbone=f"hf:{tmp_path}"), IMAGES).eval()
    inputs = inputs_for(IMAGES)
    with torch.no_grad():
        torch.testing.assert_close(theirs.classifier(backbone(inputs)), theirs(pixel_values=inputs).logits)


def remote_code(directory):
    (directory / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}')
    (directory / "evil.py").write_text(f"open({str(directory / 'executed')!r}, 'w')\nclass Config: pass\n")


def pickled_weights(directory):
    from transformers import ViTConfig

    ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24).save_pretrained(
        directory
    )
    torch.save({"a": torch.ones(1)}, directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("write", "message"),
    [(remote_code, "needs its own code, which hetxl never runs"), (pickled_weights, "weights must be safetensors")],
)
def test_models_with_code_or_pickles_are_refused_in_one_line(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        build_backbone(small(backbone=f"hf:{tmp_path}"), IMAGES)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "executed").exists()
