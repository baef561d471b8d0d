"""Preprocessing of images: from the backbone's configuration (timm, or the image processor of transformers), changed by
the options of a run."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hetxl.profiling.backbones import importing, unknown_model
from hetxl_train.data.transforms import Augmentation, ImageTransform, Preprocessing

if TYPE_CHECKING:
    from hetxl_train.config import TrainConfig


def transform_of(config: "TrainConfig") -> ImageTransform:
    """Return the transform of a run's images."""
    own = backbone_transform(config.backbone)
    options = {
        "mean": numbers("image_mean", config.image_mean),
        "std": numbers("image_std", config.image_std),
        "interpolation": config.interpolation,
        "crop": config.crop,
        "resize": config.resize,
    }
    changes = {name: value for name, value in options.items() if value is not None}
    preprocessing = dataclasses.replace(own.preprocessing, **changes)
    augmentation = Augmentation(config.rand_augment, config.random_erasing)
    return ImageTransform(config.image_size or own.size, preprocessing, augmentation)


def numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    """Return three numbers from a text that separates them with commas; None for None."""
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3:
        raise ValueError(f"{name} must be three numbers, as in 0.5,0.5,0.5, found {text!r}")
    return values


def backbone_transform(name: str) -> ImageTransform:
    """Return the transform in a backbone's configuration, or the default `ImageTransform` if it has none."""
    library, _, model = name.partition(":")
    if library == "timm" and model:
        return _timm(name, model)
    if library == "hf" and model:
        return _transformers(name, model)
    return ImageTransform()


def _timm(name: str, model: str) -> ImageTransform:
    with importing("timm", name):
        import timm
        from timm.data import resolve_data_config
    if not timm.is_model(model):
        raise unknown_model(name, "timm", model, timm.list_models())
    configuration: Any = timm.get_pretrained_cfg(model)
    values: dict[str, Any] = resolve_data_config({}, pretrained_cfg=configuration.to_dict() if configuration else {})
    resize = "shorter" if values["crop_mode"] == "center" else values["crop_mode"]
    preprocessing = Preprocessing(values["mean"], values["std"], values["interpolation"], values["crop_pct"], resize)
    return ImageTransform(values["input_size"][-1], preprocessing)


def _transformers(name: str, model: str) -> ImageTransform:
    """Read the configuration of a model's image processor, from a directory or a hub. Model types have none."""
    with importing("transformers", name):
        from transformers.models.auto.image_processing_auto import get_image_processor_config
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    if model in MODEL_MAPPING_NAMES:
        return ImageTransform()
    values: Mapping[str, Any] = get_image_processor_config(model)
    return transform_from_processor(values) if "image_mean" in values else ImageTransform()


def transform_from_processor(values: Mapping[str, Any]) -> ImageTransform:
    """Return the transform that an image processor of transformers describes, from its preprocessor_config.json."""
    from PIL.Image import Resampling

    sides = _sides(values.get("size", 224))
    crop = _sides(values["crop_size"])[0] if values.get("do_center_crop") and "crop_size" in values else None
    shorter = values.get("size", {}).get("shortest_edge") if isinstance(values.get("size"), Mapping) else None
    if shorter is None:  # both sides are resized
        size, share, resize = crop or sides[0], (crop or sides[0]) / sides[0], "squash"
    elif "crop_pct" in values and crop is None:  # ConvNeXt's: large images are resized whole
        size, share, resize = shorter, values["crop_pct"] or 0.875, "shorter"
        if shorter >= 384:
            share, resize = 1.0, "squash"
    else:
        size, share, resize = crop or shorter, (crop or shorter) / shorter, "shorter"
    interpolation = Resampling(values.get("resample", 2)).name.lower()
    return ImageTransform(
        size, Preprocessing(tuple(values["image_mean"]), tuple(values["image_std"]), interpolation, share, resize)
    )


def _sides(size: Any) -> tuple[int, int]:
    """Return height and width of a size as processors write it: a number, or by name."""
    if not isinstance(size, Mapping):
        return (size, size) if isinstance(size, int) else tuple(size)
    edge = size.get("shortest_edge")
    return size.get("height", edge), size.get("width", edge)
