"""A backbone with a head as one module, which is trained, saved and evaluated; and the features of a frozen backbone,
which are computed once and then read from disk."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._seeds import derive_seed
from hetxl._tensors import content_checksum
from hetxl.classifiers import LinearClassifier, RetrievedClassifier, SampledClassifier, ShardedClassifier
from hetxl.functional.targets import TargetsLike
from hetxl.metrics.ensemble import Ensemble
from hetxl.nn import Classifier, DropoutHead, Head, LearnedTemperature, build_head
from hetxl.profiling import count_parameters
from hetxl.registry import head_entry
from hetxl_train.backbones import Backbone, build_backbone, trained_part
from hetxl_train.config import HeadOptions, TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.arrays import ArraySplit
from hetxl_train.data.dataset import SPLITS, Dataset, InputSpec, Shown, Split, UnreadableExamples
from hetxl_train.data.fingerprint import split_fingerprint
from hetxl_train.data.mapped_arrays import MappedArray
from hetxl_train.distributed import World
from hetxl_train.embeddings import BATCH, stored_vectors
from hetxl_train.loaders import blocks, reader

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Model(nn.Module):
    """features [B, D] = backbone(inputs [B, ...]); loss = head(features, targets)."""

    def __init__(self, backbone: Backbone, head: Head):
        super().__init__()
        self.backbone, self.head = backbone, head

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    def forward(self, inputs: Tensor, targets: TargetsLike | None = None, **options: Any) -> Tensor:
        """Return the head's log-probabilities [B, K], or with targets its loss; options are those of the head."""
        return self.head(self.backbone(inputs), targets, **options)


def build_model(
    config: TrainConfig, spec: InputSpec, num_classes: int, link: str, mesh: "DeviceMesh | None" = None
) -> Model:
    """Create backbone and head with the initial weights of the configuration's seed.

    Each part has a separate seed, so all heads of a seed get the same backbone and classifier weights. The random state
    outside does not change.

    Args:
        mesh: processes that share the classes of a sharded classifier; None for one process.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, 10))
        backbone = build_backbone(config, spec)
        torch.manual_seed(derive_seed(config.seed, 11))
        options = head_options(config, link)
        classifier = build_classifier(config, backbone.out_features, num_classes, options["bias_init"], mesh)
        if classifier is not None:
            options |= {"classifier": classifier, "bias_init": None}
        options["standardize"] = bool(config.standardize) and trained_part(config, spec) == "head"
        if config.mc_dropout:
            head: Head = DropoutHead(backbone.out_features, num_classes, dropout=config.mc_dropout, **options)
        else:
            head = build_head(config.head, backbone.out_features, num_classes, **options)
    return Model(backbone, head)


def answers_of(model: Model) -> list[dict[str, float]]:
    """Return the scales of each head's predictions, which are not among its weights."""
    heads: Any = getattr(model.head, "heads", [model.head])
    return [{"noise_scale": head.noise_scale, "flip_rate": head.flip_rate} for head in heads]


def ensemble_of(models: Sequence[Model]) -> Model:
    """Return an ensemble of trained models as one model, whose features are the inputs."""
    head: Any = Ensemble([(model.backbone, model.head) for model in models])
    return Model(Backbone(nn.Identity(), models[0].backbone.out_features), head)


def link_of(options: HeadOptions, dataset: Dataset) -> str:
    """Return the configured link, or sigmoid if examples have several labels, else softmax."""
    if options.link == "auto":
        return "sigmoid" if dataset.multi_label else "softmax"
    if options.link == "softmax" and dataset.multi_label:
        raise ValueError("link = softmax needs one label for each example, but this data has lists; use link = sigmoid")
    return options.link


def head_options(options: HeadOptions, link: str) -> dict[str, Any]:
    """Return the options of a head by the names of its constructor."""
    # τ only scales W and the noise, which are learned anyway. Learned at the same rate, it moves too fast and the model
    # overfits (lab/docs/experiments.md).
    temperature: Any = 1.0 if options.temperature in ("auto", "learned") else float(options.temperature)
    if options.temperature == "learned":
        temperature = LearnedTemperature(options.temperature_low, options.temperature_high, options.temperature_init)
    shared = ("rank", "covariance", "residual", "noise_init", "train_samples", "eval_samples", "sampler")
    own = tuple(name for name in head_entry(options.head).options if hasattr(options, name))
    return {name: getattr(options, name) for name in shared + own} | {
        "link": link,
        "noise_scale": 1.0 if options.noise_scale is None else options.noise_scale,
        "flip_rate": options.flip_rate or 0.0,
        "temperature": temperature,
        "bias_init": options.bias_init,
    }


def build_classifier(
    config: TrainConfig, in_features: int, num_classes: int, bias_init: float | None, mesh: "DeviceMesh | None" = None
) -> Classifier | None:
    """Return the configured classifier; None for the default linear layer. A bias of None is that of nn.Linear."""
    classifier: LinearClassifier | ShardedClassifier
    if config.classifier == "linear":
        return None
    if config.classifier == "sampled":
        classifier = SampledClassifier(in_features, num_classes, negatives=config.negatives)
    elif config.classifier == "sharded":
        classifier = ShardedClassifier(in_features, num_classes, mesh=mesh, seed=derive_seed(config.seed, 28))
    else:
        # There are at most as many neighbours as classes.
        neighbours = min(config.neighbours, num_classes)
        classifier = RetrievedClassifier(in_features, num_classes, neighbours=neighbours, others=config.negatives)
    if bias_init is not None and classifier.bias is not None:
        nn.init.constant_(classifier.bias, bias_init)
    return classifier


def parameter_counts(model: nn.Module, *parts: str) -> dict[str, int]:
    """Return the number of parameters in total and of the named submodules, counting shared ones once."""
    modules = {"total": model} | {name: model.get_submodule(name) for name in parts}
    return {name: count_parameters(module) for name, module in modules.items()}


# ---- features of a frozen backbone


class FeatureFile(ArraySplit):
    """The features of a split's rows [n] in a memory-mapped [n, D] .npy file, with the split's labels and images.

    Unreadable rows are not in the file.
    """

    def __init__(self, source: Split, array: MappedArray, rows: np.ndarray):
        super().__init__(array, source.labels.subset(rows))
        self.source, self.source_rows = source, rows

    def show(self, row: int) -> Shown:
        """Return the image or text of a row from its source."""
        return self.source.show(int(self.source_rows[row]))


def cached_features(
    directory: Path, model: Model, dataset: Dataset, workers: int, console: Console, world: World
) -> tuple[Model, dict[str, Split]]:
    """Return a model without its frozen backbone, and splits with the stored features.

    The returned model shares the head. Features of other data or another backbone, or damaged ones, are computed again.
    The processes divide the rows.
    """
    splits: dict[str, Split] = {}
    backbone = model.backbone
    bare = Backbone(backbone.body, backbone.out_features, frozen=True)
    weights = weights_checksum(backbone)
    for name in SPLITS:
        if name in dataset.splits:
            split, path = dataset.splits[name], directory / f"{name}.npy"
            origin = {"data": split_fingerprint(split), "backbone": weights}
            splits[name] = FeatureFile(split, *stored_features(path, bare, split, origin, workers, console, world))
    rest = Backbone(nn.Identity(), backbone.out_features, normalized=backbone.normalized)
    return Model(rest, model.head), splits


def weights_checksum(network: nn.Module) -> str:
    """Return a checksum of all weights of a network."""
    return content_checksum({name: value.cpu() for name, value in network.state_dict().items()}, {})


def stored_features(
    path: Path, backbone: Backbone, split: Split, origin: dict[str, Any], workers: int, console: Console, world: World
) -> tuple[MappedArray, np.ndarray]:  # fmt: skip
    """Return features [n, D] of the readable rows, and these rows [n], like `stored_vectors`."""

    def compute(rows: np.ndarray, unreadable: UnreadableExamples) -> Iterator[tuple[Tensor, np.ndarray]]:
        return feature_batches(backbone, split, rows, workers, world.device, unreadable)

    return stored_vectors(path, compute, len(split), origin, console, world)


@torch.no_grad()
def feature_batches(
    backbone: Backbone, split: Split, rows: np.ndarray, workers: int, device: torch.device,
    unreadable: UnreadableExamples | None = None,
) -> Iterator[tuple[Tensor, np.ndarray]]:  # fmt: skip
    """Yield features [b, D] in float32 and their rows [b], batch by batch, from a backbone in evaluation mode.

    Unreadable rows are skipped; `unreadable` counts them, and raises if there are too many.
    """
    training = backbone.training
    backbone.eval()
    try:
        for fetched in reader(split, workers)(blocks(rows, BATCH)):
            if unreadable is not None:
                unreadable.add(fetched)
            if len(fetched.rows):
                features = backbone(fetched.inputs.to(device)).cpu()
                # Tokens, the inputs of an ensemble's members, stay integers.
                yield features.float() if features.is_floating_point() else features, fetched.rows
    finally:
        backbone.train(training)
