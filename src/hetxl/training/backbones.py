"""From the name of a backbone to a module that gives features [B, D]."""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl.data.dataset import InputSpec
from hetxl.functional._checks import one_of
from hetxl.profiling.backbones import importing, unknown_model
from hetxl.training.config import BACKBONES, TrainConfig
from hetxl.training.networks import Cnn, Mlp, TokenWindow

DEFAULTS = {"features": "none", "tokens": "mlp", "image": "cnn"}
"""What `--backbone auto` stands for, by the kind of input."""
SIZES = ("features", "width", "depth", "embedding", "dropout")
"""Options of the networks that are built here; others are as their libraries have them."""

SIGNS: dict[str, Any] = {"places": 4, "stages": 3, "centred": True}
"""How `cnn` reads grey pictures. Places a side: on 300 characters of glyphs, 300 steps, 78 % of the test pictures were
right, and 1 % with the mean over all places. Stages: three do as well as four, at a third of the work. Centred: on all
of glyphs, 500 steps of 128 pictures, one seed, validation NLL 3.96 and 38 % right, and without 8.08 and none."""


class Backbone(nn.Module):
    """A network up to its features.

    Args:
        body: [B, ...] to [B, D]
        out_features: D
        frozen: whether it is left as it is, in evaluation mode, without gradients.
        normalized: whether every example's features are brought to the length √D.
    """

    def __init__(self, body: nn.Module, out_features: int, frozen: bool = False, normalized: bool = False):
        super().__init__()
        self.body, self.out_features, self.frozen, self.normalized = body, out_features, frozen, normalized
        if frozen:
            self.requires_grad_(False)
            self.body.eval()

    def train(self, mode: bool = True) -> "Backbone":
        """A frozen body stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.body.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Features [B, D] of inputs [B, ...]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.body(inputs)
            # √D: about the length of D features of unit variance, which the head's initial weights are made for.
            return math.sqrt(self.out_features) * F.normalize(features, dim=-1) if self.normalized else features


def build_backbone(config: TrainConfig, spec: InputSpec) -> Backbone:
    """The backbone that a configuration names, for inputs of a kind.

    `none` is for features; `mlp` for features and tokens; `cnn`, `timm:NAME` and `hf:NAME` for pictures.
    """
    body, features = _body(config, spec)
    return Backbone(body, features, config.frozen, config.normalize_features)


def backbone_name(config: TrainConfig, spec: InputSpec) -> str:
    """The backbone's name, also where the configuration leaves it to the kind of the inputs."""
    return DEFAULTS[spec.kind] if config.backbone == "auto" else config.backbone


def _body(config: TrainConfig, spec: InputSpec) -> tuple[nn.Module, int]:
    """The network, and how many features it gives."""
    body: nn.Module
    name = backbone_name(config, spec)
    library, _, model = name.partition(":")
    if library in ("timm", "hf") and model:
        _needs("image", name, spec)
        _refuse(config, name, *SIZES)
        return _timm(name, model, config, spec) if library == "timm" else _transformers(name, model, config, spec)
    one_of("backbone", name, BACKBONES)
    if name == "none":
        _needs("features", name, spec)
        _refuse(config, name, *SIZES)
        return nn.Identity(), spec.shape[0]
    if name == "cnn":
        _needs("image", name, spec)
        _refuse(config, name, "dropout", "embedding")
        features = config.features or 256
        channels, size = spec.shape[:2]
        signs = SIGNS if channels == 1 else {}
        body = Cnn(config.width or 32, config.depth, features, size, channels, **signs)
        return body, features
    if spec.kind == "image":
        raise ValueError("backbone 'mlp' is for features and tokens; for pictures use 'cnn', 'timm:NAME' or 'hf:NAME'")
    features, width = config.features or 128, config.width or 512
    if spec.kind == "features":
        _refuse(config, name, "embedding")
        body = Mlp(spec.shape[0], width, config.depth, features, config.dropout)
    else:
        window = TokenWindow(spec.vocabulary, spec.shape[0], config.embedding)
        body = nn.Sequential(window, Mlp(window.out_features, width, config.depth, features, config.dropout))
    return body, features


def _refuse(config: TrainConfig, name: str, *options: str) -> None:
    """Raise for an option that was given and that a backbone does not have."""
    for field in dataclasses.fields(config):
        if field.name in options and getattr(config, field.name) != field.default:
            raise ValueError(
                f"{field.name} = {getattr(config, field.name)} is nothing that backbone {name!r} has "
                f"({field.metadata['help'].rstrip('.')}); leave it out, or choose another --backbone"
            )


def _needs(kind: str, name: str, spec: InputSpec) -> None:
    if spec.kind != kind:
        found = {"features": "features", "tokens": "tokens", "image": "pictures"}
        raise ValueError(
            f"backbone {name!r} is for {found[kind]}, but this data is {found[spec.kind]}; "
            f"use {DEFAULTS[spec.kind]!r} or leave --backbone out"
        )


def _timm(name: str, model: str, config: TrainConfig, spec: InputSpec) -> tuple[nn.Module, int]:
    with importing("timm", name):
        import timm

        if not timm.is_model(model):
            raise unknown_model(name, "timm", model, timm.list_models())
        if config.pretrained and not timm.is_model_pretrained(model):
            raise ValueError(f"backbone {name!r} has no published weights; use --no-pretrained")
        module: Any = timm.create_model(model, num_classes=0, pretrained=config.pretrained, in_chans=spec.shape[0])
    return module, _probed(name, module, spec)


def _probed(name: str, body: nn.Module, spec: InputSpec) -> int:
    """D, from one black picture: libraries name it in too many ways, and a picture of the wrong size is told here."""
    training = body.training
    try:
        with torch.no_grad():
            features = body.eval()(torch.zeros(1, *spec.shape))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise ValueError(
            f"backbone {name!r} does not take pictures of {spec.shape[1]} × {spec.shape[2]}: "
            f"{' '.join(str(error).split()).rstrip('.')}; change --image-size or the backbone"
        ) from None
    body.train(training)
    if features.dim() != 2:
        raise ValueError(
            f"backbone {name!r} gives features of shape {list(features.shape)}, and not [B, D]; use another"
        )
    return features.shape[1]


class _Pooled(nn.Module):
    """A vision model of transformers, up to one vector: its pooled output, or the mean over its tokens or places."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, D]."""
        output = self.model(pixel_values=pixels)
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        last = output.last_hidden_state  # [B, tokens, D] or [B, D, h, w]
        return last.mean(1) if last.dim() == 3 else last.flatten(2).mean(-1)


def _transformers(name: str, model: str, config: TrainConfig, spec: InputSpec) -> tuple[nn.Module, int]:
    with importing("transformers", name):
        from transformers import AutoConfig, AutoModel
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        if config.pretrained:
            module: Any = AutoModel.from_pretrained(model)
        elif model in MODEL_MAPPING_NAMES:
            module = AutoModel.from_config(AutoConfig.for_model(model))
        else:
            module = AutoModel.from_config(AutoConfig.from_pretrained(model))
    if module.main_input_name != "pixel_values":
        raise ValueError(f"backbone {name!r} takes {module.main_input_name}, and not pictures; use a vision model")
    body = _Pooled(module)
    return body, _probed(name, body, spec)
