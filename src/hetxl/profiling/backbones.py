"""Create backbones by name: on the `meta` device to count parameters without weights, or on another device with random
weights to measure them. Nothing is downloaded."""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetxl._checks import one_of
from hetxl.profiling.parameters import count_parameters


@dataclass(frozen=True)
class Backbone:
    """A network without its classifier."""

    name: str
    features: int  # D, size of the features
    module: nn.Module
    image_size: int = 224  # height and width of its images, if it takes images

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features [B, D] of images [B, 3, height, width]."""
        outputs: Any = self.module(images)
        if isinstance(outputs, Tensor):
            return outputs
        return outputs.pooler_output.flatten(1)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return count_parameters(self.module)


def _resnet152(name: str, device: str, size: int) -> Backbone:
    """Return the paper's ResNet152x1, D = 2048."""
    with importing("transformers", name), torch.device(device):
        from transformers import ResNetConfig, ResNetModel

        config = ResNetConfig(depths=[3, 8, 36, 3], hidden_sizes=[256, 512, 1024, 2048])
        return Backbone(name, 2048, ResNetModel(config), size)


def _vit_l_32(name: str, device: str, size: int) -> Backbone:
    """Return the paper's ViT-L/32, D = 1024. The pooler is its 1024-wide pre-logits layer."""
    with importing("transformers", name), torch.device(device):
        from transformers import ViTConfig, ViTModel

        width: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096}
        width |= {"num_attention_heads": 16, "num_hidden_layers": 24}
        return Backbone(name, 1024, ViTModel(ViTConfig(**width, patch_size=32, image_size=size)), size)


PRESETS: dict[str, Callable[[str, str, int], Backbone]] = {"resnet152": _resnet152, "vit-l/32": _vit_l_32}
"""The two backbones of the paper."""


def build_backbone(name: str, device: str = "meta", image_size: int = 224) -> Backbone:
    """Return a backbone on the meta device, or with random weights on another.

    Args:
        name: "resnet152" or "vit-l/32" for the paper's; "timm:NAME" for a model of timm, such as "timm:resnet50";
            "hf:MODEL_TYPE" for a model type of transformers in its default configuration, such as "hf:bert".
        image_size: height and width of images, for the paper's backbones.
    """
    library, _, model = name.partition(":")
    if library == "timm" and model:
        return _timm(name, model, device)
    if library == "hf" and model:
        return _transformers(name, model, device)
    if name.lower() not in PRESETS:
        one_of("backbone", name, (*PRESETS, "timm:NAME", "hf:MODEL_TYPE"))
    return PRESETS[name.lower()](name, device, image_size)


def _timm(name: str, model: str, device: str) -> Backbone:
    with importing("timm", name):
        import timm

        if not timm.is_model(model):
            raise unknown_model(name, "timm", model, timm.list_models())
        with _building(name, device):
            module: Any = timm.create_model(model, num_classes=0)
    # Some models widen their features before the classifier; num_features is the size before that.
    features = getattr(module, "head_hidden_size", None) or module.num_features
    return Backbone(name, features, module, module.default_cfg["input_size"][-1])


def _transformers(name: str, model: str, device: str) -> Backbone:
    with importing("transformers", name):
        from transformers import AutoConfig, AutoModel
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        if model not in MODEL_MAPPING_NAMES:
            raise unknown_model(name, "hf", model, list(MODEL_MAPPING_NAMES))
        with _building(name, device):
            config = AutoConfig.for_model(model)
            features = hidden_size(config)
            module = AutoModel.from_config(config) if features else None
    if features is None or module is None:
        raise ValueError(f"backbone {name!r} has no single feature size; count only its head with --features D")
    return Backbone(name, features, module)


def hidden_size(config: Any) -> int | None:
    """Return D from a configuration of transformers, where its name varies; None if there is none."""
    for field in ("hidden_size", "hidden_sizes", "d_model", "hidden_dim"):
        size = getattr(config, field, None)
        if isinstance(size, list | tuple) and size:
            size = size[-1]
        if isinstance(size, int):
            return size
    return None


def unknown_model(name: str, library: str, model: str, known: list[str]) -> ValueError:
    """Return the error for a model that a library does not have, with the most similar name."""
    near = difflib.get_close_matches(model, known, n=1, cutoff=0.0)
    return ValueError(f"backbone {name!r} is not one of {len(known)} models; did you mean '{library}:{near[0]}'?")


@contextmanager
def _building(name: str, device: str) -> Iterator[None]:
    """Create modules on the device, and name the model in errors."""
    try:
        with torch.device(device):
            yield
    except ImportError:
        raise
    except Exception as error:  # constructors of other libraries may raise anything
        raise ValueError(
            f"backbone {name!r} cannot be built without data: {type(error).__name__}: {error}. "
            "Count only its head with --features D"
        ) from error


@contextmanager
def importing(library: str, name: str) -> Iterator[None]:
    """Replace the error of a missing or broken library by one that says what to do.

    A torchvision that was built for another torch raises a RuntimeError on import. transformers, which imports its
    models on first use, hides it behind a ModuleNotFoundError.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise ImportError(f"backbone {name!r} needs {library}: pip install {library}") from error
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first error of the chain
            cause = cause.__cause__
        if "torchvision" in str(cause):
            raise ImportError(
                f"backbone {name!r} needs {library}, which imports torchvision, and the installed torchvision does not "
                f"match torch {torch.__version__} ({cause}). Install the two from the same index, or remove torchvision"
            ) from error
        raise ImportError(f"backbone {name!r} needs {library}, which does not import: {cause}") from error
