"""Any study on a user's data, backbone and link: the options that all studies of runs share."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hetxl_lab.studies.profiles import Bench, Profile
from hetxl_train.backbones import SIZES, build_backbone
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import open_data
from hetxl_train.model import link_of
from hetxl_train.num_steps import steps_for
from hetxl_train.presets import preset_for
from hetxl_train.runner import cached_dataset, data_source


def adapted(profile: Profile, options: Mapping[str, Any]) -> Profile:
    """Return a profile with the data, backbones, link, steps and other options that a command sets.

    Data that the profile has a bench for keeps the options of that bench. Any other is trained with the defaults of
    `hetxl train`, in the full profile for as many steps as that takes.
    """
    data, file = options.get("data"), options.get("config")
    written = {} if file is None else TrainConfig.read_toml(Path(file))
    if data is not None:
        known = [bench for bench in (*profile.benches, *profile.sigmoid, *profile.few_shot) if bench.data == data]
        profile = profile.on(*((known[0], profile.repeated.steps) if known else _own_bench(data, profile, written)))
    changes = {**written, **({} if options.get("link") is None else {"link": options["link"]})}
    backbones = _backbones(options.get("backbone"))

    def change(bench: Bench) -> Bench:
        both = {**bench.options, **changes}
        return dataclasses.replace(bench, options=both, backbones=backbones or bench.backbones)

    profile = profile.changed(change)
    steps = options.get("steps")
    if steps is None:
        return profile
    longer = profile.changed(lambda bench: dataclasses.replace(bench, steps=steps))
    return dataclasses.replace(longer, repeated=profile.repeated)  # its steps are one epoch


def _backbones(names: str | None) -> dict[str, dict[str, Any]]:
    """Return the options of backbones in a list separated by commas; sizes of other networks do not apply."""
    if names is None:
        return {}
    sizes = {field.name: field.default for field in dataclasses.fields(TrainConfig) if field.name in SIZES}
    return {name.strip(): {**sizes, "backbone": name.strip()} for name in names.split(",")}


def _own_bench(data: str, profile: Profile, written: Mapping[str, Any]) -> tuple[Bench, int]:
    """Return a user's data as a bench, and how many steps its epoch has."""
    small = {} if profile.own_steps is None else profile.options
    values: dict[str, Any] = {**preset_for(data), **small, **written, "data": data}
    config = TrainConfig(**values)
    dataset, _ = opened(config)
    steps = steps_for(config, dataset)
    if profile.own_steps is not None:
        steps = min(steps, profile.own_steps)
    epoch = max(1, round(len(dataset.splits["train"]) / config.batch_size))
    every = min(5, max(2, dataset.num_classes // 2))  # at least two classes are unknown
    return Bench(dataset.name, data, steps, small, every=every, defaults={}), epoch


def opened(config: TrainConfig) -> tuple[Dataset, str]:
    """Return the data of a configuration, opened once, and the link of a head on it."""
    dataset, _ = cached_dataset(data_source(config), lambda: open_data(config))
    return dataset, link_of(config, dataset)


def features_of(config: TrainConfig) -> int:
    """Return D, the features that a head reads; no weights are loaded."""
    dataset, _ = opened(config)
    with torch.device("meta"):
        return build_backbone(dataclasses.replace(config, pretrained=False), dataset.input).out_features
