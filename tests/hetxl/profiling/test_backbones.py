"""Backbones by name: their sizes, and what is said when one cannot be had."""

import sys
from types import ModuleType

import pytest
import torch

from hetxl.profiling import build_backbone

RESNET_152 = 58_143_808  # torchvision's resnet152 has 60,192,808 with its classifier of 2048 × 1000 + 1000
VIT_L_32 = (
    24 * (4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024)  # attention, MLP and two norms
    + 3 * 32 * 32 * 1024
    + 1024  # patches
    + (7 * 7 + 1) * 1024
    + 1024  # positions and the class token
    + 2 * 1024  # last norm
    + 1024 * 1024
    + 1024  # pre-logits
)


@pytest.mark.parametrize(
    ("name", "features", "parameters"),
    [
        ("resnet152", 2048, RESNET_152),
        ("ResNet152", 2048, RESNET_152),
        ("vit-l/32", 1024, VIT_L_32),
        ("timm:resnet50", 2048, 25_557_032 - (2048 * 1000 + 1000)),
        ("timm:mobilenetv3_small_100", 1024, 2_542_856 - (1024 * 1000 + 1000)),  # 576 wide before its last layer
        ("hf:bert", 768, 109_482_240),
        ("hf:resnet", 2048, 25_557_032 - (2048 * 1000 + 1000)),
        ("hf:efficientnet", 2560, 63_786_960),
        ("hf:t5", 512, 60_506_624),
    ],
)
def test_backbones_have_known_sizes(name, features, parameters):
    backbone = build_backbone(name)
    assert (backbone.name, backbone.features, backbone.parameters) == (name, features, parameters)
    assert all(parameter.is_meta for parameter in backbone.module.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet15", "did you mean 'resnet152'"),
        ("timm:", "did you mean 'timm:NAME'"),
        ("hf:", "'hf:MODEL_TYPE'"),
        ("", "backbone must be one of"),
        ("timm:resnet5", "did you mean 'timm:resnet50'"),
        ("timm:hf-hub:someone/model", "is not one of"),  # would be a download
        ("hf:bertt", "did you mean 'hf:bert'"),
        ("hf:clip", "has no single feature size; count only its head with --features D"),
    ],
)
def test_unknown_names_raise(name, message):
    with pytest.raises(ValueError, match=message):
        build_backbone(name)


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("resnet152", "transformers"),
        ("vit-l/32", "transformers"),
        ("hf:bert", "transformers"),
        ("timm:resnet50", "timm"),
    ],
)
def test_a_missing_library_is_named(monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)  # import then raises ModuleNotFoundError
    with pytest.raises(ImportError, match=rf"needs {library}: pip install {library}"):
        build_backbone(name)


class BrokenLibrary(ModuleType):
    """A library whose names cannot be had."""

    def __init__(self, name, error):
        super().__init__(name)
        self.error = error
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error


def wrapped(cause):
    """As transformers does it."""
    error = ModuleNotFoundError("Could not import module 'ResNetModel'")
    error.__cause__ = cause
    return error


MISMATCH = "operator torchvision::nms does not exist"


@pytest.mark.parametrize(
    ("name", "library"), [("resnet152", "transformers"), ("hf:bert", "transformers"), ("timm:resnet50", "timm")]
)
@pytest.mark.parametrize("error", [RuntimeError(MISMATCH), wrapped(RuntimeError(MISMATCH))], ids=["bare", "wrapped"])
def test_a_torchvision_of_another_build_is_named(monkeypatch, name, library, error):
    monkeypatch.setitem(sys.modules, library, BrokenLibrary(library, error))
    with pytest.raises(ImportError, match=rf"torchvision does not match torch .*{MISMATCH}.*same index"):
        build_backbone(name)


def test_another_failing_import_gives_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", BrokenLibrary("timm", ImportError("libfoo.so is missing")))
    with pytest.raises(ImportError, match=r"needs timm, which does not import: libfoo\.so is missing"):
        build_backbone("timm:resnet50")


def test_a_model_that_cannot_be_built_without_data(monkeypatch):
    import timm

    def create_model(*_, **__):
        torch.empty(1, device="meta").cpu()  # what a constructor does that looks at its weights

    monkeypatch.setattr(timm, "create_model", create_model)
    with pytest.raises(ValueError, match=r"'timm:resnet50' cannot be built without data: .*no data!.*--features D"):
        build_backbone("timm:resnet50")
