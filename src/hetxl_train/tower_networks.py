"""Networks for towers, by name: models of timm, transformers and open_clip, and the backbone of a run.

| name | image tower | text tower |
| --- | --- | --- |
| `timm:MODEL` | yes | |
| `hf:MODEL` | yes | yes |
| `open_clip:MODEL`, `open_clip:MODEL/TAG` | yes | yes; TAG names published weights |
| `run:DIRECTORY` | backbone of a run of `hetxl train` on images | that of a run on texts |
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetxl.profiling.backbones import importing
from hetxl_train.backbones import Backbone, build_backbone
from hetxl_train.config import BackboneOptions, TowerOptions
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.open import tokenizer_of
from hetxl_train.data.preprocessing import backbone_transform
from hetxl_train.data.text import Tokenizer
from hetxl_train.data.transforms import ImageTransform, Preprocessing
from hetxl_train.runs import load_run, open_run, run_backbone, run_input
from hetxl_train.start_from import load_file_into

PUBLISHED, RANDOM = "published", "random"
"""Names of weights that are not files."""


class ClipText(nn.Module):
    """The text tower of an open_clip model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        model.visual = None  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        for name in ("logit_scale", "logit_bias"):  # parameters of the loss
            if getattr(model, name, None) is not None:
                delattr(model, name)
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [B, L] to [B, D]."""
        model: Any = self.model
        return model.encode_text(ids)


class ClipTokenizer:
    """The tokenizer of an open_clip model, with the interface of `Tokenizer`."""

    def __init__(self, model: str):
        with importing("open_clip", f"open_clip:{model}"):
            import open_clip
        self.tokenizer: Any = open_clip.get_tokenizer(model)
        self.input = InputSpec("text", (self.tokenizer.context_length,), self.tokenizer.vocab_size)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of texts, [b, L] int64."""
        return self.tokenizer(list(texts))


def is_network(name: str) -> bool:
    """Return whether a tower's name is a network of this module."""
    library, _, model = name.partition(":")
    return library in ("timm", "hf", "open_clip", "run") and bool(model)


def tokenizer_for(name: str, length: int) -> Callable[[Sequence[str]], Tensor]:
    """Return the tokenizer of a text tower, with an attribute `input`."""
    library, _, model = name.partition(":")
    if library == "open_clip":
        return ClipTokenizer(_clip_names(model)[0])
    if library == "run":
        tokenizer = tokenizer_of(open_run(model).config)
        if tokenizer is None:
            raise ValueError(f"text = {name!r} must be a run on texts (backbone hf:NAME)")
        return tokenizer
    if library != "hf":
        raise ValueError(f"text = {name!r} is not a text tower; use hf:NAME or open_clip:NAME")
    return Tokenizer(model, length)


def image_transform(name: str, size: int | None) -> ImageTransform:
    """Return the transform of a tower's images, at a given size or the tower's size."""
    library, _, model = name.partition(":")
    if library == "open_clip":
        own = _clip_transform(model)
    elif library == "run":
        own = run_input(model).transform
    else:
        own = backbone_transform(name)
    return ImageTransform(size or own.size, own.preprocessing)


def tower_network(options: TowerOptions, side: str, spec: InputSpec, published: bool = True) -> Backbone:
    """Return the network of an image or text tower for the given inputs, frozen if the tower is locked.

    Args:
        side: "image" or "text".
        published: whether to load initial weights; False if the weights of a contrastive run are loaded afterwards.
    """
    name, weights = getattr(options, side), getattr(options, f"{side}_weights")
    frozen = getattr(options, f"{side}_lock") != "free"
    library, _, model = name.partition(":")
    if library == "run":
        return _of_run(name, model, spec, frozen, published)
    if library == "open_clip":
        body = _clip(model, side, weights if published else RANDOM)
        with torch.no_grad():
            example = torch.zeros(1, *spec.shape, dtype=torch.long if spec.kind == "text" else None)
            network = Backbone(body, body.eval()(example).shape[1], frozen)
    else:
        values = BackboneOptions(backbone=name, frozen=frozen, pretrained=published and weights == PUBLISHED)
        network = build_backbone(values, spec)
        if published and weights not in (PUBLISHED, RANDOM):
            load_file_into(network.body, Path(weights), f"--{side.replace('_', '-')}-weights {weights}")
    return network


def _of_run(name: str, path: str, spec: InputSpec, frozen: bool, published: bool) -> Backbone:
    """Return the backbone of a run of `hetxl train`, with its weights if `published`."""
    network = load_run(path).model.backbone if published else run_backbone(path)
    if network.out_features == spec.shape[0] and isinstance(network.body, nn.Identity):
        raise ValueError(f"{name} has no backbone: it was trained on vectors; use the vectors as the tower's input")
    return Backbone(network.body, network.out_features, frozen, network.normalized, network.standardize)


# ---- open_clip


def _clip_names(model: str) -> tuple[str, str | None]:
    """Return the name of an open_clip model, and the tag of its weights, if any."""
    if model.startswith(("hf-hub:", "local-dir:")):
        return model, None
    name, _, tag = model.partition("/")
    return name, tag or None


def _clip(model: str, side: str, weights: str) -> nn.Module:
    name, tag = _clip_names(model)
    with importing("open_clip", f"open_clip:{model}"):
        import open_clip
    if weights == PUBLISHED and tag is None and ":" not in name:
        tags = open_clip.list_pretrained_tags_by_model(name)
        raise ValueError(
            f"open_clip:{model} must name its weights, as in open_clip:{name}/{tags[0] if tags else 'TAG'}; or use "
            f"--{side}-weights random"
        )
    loaded = weights != RANDOM
    whole: Any = open_clip.create_model(
        name, pretrained=tag if weights == PUBLISHED else weights if loaded else None, load_weights=loaded,
        pretrained_text=loaded,
    )  # fmt: skip
    return whole.visual if side == "image" else ClipText(whole)


def _clip_transform(model: str) -> ImageTransform:
    name, tag = _clip_names(model)
    with importing("open_clip", f"open_clip:{model}"):
        import open_clip
        from open_clip.transform import PreprocessCfg
    config: Any = open_clip.get_model_config(name)
    if config is None:
        raise ValueError(f"open_clip has no model {name!r}; open_clip.list_models() lists them")
    size: Any = config["vision_cfg"]["image_size"]
    values: Any = open_clip.get_pretrained_cfg(name, tag) if tag else None
    own, values = PreprocessCfg(), values or {}
    mean, std = values.get("mean") or own.mean, values.get("std") or own.std
    resize = {"shortest": "shorter", "squash": "squash", "longest": "border"}[
        values.get("resize_mode") or own.resize_mode
    ]
    interpolation = values.get("interpolation") or own.interpolation
    return ImageTransform(
        size if isinstance(size, int) else size[0], Preprocessing(mean, std, interpolation, 1.0, resize)
    )
