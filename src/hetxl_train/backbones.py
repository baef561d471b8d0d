"""Backbones by name, [B, ...] to features [B, D]: a multi-layer perceptron for features or tokens, a small residual
network for images, or a model of timm or transformers.

Our own normalise without batch statistics, so that a batch may be cut into any parts; where images are all alike, the
last layer does not (`Cnn(centred=True)`).
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import one_of
from hetxl.nn import Standardize
from hetxl.profiling.backbones import importing, unknown_model
from hetxl_train.config import BACKBONES, BackboneOptions
from hetxl_train.data.dataset import InputSpec

DEFAULTS = {"features": "none", "tokens": "mlp", "image": "cnn"}
"""What `--backbone auto` stands for, by the kind of input."""
SIZES = ("features", "width", "depth", "embedding", "dropout")
"""Options of the networks that are built here; others are as their libraries have them."""

GREY_CNN: dict[str, Any] = {"places": 4, "stages": 3, "centred": True}
"""How `cnn` reads grey images. Places per side: on 300 characters, 300 steps, 78 % of the test images were
right, and 1 % with the mean over all places. Stages: three do as well as four, at a third of the work. Centred: on all
characters, 500 steps of 128 images, one seed, validation NLL 3.96 and 38 % right, and without 8.08 and none."""


class TokenWindow(nn.Module):
    """The embeddings of the C tokens before the one to predict, side by side."""

    def __init__(self, vocabulary: int, context: int, embedding: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, embedding)
        nn.init.normal_(self.table.weight, std=1.0 / embedding**0.5)
        self.out_features = context * embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, C] ids to [B, C·E]."""
        return self.table(tokens).flatten(1)


class Mlp(nn.Module):
    """Hidden layers with normalisation, GELU and dropout, residual after the first; then a projection to D features."""

    def __init__(self, in_features: int, width: int, depth: int, out_features: int, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(in_features, width)
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width))
            for _ in range(depth - 1)
        )
        self.last = nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, out_features))
        self.norm = nn.LayerNorm(out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, in_features] to [B, D]."""
        hidden = self.first(inputs)
        for layer in self.hidden:
            hidden = hidden + layer(hidden)
        return self.norm(self.last(hidden))


class _Block(nn.Module):
    """Two 3 × 3 convolutions around a residual path, normalised by groups before each."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inside), nn.GroupNorm(8, outside)])
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
                nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            ]
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """[B, c, h, w] to [B, c′, h / stride, w / stride]."""
        hidden = images
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            hidden = convolution(torch.relu(norm(hidden)))
        return hidden + self.shortcut(images)


class Cnn(nn.Module):
    """A residual network of stages, each of twice the channels and half the size of the one before.

    Args:
        width: channels of the first stage, a multiple of 8.
        depth: blocks in each stage.
        out_features: D
        size: height of the images; large ones are halved twice before the first stage. Small ones are not halved
            there, so that 32 × 32 pixels are still 4 × 4 after the last stage.
        channels: 3, or 1 for grey images.
        places: the features are read from a grid of about this many places a side. 1 is the mean over all places, for
            things that may be anywhere; signs are told apart by where their strokes are.
        stages: how many; small images are halved before the first of three, so that they end as small as after four.
        centred: whether the features are normalised over the batch, and not each example by itself. For images that
            are nearly the same on the whole, so that at the start nearly all of their features is common to all: what a
            class learns from one of its examples then raises its logit for every other, and thousands of classes make
            no headway for hundreds of steps.
    """

    def __init__(
        self, width: int, depth: int, out_features: int, size: int, channels: int = 3, places: int = 1, stages: int = 4,
        centred: bool = False,
    ):  # fmt: skip
        super().__init__()
        if width % 8:
            raise ValueError(f"width of the cnn backbone must be a multiple of 8, found {width}")
        large = size >= 96
        kernel, stride = (7, 2) if large else (3, 1) if stages == 4 else (5, 2)
        stem: list[nn.Module] = [nn.Conv2d(channels, width, kernel, stride, kernel // 2)]
        if large:
            stem.append(nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inside = width
        for stage in range(stages):
            outside = width * 2**stage
            for number in range(depth):
                blocks.append(_Block(inside, outside, 2 if stage and not number else 1))
                inside = outside
        self.body = nn.Sequential(*stem, *blocks)
        side = size
        for _ in range((2 if large else stride - 1) + stages - 1):  # every halving rounds up
            side = (side + 1) // 2
        step = max(1, side // places)
        self.pool = nn.AvgPool2d(step)
        self.last = nn.Linear(inside * (side // step) ** 2, out_features)
        self.norm = nn.BatchNorm1d(out_features) if centred else nn.LayerNorm(out_features)

    def forward(self, images: Tensor) -> Tensor:
        """[B, channels, H, W] to [B, D]."""
        return self.norm(self.last(self.pool(torch.relu(self.body(images))).flatten(1)))


class Backbone(nn.Module):
    """A network up to its features.

    Args:
        body: inputs [B, ...] to features [B, D].
        out_features: D
        frozen: the body stays in evaluation mode and has no gradients.
        normalized: the features of every example have the length √D.
        standardize: applied to inputs [B, D′] before the body.
    """

    def __init__(
        self, body: nn.Module, out_features: int, frozen: bool = False, normalized: bool = False,
        standardize: Standardize | None = None,
    ):  # fmt: skip
        super().__init__()
        self.body, self.out_features, self.frozen, self.normalized = body, out_features, frozen, normalized
        self.standardize = standardize
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
            features = self.body(inputs if self.standardize is None else self.standardize(inputs))
            # √D: about the length of D features of unit variance, which the head's initial weights are made for.
            return math.sqrt(self.out_features) * F.normalize(features, dim=-1) if self.normalized else features


def image_network(width: int, depth: int, out_features: int, spec: InputSpec) -> Cnn:
    """Return the network for images of this kind."""
    channels, size = spec.shape[:2]
    return Cnn(width, depth, out_features, size, channels, **(GREY_CNN if channels == 1 else {}))


def build_backbone(options: BackboneOptions, spec: InputSpec) -> Backbone:
    """Return the backbone that a configuration names, for inputs of a kind.

    `none` is for features; `mlp` for features and tokens; `cnn`, `timm:NAME` and `hf:NAME` for images.
    """
    body, features = _body(options, spec)
    # In front of a head alone, the head itself standardises: it can be exported by itself.
    inside = options.standardize and trained_part(options, spec) != "head"
    standardize = Standardize(spec.shape[0]) if inside else None
    return Backbone(body, features, options.frozen, options.normalize_features, standardize)


def trained_part(options: BackboneOptions, spec: InputSpec) -> str:
    """Return what is trained, a key of `hetxl.optim.DEFAULTS`."""
    name = backbone_name(options, spec)
    if options.frozen or name == "none":
        return "head"
    return "backbone" if ":" in name and options.pretrained else "network"


def backbone_name(options: BackboneOptions, spec: InputSpec) -> str:
    """Return the backbone's name, chosen by the kind of the inputs if it is auto."""
    return DEFAULTS[spec.kind] if options.backbone == "auto" else options.backbone


def _body(options: BackboneOptions, spec: InputSpec) -> tuple[nn.Module, int]:
    """Return the network and the number of its features."""
    body: nn.Module
    name = backbone_name(options, spec)
    library, _, model = name.partition(":")
    if library in ("timm", "hf") and model:
        _needs("image", name, spec)
        _refuse(options, name, *SIZES)
        return _timm(name, model, options, spec) if library == "timm" else _transformers(name, model, options, spec)
    one_of("backbone", name, BACKBONES)
    if name == "none":
        _needs("features", name, spec)
        _refuse(options, name, *SIZES)
        return nn.Identity(), spec.shape[0]
    if name == "cnn":
        _needs("image", name, spec)
        _refuse(options, name, "dropout", "embedding")
        features = options.features or 256
        return image_network(options.width or 32, options.depth, features, spec), features
    if spec.kind == "image":
        raise ValueError("backbone 'mlp' is for features and tokens; for images use 'cnn', 'timm:NAME' or 'hf:NAME'")
    features, width = options.features or 128, options.width or 512
    if spec.kind == "features":
        _refuse(options, name, "embedding")
        body = Mlp(spec.shape[0], width, options.depth, features, options.dropout)
    else:
        window = TokenWindow(spec.vocabulary, spec.shape[0], options.embedding)
        body = nn.Sequential(window, Mlp(window.out_features, width, options.depth, features, options.dropout))
    return body, features


def _refuse(options: BackboneOptions, name: str, *unused: str) -> None:
    """Raise for an option that was set and that has no effect on a backbone."""
    for field in dataclasses.fields(options):
        if field.name in unused and getattr(options, field.name) != field.default:
            raise ValueError(
                f"{field.name} = {getattr(options, field.name)} has no effect on backbone {name!r} "
                f"({field.metadata['help'].rstrip('.')}); leave it out, or choose another --backbone"
            )


def _needs(kind: str, name: str, spec: InputSpec) -> None:
    if spec.kind != kind:
        kinds = {"features": "features", "tokens": "tokens", "image": "images"}
        raise ValueError(
            f"backbone {name!r} is for {kinds[kind]}, but this data is {kinds[spec.kind]}; "
            f"use {DEFAULTS[spec.kind]!r} or leave --backbone out"
        )


def _timm(name: str, model: str, options: BackboneOptions, spec: InputSpec) -> tuple[nn.Module, int]:
    with importing("timm", name):
        import timm

        if not timm.is_model(model):
            raise unknown_model(name, "timm", model, timm.list_models())
        if options.pretrained and not timm.is_model_pretrained(model):
            raise ValueError(f"backbone {name!r} has no published weights; use --no-pretrained")
        module: Any = timm.create_model(model, num_classes=0, pretrained=options.pretrained, in_chans=spec.shape[0])
    return module, _probed(name, module, spec)


def _probed(name: str, body: nn.Module, spec: InputSpec) -> int:
    """D, from one black image: libraries name it in too many ways, and an image of the wrong size raises here."""
    training = body.training
    try:
        with torch.no_grad():
            features = body.eval()(torch.zeros(1, *spec.shape))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise ValueError(
            f"backbone {name!r} does not take images of {spec.shape[1]} × {spec.shape[2]}: "
            f"{' '.join(str(error).split()).rstrip('.')}; change --image-size or the backbone"
        ) from None
    body.train(training)
    if features.dim() != 2:
        shape = list(features.shape)
        raise ValueError(f"backbone {name!r} gives features of shape {shape}, and not [B, D]; use another")
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


def _transformers(name: str, model: str, options: BackboneOptions, spec: InputSpec) -> tuple[nn.Module, int]:
    with importing("transformers", name):
        from transformers import AutoConfig, AutoModel
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        if options.pretrained:
            module: Any = AutoModel.from_pretrained(model)
        elif model in MODEL_MAPPING_NAMES:
            module = AutoModel.from_config(AutoConfig.for_model(model))
        else:
            module = AutoModel.from_config(AutoConfig.from_pretrained(model))
    if module.main_input_name != "pixel_values":
        raise ValueError(f"backbone {name!r} takes {module.main_input_name}, and not images; use a vision model")
    body = _Pooled(module)
    return body, _probed(name, body, spec)
