"""Models whose last linear layer is not their classifier are doubted, and ordinary ones are not."""

import re

import pytest
import torch
import torchvision
from torch import nn

from hetxl.integrations.convert.ambiguity import ambiguity_reason, sizes
from hetxl.integrations.convert.locate import is_convertible
from support.models import Branches, mlp


def layers_of(model):
    return {name: module for name, module in model.named_modules() if is_convertible(module)}


def low_rank(features, outputs):
    """A layer with an adapter beside it."""
    return Branches(base=nn.Linear(features, outputs), a=nn.Linear(features, 4), b=nn.Linear(4, outputs))


def squeezed():
    """A classifier of places, cut off at zero and averaged."""
    end = nn.Sequential(nn.Dropout(), nn.Conv2d(16, 10, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
    return Branches(features=nn.Conv2d(3, 16, 3), classifier=end)


def segmented(first, second):
    """Two classifiers of places that start from different numbers of features."""
    return Branches(backbone=nn.Conv2d(3, 8, 3), **{first: convolutional(8, 6), second: convolutional(8, 4)})


def convolutional(features, width):
    return nn.Sequential(nn.Conv2d(features, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 5, 1))


@pytest.mark.parametrize(
    ("model", "reason", "names"),
    [
        (Branches(a=nn.Linear(8, 5), b=nn.Linear(8, 3)), "with the same number of features", ["a", "b"]),
        (nn.Sequential(mlp(4, 4, 4), mlp(4, 4, 4)), "repeated blocks", ["0.0", "0.2", "1.0", "1.2"]),
        (squeezed(), r"an activation \(ReLU\) after its last", ["classifier.1"]),
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU()), r"activation \(GELU\)", ["0"]),
        (
            segmented("classifier", "aux_classifier"),
            "with the same number of outputs",
            ["aux_classifier.3", "classifier.3"],
        ),
        (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), low_rank(16, 10)),
            "with the same number of outputs",
            ["2.b", "2.base"],
        ),
        (Branches(body=mlp(8, 16), head=low_rank(16, 10)), "with the same number of outputs", ["head.b", "head.base"]),
        (Branches(head=nn.Linear(16, 10), body=mlp(8, 12, 16)), "with as many input features", ["body.2", "head"]),
        (
            Branches(head=nn.Linear(16, 10), body=nn.Sequential(nn.Linear(8, 16), nn.ReLU())),
            "with as many input features",
            ["body.0", "head"],
        ),
        (Branches(head=nn.Linear(16, 10), fc=nn.Linear(8, 16)), "with as many input features", ["fc", "head"]),
        (
            Branches(body=mlp(8, 16), fc=nn.Linear(16, 10), project=mlp(16, 16, 4)),
            "a classifier's name",
            ["project.2", "fc"],
        ),
        (
            Branches(net=Branches(body=mlp(8, 16), heads=Branches(main=nn.Linear(16, 10)), project=mlp(16, 12, 4))),
            "a classifier's name",
            ["net.project.2", "net.heads.main"],
        ),
    ],
)
def test_ambiguous_models_give_a_reason(model, reason, names):
    actual = ambiguity_reason(model, layers_of(model))
    assert actual is not None
    assert re.search(reason, actual[0])
    assert actual[1] == names


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 3),
        mlp(10, 64, 10),  # as many classes as inputs
        mlp(8, 10, 10, 10),
        Branches(fc1=nn.Linear(10, 64), fc2=nn.Linear(64, 10)),
        Branches(body=mlp(8, 16), fc=nn.Linear(16, 8), head=nn.Linear(8, 5)),
        Branches(fc=nn.Linear(16, 8), out=nn.Linear(8 + 3, 5)),  # after features that are joined to others
        Branches(attention=Branches(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)), fc=nn.Linear(16, 16)),
        Branches(body=mlp(8, 16), aux=mlp(16, 8, 10), fc=nn.Linear(16, 10)),
        Branches(net=Branches(body=mlp(8, 16), aux=mlp(16, 8, 10), fc=nn.Linear(16, 10))),
        segmented("aux_classifier", "classifier"),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(-1)),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid()),
        Branches(embed=nn.Embedding(9, 8), lstm=nn.LSTM(8, 16), out=nn.Linear(16, 8)),
    ],
)
def test_ordinary_models_are_not_doubted(model):
    assert ambiguity_reason(model, layers_of(model)) is None


def of_torchvision(name, **options):
    with torch.device("meta"):
        return torchvision.models.get_model(name, weights=None, **options)


@pytest.mark.parametrize(
    ("name", "options", "layer"),
    [
        ("alexnet", {}, "classifier.6"),
        ("convnext_tiny", {}, "classifier.2"),
        ("deeplabv3_mobilenet_v3_large", {"weights_backbone": None}, "classifier.4"),
        ("densenet121", {}, "classifier"),
        ("efficientnet_b0", {}, "classifier.1"),
        ("fcn_resnet50", {"weights_backbone": None}, "classifier.4"),
        ("googlenet", {"init_weights": False}, "fc"),
        ("inception_v3", {"init_weights": False}, "fc"),
        ("maxvit_t", {}, "classifier.5"),
        ("mnasnet1_0", {}, "classifier.1"),
        ("mobilenet_v2", {}, "classifier.1"),
        ("mobilenet_v3_small", {"num_classes": 96}, "classifier.3"),
        ("mvit_v2_s", {}, "head.1"),
        ("r3d_18", {}, "fc"),
        ("resnet18", {"num_classes": 512}, "fc"),
        ("resnet50", {"num_classes": 64}, "fc"),
        ("resnext50_32x4d", {}, "fc"),
        ("shufflenet_v2_x1_0", {}, "fc"),
        ("swin_t", {"num_classes": 768}, "head"),
        ("vgg11", {}, "classifier.6"),
        ("vit_b_16", {"num_classes": 768}, "heads.head"),
    ],
)
def test_classifiers_of_torchvision(name, options, layer):
    layers = layers_of(model := of_torchvision(name, **options))
    assert ambiguity_reason(model, layers) is None
    assert list(layers)[-1] == layer


@pytest.mark.parametrize(
    ("name", "options", "layer"),
    [
        ("fcn_resnet50", {"aux_loss": True, "weights_backbone": None}, "classifier.4"),
        ("lraspp_mobilenet_v3_large", {"weights_backbone": None}, "classifier.low_classifier"),
        ("squeezenet1_1", {}, "classifier.1"),
    ],
)
def test_models_of_torchvision_in_doubt(name, options, layer):
    model = of_torchvision(name, **options)
    actual = ambiguity_reason(model, layers_of(model))
    assert actual is not None
    assert actual[1][-1] == layer


def test_sizes_of_linear_and_convolution_agree():
    assert sizes(nn.Linear(4, 3)) == sizes(nn.Conv2d(4, 3, 1)) == (4, 3)
