"""Create backbones by name, [B, ...] to features [B, D]: a multi-layer perceptron for features or tokens, a small
residual network for images, or a model of timm or transformers.

Our own networks normalise without batch statistics, so that a batch can be split into any parts. The exception is the
last layer for images that are nearly the same (`Cnn(centred=True)`).
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
"""The backbone of `--backbone auto` for each kind of input."""
FIRST_TOKEN = ("vit", "deit")
"""Model types of transformers whose classifiers read the first token without the pooler of the bare model."""
SIZES = ("features", "width", "depth", "embedding", "dropout")
"""Options that only the networks of this module have."""

GREY_CNN: dict[str, Any] = {"places": 4, "stages": 3, "centred": True}
"""Options of `cnn` for grey images. Places per side: with 300 characters and 300 steps, the test accuracy was 78 %, and
1 % with the mean over all places. Stages: three are as accurate as four, at a third of the cost. Centred: with all
characters, 500 steps of 128 images and one seed, validation NLL 3.96 and accuracy 38 %; without, 8.08 and 0 %."""


class TokenWindow(nn.Module):
    """Concatenate the embeddings of the C tokens before the one to predict."""

    def __init__(self, vocabulary: int, context: int, embedding: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, embedding)
        nn.init.normal_(self.table.weight, std=1.0 / embedding**0.5)
        self.out_features = context * embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids [B, C] to [B, C·E]."""
        return self.table(tokens).flatten(1)


class Mlp(nn.Module):
    """Hidden layers with normalisation, GELU, dropout and residual connections, then a projection to D features."""

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
        """Map [B, in_features] to [B, D]."""
        hidden = self.first(inputs)
        for layer in self.hidden:
            hidden = hidden + layer(hidden)
        return self.norm(self.last(hidden))


class _Block(nn.Module):
    """A residual block of two 3 × 3 convolutions with group normalisation before each."""

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
        """Map [B, c, h, w] to [B, c′, h / stride, w / stride]."""
        hidden = images
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            hidden = convolution(torch.relu(norm(hidden)))
        return hidden + self.shortcut(images)


class Cnn(nn.Module):
    """A residual network of stages; each stage doubles the channels and halves the size.

    Args:
        width: channels of the first stage, a multiple of 8.
        depth: blocks per stage.
        out_features: D
        size: height of the images. Large images are halved twice before the first stage; small ones are not, so that 32
            × 32 pixels become 4 × 4 after the last stage.
        channels: 3, or 1 for grey images.
        places: side of the grid from which the features are read. 1 takes the mean over all places, for objects at any
            position; characters differ in the positions of their strokes.
        stages: number of stages. With three, small images are halved before the first, so that they end as small as
            with four.
        centred: normalise the features over the batch instead of per example. This is for images that are nearly the
            same, whose initial features have a large common part: an update for one example would raise the logit of
            its class for all others, and thousands of classes would not learn for hundreds of steps.
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
    """Return the number of layers above each parameter of a backbone, 1 for the last layer, from timm's groups of
    layers or else from the first number in the parameter's name."""
    body: Any = backbone.body
    names = [name for name, _ in body.named_parameters()]
    layers: list[int] = []
    if hasattr(body, "group_matcher"):
        from timm.models import group_parameters

        groups: Any = group_parameters(body, body.group_matcher(coarse=False), reverse=True)
        layers = [groups[name] for name in names]
    else:
        numbers = [next((int(part) for part in name.split(".") if part.isdecimal()), None) for name in names]
        last = 0  # for parameters before the first numbered layer and after the last
        for number in numbers:
            last = last if number is None else number + 1
            layers.append(last)
    return {f"body.{name}": max(layers) - layer + 1 for name, layer in zip(names, layers, strict=True)}


class Backbone(nn.Module):
    """A network without its classifier.

    Args:
        body: network from inputs [B, ...] to features [B, D].
        out_features: D
        frozen: keep the body in evaluation mode and without gradients.
        normalized: scale the features of every example to length √D.
        standardize: standardisation of inputs [B, D′] before the body.
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
        """Set the mode; a frozen body stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.body.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute features [B, D] of inputs [B, ...]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.body(inputs if self.standardize is None else self.standardize(inputs))
            # √D is about the length of D features of unit variance, which the head's initialisation assumes.
            return math.sqrt(self.out_features) * F.normalize(features, dim=-1) if self.normalized else features


def image_network(width: int, depth: int, out_features: int, spec: InputSpec) -> Cnn:
    """Return the `cnn` network for these images."""
    channels, size = spec.shape[:2]
    return Cnn(width, depth, out_features, size, channels, **(GREY_CNN if channels == 1 else {}))


def build_backbone(options: BackboneOptions, spec: InputSpec) -> Backbone:
    """Return the configured backbone for the given inputs.

    `none` is for features, `mlp` for features and tokens, `cnn`, `timm:NAME` and `hf:NAME` for images, and `hf:NAME`
    also for texts.
    """
    body, features = _body(options, spec)
    # A head alone standardises its inputs itself, so that it can be exported alone.
    inside = options.standardize and trained_part(options, spec) != "head"
    standardize = Standardize(spec.shape[0]) if inside else None
    return Backbone(body, features, options.frozen, options.normalize_features, standardize)


def trained_part(options: BackboneOptions, spec: InputSpec) -> str:
    """Return the kind of model that is trained, a key of `hetxl.optim.DEFAULTS`."""
    name = backbone_name(options, spec)
    if options.frozen or name == "none":
        return "head"
    published = ":" in name and options.pretrained
    return "backbone" if published or options.start_from is not None else "network"


def uses_published(options: BackboneOptions) -> bool:
    """Return whether the backbone is from a library and starts from published weights."""
    return options.pretrained and options.start_from is None


def backbone_name(options: BackboneOptions, spec: InputSpec) -> str:
    """Return the backbone's name; auto depends on the kind of inputs."""
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
    if name.lower() in PRESETS:  # the paper's backbones
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
    """Raise if an option was set that has no effect on the backbone."""
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
            arguments["img_size"] = spec.shape[-1]  # timm resizes position embeddings to this size
        if options.drop_path:
            arguments["drop_path_rate"] = options.drop_path
        try:
            module: Any = timm.create_model(model, **arguments)
        except TypeError as error:  # for example a network without residual branches
            raise ValueError(f"backbone {name!r} cannot be built with these options: {error}") from None
    return module, _probed(name, module, spec)


def _probed(name: str, body: nn.Module, spec: InputSpec) -> int:
    """Return D by computing one example, because libraries name it differently; wrong input sizes raise here."""
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
        raise ValueError(f"backbone {name!r} returns features of shape {shape} instead of [B, D]; use another")
    return features.shape[1]


class Pooled(nn.Module):
    """A vision model of transformers with one output vector: its pooled output, its first token, or the mean over
    tokens or positions."""

    def __init__(self, model: nn.Module, first: bool = False):
        super().__init__()
        self.model, self.first = model, first

    def forward(self, pixels: Tensor) -> Tensor:
        """Map [B, 3, H, W] to [B, D]."""
        output = self.model(pixel_values=pixels)
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        last = output.last_hidden_state  # [B, tokens, D] or [B, D, h, w]
        if self.first:
            return last[:, 0]
        return last.mean(1) if last.dim() == 3 else last.flatten(2).mean(-1)


class PooledText(nn.Module):
    """A language model of transformers with one output vector: its pooled output, or the mean over the tokens."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [B, L], padded with −1, to [B, D]."""
        mask = ids >= 0
        output = self.model(input_ids=ids.clamp(min=0), attention_mask=mask.long())
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled
        weights = mask[..., None].to(output.last_hidden_state.dtype)
        return (weights * output.last_hidden_state).sum(1) / weights.sum(1).clamp(min=1)


_TRUSTED: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
"""Never run a model's own code, not even after a prompt on the terminal, and never load pickles."""


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Replace errors of transformers by one line."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        if "custom code" in str(error):
            raise ValueError(
                f"backbone {name!r} needs its own code, which hetxl never runs; use another model"
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
        # Its classifier reads the first token, so the checkpoint has no pooler, and a new one would be random.
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
