"""Models of timm: converted, trained a step, saved, loaded and asked, from configurations with random weights."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2

import hetxl
from hetxl.integrations.convert import fused_loss, head_of, mean_logits, predict
from hetxl.integrations.convert.layer import LAYERS

HetXLLayer = LAYERS["het-xl"]

SMALL_VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 64}
MODELS = {
    "resnet50": {"layers": (1, 1, 1, 1), "base_width": 8},
    "resnetv2_50x1_bit": {"channels": (128, 128, 128, 128), "stem_chs": 32},
    "vit_base_patch32_224": SMALL_VIT,
    "convnext_tiny": {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
    "swin_tiny_patch4_window7_224": {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "img_size": 56},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "deit3_small_patch16_224": SMALL_VIT,
    "eva02_tiny_patch14_224": SMALL_VIT | {"img_size": 56},
    "regnety_002": {},
}
"""Names, and what makes each small."""
CLASSES = 11


def make(name):
    torch.manual_seed(0)
    size = MODELS[name].get("img_size", 64)
    return timm.create_model(name, num_classes=CLASSES, **MODELS[name]).eval(), torch.randn(3, 3, size, size)


@pytest.mark.parametrize("name", MODELS)
def test_timm_architectures_are_converted(name, tmp_path):
    model, images = make(name)
    before, keys = model(images), list(model.state_dict())
    deterministic = hetxl.convert(copy.deepcopy(model), head="det")
    assert torch.equal(deterministic(images), before)
    assert list(deterministic.state_dict()) == keys
    assert hetxl.convert(model, rank=4, train_samples=4, eval_samples=8) is model
    assert set(keys) < set(model.state_dict())
    torch.testing.assert_close(mean_logits(model, images).reshape(before.shape), before, rtol=1e-5, atol=1e-6)

    model.train()
    labels = torch.tensor([0, 3, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    F.cross_entropy(model(images), labels).backward()
    head = head_of(model)
    assert head.weight.grad.abs().sum() > 0
    assert head.covariance.factor.grad.abs().sum() > 0
    optimizer.step()

    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = hetxl.convert(timm.create_model(name, num_classes=CLASSES, **MODELS[name]), rank=4, eval_samples=8)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    actual = []
    for computed in (model, other):
        prediction = predict(computed.eval(), images, top_k=3, generator=torch.Generator().manual_seed(1))
        actual.append(prediction.probs)
        assert prediction.indices.shape[-1] == 3
    torch.testing.assert_close(*actual)  # weights from a file lie elsewhere in memory: the last bits may differ


def test_the_methods_of_timm_see_the_head():
    model, images = make("vit_base_patch32_224")
    hetxl.convert(model)
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    assert isinstance(model.get_classifier(), HetXLLayer)
    assert torch.equal(model.get_classifier().mean_logits(features), mean_logits(model, images))


@pytest.mark.parametrize("name", ["resnet50", "resnetv2_50x1_bit", "convnext_tiny", "vit_base_patch32_224"])
def test_a_new_classifier_has_a_head_of_the_same_kind(name):
    model, images = make(name)
    temperature = hetxl.LearnedTemperature(init=2.0)
    hetxl.convert(model, rank=3, temperature=temperature)
    with torch.no_grad():
        temperature.raw += 1
    model.reset_classifier(5)
    assert model(images).shape == (3, 5)
    head = head_of(model)
    assert (head.num_classes, head.covariance.rank) == (5, 3)
    assert float(head.temperature().detach()) == pytest.approx(2.0)
    model.reset_classifier(0)
    assert model(images).dim() == 2
    with pytest.raises(ValueError, match="no converted layer"):
        head_of(model)


def test_timm_training_loop_learns():
    model, _ = make("convnext_tiny")
    hetxl.convert(model, rank=4, train_samples=4, eval_samples=16).train()
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3)
    criterion = SoftTargetCrossEntropy()
    targets = F.one_hot(labels, CLASSES).float()
    losses = []
    for _ in range(12):
        loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    fused = fused_loss(model, images, labels)
    assert float(fused.detach()) < losses[0]


def test_distilled_models_are_refused():
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=CLASSES, **SMALL_VIT)
    with pytest.raises(ValueError, match=r"several classifiers .* averaged after the heads"):
        hetxl.convert(model)


def test_models_without_a_classifier_are_refused():
    model = timm.create_model("resnet18", num_classes=0)
    with pytest.raises(ValueError, match=r"no classifier .*num_classes=K"):
        hetxl.convert(model)
