"""Backbones by name, [B, ...] to features [B, D]: a multi-layer perceptron for features or tokens, a small residual
network for images, or a model of timm or transformers.

Our own normalise without batch statistics, so that a batch may be cut into any parts; where images are all alike, the
last layer does not (`Cnn(centred=True)`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import one_of
from hetxl.nn import Standardize
from hetxl.profiling.backbones import PRESETS, importing, unknown_model
from hetxl.profiling.backbones import build_backbone as paper_backbone
from hetxl_train.config import BACKBONES, BackboneOptions
from hetxl_train.data.dataset import InputSpec

DEFAULTS = {"features": "none", "tokens": "mlp", "image": "cnn", "text": "hf:NAME"}
"""What `--backbone auto` stands for, by the kind of input."""
FIRST_TOKEN = ("vit", "deit")
"""Model types of transformers whose classifiers read the first token, without the pooler that the model has alone."""
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
            things that may be anywhere; signs differ in where their strokes are.
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


def layer_depths(backbone: "Backbone") -> dict[str, int]:
    """Return for each parameter of a backbone how many layers lie above its own, 1 for the last: timm's groups of
    layers, or for other networks the first number in a parameter's name."""
    body: Any = backbone.body
    names = [name for name, _ in body.named_parameters()]
    layers: list[int] = []
    if hasattr(body, "group_matcher"):
        from timm.models import group_parameters

        groups: Any = group_parameters(body, body.group_matcher(coarse=False), reverse=True)
        layers = [groups[name] for name in names]
    else:
        numbers = [next((int(part) for part in name.split(".") if part.isdecimal()), None) for name in names]
        last = 0  # what comes before the first numbered layer, and after the last
        for number in numbers:
            last = last if number is None else number + 1
            layers.append(last)
    return {f"body.{name}": max(layers) - layer + 1 for name, layer in zip(names, layers, strict=True)}


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

    `none` is for features; `mlp` for features and tokens; `cnn`, `timm:NAME` and `hf:NAME` for images; `hf:NAME` also
    for texts.
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
    published = ":" in name and options.pretrained
    return "backbone" if published or options.start_from is not None else "network"


def uses_published(options: BackboneOptions) -> bool:
    """Return whether a backbone of a library starts from published weights."""
    return options.pretrained and options.start_from is None


def backbone_name(options: BackboneOptions, spec: InputSpec) -> str:
    """Return the backbone's name, chosen by the kind of the inputs if it is auto."""
    return DEFAULTS[spec.kind] if options.backbone == "auto" else options.backbone


def _body(options: BackboneOptions, spec: InputSpec) -> tuple[nn.Module, int]:
    """Return the network and the number of its features."""
    body: nn.Module
    name = backbone_name(options, spec)
    library, _, model = name.partition(":")
    if library in ("timm", "hf") and model:
        if library == "timm" or spec.kind != "text":
            _needs("image", name, spec)
        _refuse(options, name, *SIZES)
        return _timm(name, model, options, spec) if library == "timm" else _transformers(name, model, options, spec)
    if name.lower() in PRESETS:  # the paper's
        _needs("image", name, spec)
        _refuse(options, name, *SIZES, "drop_path")
        network = Pooled(paper_backbone(name, "cpu", spec.shape[-1]).module)
        return network, _probed(name, network, spec)
    one_of("backbone", name, BACKBONES)
    if name == "none":
        _needs("features", name, spec)
        _refuse(options, name, *SIZES, "drop_path")
        return nn.Identity(), spec.shape[0]
    if name == "cnn":
        _needs("image", name, spec)
        _refuse(options, name, "dropout", "embedding", "drop_path")
        features = options.features or 256
        return image_network(options.width or 32, options.depth, features, spec), features
    if spec.kind == "image":
        raise ValueError("backbone 'mlp' is for features and tokens; for images use 'cnn', 'timm:NAME' or 'hf:NAME'")
    _refuse(options, name, "drop_path")
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
        kinds = {"features": "features", "tokens": "tokens", "image": "images", "text": "texts"}
        raise ValueError(
            f"backbone {name!r} is for {kinds[kind]}, but this data is {kinds[spec.kind]}; "
            f"use {DEFAULTS[spec.kind]!r} or leave --backbone out"
        )


def _timm(name: str, model: str, options: BackboneOptions, spec: InputSpec) -> tuple[nn.Module, int]:
    with importing("timm", name):
        import timm

        if not timm.is_model(model):
            raise unknown_model(name, "timm", model, timm.list_models())
        pretrained = uses_published(options)
        if pretrained and not timm.is_model_pretrained(model):
            raise ValueError(f"backbone {name!r} has no published weights; use --no-pretrained")
        arguments: dict[str, Any] = {"num_classes": 0, "pretrained": pretrained, "in_chans": spec.shape[0]}
        configuration: Any = timm.get_pretrained_cfg(model)
        if getattr(configuration, "fixed_input_size", False) and spec.shape[-1] != configuration.input_size[-1]:
            arguments["img_size"] = spec.shape[-1]  # built for this size; position embeddings are resized
        if options.drop_path:
            arguments["drop_path_rate"] = options.drop_path
        try:
            module: Any = timm.create_model(model, **arguments)
        except TypeError as error:  # a network without residual branches, for example
            raise ValueError(f"backbone {name!r} cannot be built with these options: {error}") from None
    return module, _probed(name, module, spec)


def _probed(name: str, body: nn.Module, spec: InputSpec) -> int:
    """D, from one black image or text: libraries name it in too many ways, and one of the wrong size raises here."""
    training = body.training
    try:
        with torch.no_grad():
            features = body.eval()(torch.zeros(1, *spec.shape, dtype=torch.long if spec.kind == "text" else None))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        what, option = f"images of {' × '.join(map(str, spec.shape[1:]))}", "--image-size"
        if spec.kind == "text":
            what, option = f"texts of {spec.shape[0]} tokens", "--text-length"
        raise ValueError(
            f"backbone {name!r} does not take {what}: {' '.join(str(error).split()).rstrip('.')}; change {option} or "
            "the backbone"
        ) from None
    body.train(training)
    if features.dim() != 2:
        shape = list(features.shape)
        raise ValueError(f"backbone {name!r} gives features of shape {shape}, and not [B, D]; use another")
    return features.shape[1]


class Pooled(nn.Module):
    """A vision model of transformers, up to one vector: its pooled output, its first token, or the mean over its tokens
    or places."""

    def __init__(self, model: nn.Module, first: bool = False):
        super().__init__()
        self.model, self.first = model, first

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, D]."""
        output = self.model(pixel_values=pixels)
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        last = output.last_hidden_state  # [B, tokens, D] or [B, D, h, w]
        if self.first:
            return last[:, 0]
        return last.mean(1) if last.dim() == 3 else last.flatten(2).mean(-1)


class PooledText(nn.Module):
    """A language model of transformers, up to one vector: its pooled output, or the mean over the tokens of a text."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """[B, L] ids, −1 behind the end of a text, to [B, D]."""
        mask = ids >= 0
        output = self.model(input_ids=ids.clamp(min=0), attention_mask=mask.long())
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled
        weights = mask[..., None].to(output.last_hidden_state.dtype)
        return (weights * output.last_hidden_state).sum(1) / weights.sum(1).clamp(min=1)


_TRUSTED: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
"""No code of the model's own, not even by a question on the terminal, and no pickles."""


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Say in one line why a model of transformers cannot be loaded."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        if "custom code" in str(error):
            raise ValueError(
                f"backbone {name!r} needs code of its own, which is never run; use another model"
            ) from None
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"backbone {name!r} cannot be loaded (weights must be safetensors): {reason}") from None


def _transformers(name: str, model: str, options: BackboneOptions, spec: InputSpec) -> tuple[nn.Module, int]:
    with importing("transformers", name):
        from transformers import AutoConfig, AutoModel
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        known = model in MODEL_MAPPING_NAMES and not uses_published(options)
        with _refusing(name):
            config: Any = AutoConfig.for_model(model) if known else AutoConfig.from_pretrained(model, **_TRUSTED)
        if options.drop_path and not hasattr(config, "drop_path_rate"):
            raise ValueError(f"backbone {name!r} has no drop path; leave drop_path out, or use a model of timm")
        if options.drop_path:
            config.drop_path_rate = options.drop_path
        # A classifier reads the first token: the checkpoint has no pooler, and a new one would be random.
        first = config.model_type in FIRST_TOKEN and "ForImageClassification" in str(config.architectures)
        arguments: dict[str, Any] = {"add_pooling_layer": False} if first else {}
        if uses_published(options):
            with _refusing(name):
                module: Any = AutoModel.from_pretrained(model, config=config, **_TRUSTED, **arguments)
        else:
            module = AutoModel.from_config(config, trust_remote_code=False, **arguments)
    expected, what = ("input_ids", "a language model") if spec.kind == "text" else ("pixel_values", "a vision model")
    if module.main_input_name != expected:
        kind = "texts" if spec.kind == "text" else "images"
        raise ValueError(f"backbone {name!r} takes {module.main_input_name}, and not {kind}; use {what}")
    body = PooledText(module) if spec.kind == "text" else Pooled(module, first)
    return body, _probed(name, body, spec)
