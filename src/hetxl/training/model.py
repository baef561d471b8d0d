"""A backbone with a head, as one module: what is trained, saved and evaluated."""

from typing import Any

import torch
from torch import Tensor, nn

from hetxl.data.dataset import Dataset, InputSpec
from hetxl.functional.targets import TargetsLike
from hetxl.nn import Head, LearnedTemperature, build_head
from hetxl.training.backbones import Backbone, build_backbone
from hetxl.training.classifiers import build_classifier
from hetxl.training.config import TrainConfig
from hetxl.training.order import derive

SIGMOID_BIAS = -10.0
"""The paper's start of the classifier's bias under the sigmoid link: at first nothing is predicted."""


class Model(nn.Module):
    """features = backbone(inputs); loss = head(features, targets).

    Args:
        backbone: [B, ...] to [B, D]
        head: over K classes.
    """

    def __init__(self, backbone: Backbone, head: Head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, inputs: Tensor, targets: TargetsLike | None = None, **options: Any) -> Tensor:
        """The head's log-probabilities [B, K], or with targets its loss; options as of the head."""
        return self.head(self.backbone(inputs), targets, **options)


def link_of(config: TrainConfig, dataset: Dataset) -> str:
    """The link: as configured, or by whether examples have several labels."""
    if config.link == "auto":
        return "sigmoid" if dataset.multi_label else "softmax"
    if config.link == "softmax" and dataset.multi_label:
        raise ValueError("link = softmax needs one label for each example, but this data has lists; use link = sigmoid")
    return config.link


def head_options(config: TrainConfig, link: str) -> dict[str, Any]:
    """The options of a head by the names of its constructor."""
    # τ only scales W and the noise, which are learned anyway. Learned like them it runs ahead, and the model overfits
    # (docs/experiments.md).
    temperature: Any = 1.0 if config.temperature == "auto" else config.temperature
    if temperature == "learned":
        temperature = LearnedTemperature(config.temperature_low, config.temperature_high, config.temperature_init)
    else:
        temperature = float(temperature)
    options: dict[str, Any] = {
        "rank": config.rank,
        "covariance": config.covariance,
        "residual": config.residual,
        "noise_init": config.noise_init,
        "noise_scale": config.noise_scale,
        "link": link,
        "temperature": temperature,
        "train_samples": config.train_samples,
        "eval_samples": config.eval_samples,
        "sampler": config.sampler,
        "bias_init": SIGMOID_BIAS if config.bias_init is None and link == "sigmoid" else config.bias_init,
    }
    if config.head == "het-xl":
        options["noise_features"] = config.noise_features
    if config.head == "het-h":
        options["buckets"] = config.buckets
    return options


def build_model(config: TrainConfig, spec: InputSpec, num_classes: int, link: str) -> Model:
    """Backbone and head with the initial weights of the configuration's seed.

    The backbone and the classifier's weights are the same for every head of a seed: each part is drawn from a seed of
    its own. Draws outside are not disturbed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, 10))
        backbone = build_backbone(config, spec)
        torch.manual_seed(derive(config.seed, 11))
        options = head_options(config, link)
        classifier = build_classifier(config, backbone.out_features, num_classes, options["bias_init"])
        if classifier is not None:
            options |= {"classifier": classifier, "bias_init": None}
        head = build_head(config.head, backbone.out_features, num_classes, **options)
    return Model(backbone, head)
