"""From the name of a backbone to a module that gives features [B, D]."""

from typing import Any

import torch
from torch import Tensor, nn

from hetxl.data.dataset import InputSpec
from hetxl.functional._checks import one_of
from hetxl.profiling.backbones import importing, unknown_model
from hetxl.training.config import BACKBONES, TrainConfig
from hetxl.training.networks import Cnn, Mlp, TokenWindow

DEFAULTS = {"features": "none", "tokens": "mlp", "image": "cnn"}
"""What `--backbone auto` stands for, by the kind of input."""

SIGN_PLACES = 4
"""Places a side that `cnn` reads grey pictures from. On 300 characters of glyphs, 300 steps: 78 % of the test pictures
right, and 1 % with the mean over all places."""


class Backbone(nn.Module):
    """A network up to its features.

    Args:
        body: [B, ...] to [B, D]
        out_features: D
        frozen: whether it is left as it is, in evaluation mode, without gradients.
    """

    def __init__(self, body: nn.Module, out_features: int, frozen: bool = False):
        super().__init__()
        self.body, self.out_features, self.frozen = body, out_features, frozen
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
        if not self.frozen:
            return self.body(inputs)
        with torch.no_grad():
            return self.body(inputs)


def build_backbone(config: TrainConfig, spec: InputSpec) -> Backbone:
    """The backbone that a configuration names, for inputs of a kind.

    `none` is for features; `mlp` for features and tokens; `cnn`, `timm:NAME` and `hf:NAME` for pictures.
    """
    body: nn.Module
    name = DEFAULTS[spec.kind] if config.backbone == "auto" else config.backbone
    library, _, model = name.partition(":")
    if library in ("timm", "hf") and model:
        _needs("image", name, spec)
        return _timm(name, model, config, spec) if library == "timm" else _transformers(name, model, config, spec)
    one_of("backbone", name, BACKBONES)
    if name == "none":
        _needs("features", name, spec)
        return Backbone(nn.Identity(), spec.shape[0], config.frozen)
    if name == "cnn":
        _needs("image", name, spec)
        features = config.features or 256
        channels, size = spec.shape[:2]
        places = SIGN_PLACES if channels == 1 else 1
        body = Cnn(config.width or 32, config.depth, features, size, channels, places)
        return Backbone(body, features, config.frozen)
    if spec.kind == "image":
        raise ValueError("backbone 'mlp' is for features and tokens; for pictures use 'cnn', 'timm:NAME' or 'hf:NAME'")
    features, width = config.features or 128, config.width or 512
    if spec.kind == "features":
        body = Mlp(spec.shape[0], width, config.depth, features, config.dropout)
    else:
        window = TokenWindow(spec.vocabulary, spec.shape[0], config.embedding)
        body = nn.Sequential(window, Mlp(window.out_features, width, config.depth, features, config.dropout))
    return Backbone(body, features, config.frozen)


def _needs(kind: str, name: str, spec: InputSpec) -> None:
    if spec.kind != kind:
        found = {"features": "features", "tokens": "tokens", "image": "pictures"}
        raise ValueError(
            f"backbone {name!r} is for {found[kind]}, but this data is {found[spec.kind]}; "
            f"use {DEFAULTS[spec.kind]!r} or leave --backbone out"
        )


def _timm(name: str, model: str, config: TrainConfig, spec: InputSpec) -> Backbone:
    with importing("timm", "timm", name):
        import timm

        if not timm.is_model(model):
            raise unknown_model(name, "timm", model, timm.list_models())
        if config.pretrained and not timm.is_model_pretrained(model):
            raise ValueError(f"backbone {name!r} has no published weights; use --no-pretrained")
        module: Any = timm.create_model(model, num_classes=0, pretrained=config.pretrained, in_chans=spec.shape[0])
    return Backbone(module, _probed(name, module, spec), config.frozen)


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


def _transformers(name: str, model: str, config: TrainConfig, spec: InputSpec) -> Backbone:
    with importing("transformers", "hf", name):
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
    return Backbone(body, _probed(name, body, spec), config.frozen)
