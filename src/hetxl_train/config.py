"""The options of a run, in groups. Attribute access is flat (`config.rank`), functions name the group that they need in
their signature, and an option's section in TOML files and in config.json is that of the group that defines it.

    class TrainConfig(DataOptions, HeadOptions, …)    hetxl train
    class ContrastiveConfig(PairOptions, …)           hetxl contrastive train

An option is defined once: `option(…)` has its flag, TOML key, help, default and bounds.
"""

import dataclasses
import difflib
import functools
import importlib
import json
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hetxl.registry import (
    COVARIANCES,
    EVAL_SAMPLES,
    HEAD_NAMES,
    LINKS,
    RANK,
    RESIDUALS,
    SAMPLER_NAMES,
    TEMPERATURE,
    TRAIN_SAMPLES,
)
from hetxl_train import plugins
from hetxl_train.loggers import check_loggers
from hetxl_train.temperature_methods import LEARNED

if typing.TYPE_CHECKING:
    from typing_extensions import Self

    from hetxl.optim import Recipe

LABEL_NOISE = ("symmetric", "confusable", "feature-dependent")
BACKBONES = ("auto", "none", "mlp", "cnn", "resnet152", "vit-l/32", "timm:NAME", "hf:NAME")
SCHEDULES = ("linear", "cosine", "inverse_sqrt", "constant")
CLASSIFIERS = ("linear", "sampled", "retrieved", "sharded")
PARALLEL = ("ddp", "fsdp")
TEXT_TOWERS = ("ngrams", *plugins.entries("text_encoders"), "hf:NAME", "open_clip:NAME", "run:DIR")
IMAGE_TOWERS = ("cnn", "timm:NAME", "hf:NAME", "open_clip:NAME", "run:DIR")
LOCKS = ("free", "locked", "mapped")


def option(
    default: Any, help: str, choices: tuple[str, ...] = (), *, least: float | None = None, most: float | None = None,
    below: float | None = None, positive: bool = False, also: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Return a dataclass field with a sentence for `--help`, the allowed names (any value if empty) and its bounds,
    which are inclusive except `below`; `also` has other names of its flag."""
    bounds = {"least": least, "most": most, "below": below, "positive": positive}
    return field(default=default, metadata={"help": help, "choices": choices, "also": also, **bounds})


@dataclass(frozen=True)
class Options:
    """Base of all groups. Values are converted to their types and checked on creation.

    A group defines `section`, its fields, and `_check`, which raises a ValueError for incompatible options.
    """

    section: ClassVar[str] = ""

    def __post_init__(self):
        kinds = option_types(type(self))
        for spec in dataclasses.fields(self):
            value = _coerced(spec.name, getattr(self, spec.name), kinds[spec.name])
            object.__setattr__(self, spec.name, value)
            if value is not None:
                _check_bounds(spec.name, value, spec.metadata)
        for group in reversed(type(self).__mro__):
            if "_check" in vars(group):
                group._check(self)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def sections(cls) -> dict[str, str]:
        """Return the section of every option, that of the first group that defines it, in the order of the options."""
        groups = [group for group in cls.__mro__ if issubclass(group, Options)]
        return {
            spec.name: [group.section for group in groups if spec.name in group.__dataclass_fields__][-1]
            for spec in dataclasses.fields(cls)
        }

    def options(self) -> dict[str, Any]:
        """Return all options by name, without their sections."""
        return {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return the options in their sections, as in a TOML file."""
        values: dict[str, dict[str, Any]] = {}
        for name, section in self.sections().items():
            values.setdefault(section, {})[name] = getattr(self, name)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "configuration") -> "Self":
        """Return the configuration of options in their sections or without; unknown keys raise a ValueError."""
        return cls(**cls.flatten(values, where))

    @classmethod
    def flatten(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return options, by name or in sections, without their sections; an error about a name includes `where`."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} must hold sections of options, found {type(values).__name__}")
        sections = cls.sections()
        flat: dict[str, Any] = {}

        def take(name: str, value: Any, section: str | None) -> None:
            if name not in sections:
                raise ValueError(f"unknown key {name!r} in {where}{_near(name, sections)}")
            if section is not None and sections[name] != section:
                raise ValueError(f"{name!r} in {where} belongs in section [{sections[name]}], found in [{section}]")
            if name in flat:
                raise ValueError(f"{name!r} is given twice in {where}; keep one")
            flat[name] = value

        for name, value in values.items():
            # `data`, `head` and `backbone` are both sections and options: a table is the section.
            if not isinstance(value, Mapping):
                take(name, value, None)
            elif name in sections.values():
                for key, inner in value.items():
                    take(key, inner, name)
            else:
                raise ValueError(f"unknown section [{name}] in {where}{_near(name, set(sections.values()))}")
        return flat

    @classmethod
    def read_toml(cls, path: Path) -> dict[str, Any]:
        """Return the options of a TOML file, with every name checked."""
        try:
            return cls.parse_toml(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError:
            raise ValueError(f"--config {path}: no such file") from None
        except OSError as error:
            raise ValueError(f"--config {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"--config {path}: not valid TOML: {error}") from None

    @classmethod
    def parse_toml(cls, text: str, where: str) -> dict[str, Any]:
        """Return the options of a text in TOML, with every name checked."""
        # Python 3.10 has no TOML reader of its own.
        tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            values = tomllib.loads(text)
        except RecursionError:
            raise ValueError(f"--config {where}: not valid TOML: it is nested too deeply") from None
        except ValueError as error:  # a TOML error, or a number with too many digits
            raise ValueError(f"--config {where}: not valid TOML: {error}") from None
        return cls.flatten(values, where)


# ---- groups that both tasks share


@dataclass(frozen=True)
class SourceOptions(Options):
    """The data and how it is read."""

    section: ClassVar[str] = "data"

    data: str = option("pycode", "A dataset by name (pycode, or synthetic:noise=2 with options), a path, or hf:NAME.")
    data_seed: int = option(0, "Seed for built-in data, and for splitting data that has no splits.", least=0)
    image_size: int | None = option(None, "Height and width that images are resized to [the backbone's, or 224].",
                                    least=8)  # fmt: skip
    workers: int = option(2, "Number of processes that decode images.", least=0)


@dataclass(frozen=True)
class OptimOptions(Options):
    """Length, batches, optimiser and seed of a run."""

    section: ClassVar[str] = "training"

    steps: int | None = option(None, "Number of optimiser steps, instead of --epochs.", least=1)
    epochs: float | None = option(
        None, "Number of epochs [1, or enough for 1,000 steps on small data; see docs/training.md].", least=0
    )
    batch_size: int = option(256, "Examples per optimiser step, over all processes.", least=1)
    optimizer: str = option(
        "adamw", "adamw, sgd (momentum is --beta1), or an optimiser of timm, such as adafactor, lamb or lion."
    )
    learning_rate: float | None = option(
        None, "Peak learning rate [depends on what is trained; see docs/training.md].", positive=True
    )
    noise_learning_rate: float | None = option(
        None, "Learning rate of the covariance, as a multiple of --learning-rate [1; 0.3 for a head alone].", least=0
    )
    warmup: float = option(0.05, "Steps of linear warm-up; a value below 1 is a share of all steps.", least=0)
    warmup_from: float = option(1e-5, "Learning rate at the first warm-up step.", least=0)
    schedule: str = option("cosine", "Learning rate schedule; inverse_sqrt decays as 1 / √step.", SCHEDULES)
    weight_decay: float | None = option(
        None,
        "Decoupled weight decay, except on τ, biases and norms [0.01; a head alone uses --prior instead].",
        least=0,
    )
    beta1: float = option(0.9, "First decay rate of AdamW; momentum of SGD.", least=0, below=1)
    beta2: float = option(0.999, "Second decay rate of AdamW.", least=0, below=1)
    clip: float = option(1.0, "Maximum gradient norm; 0: no clipping.", least=0)
    precision: str = option("float32", "Precision of matrix products in training.", ("float32", "bfloat16", "float16"))
    seed: int = option(0, "Seed for the initial weights, the order of the data and all noise.", least=0)
    device: str = option("auto", "cpu, cuda, mps, …; auto uses an accelerator if one is available.")

    @functools.cached_property
    def optim(self) -> "Recipe":
        """The optimiser's options, for `hetxl.optim`."""
        from hetxl.optim import Recipe  # imports torch, which reading options does not need

        values = {spec.name: getattr(self, spec.name, None) for spec in dataclasses.fields(Recipe)}
        return Recipe(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class ParallelOptions(Options):
    """Several processes, and how devices are used."""

    section: ClassVar[str] = "parallel"

    compile: bool = option(False, "Compile the backbone with torch.compile.")
    activation_checkpointing: bool = option(
        False, "Recompute the backbone's activations in the backward pass: less memory, more time."
    )
    channels_last: bool = option(False, "Keep images and convolutions in the channels-last memory format.")
    sync_batchnorm: bool = option(False, "Synchronise batch norms over all accelerators.")
    pin_memory: bool = option(True, "CUDA: load batches into pinned memory, so that copies overlap with the step.")
    evaluation_precision: str = option(
        "float32", "Precision of the backbone in evaluations.", ("float32", "bfloat16", "float16")
    )
    timeout: float = option(
        600.0, "Several processes: stop after this many seconds without a response from one of them.", positive=True
    )
    data_parallel: str = option(
        "ddp",
        "Several processes: replicate the model (ddp), or shard its weights and optimiser state (fsdp).",
        PARALLEL,
    )


@dataclass(frozen=True)
class OutputOptions(Options):
    """The directory of a run, and how often it is evaluated and saved."""

    section: ClassVar[str] = "output"

    out: str | None = option(None, "Directory of the run [runs/DATA-HEAD].")
    evaluate_every: int | None = option(None, "Steps between evaluations [a tenth of the run].", least=1)
    checkpoint_every: int | None = option(None, "Steps between checkpoints [as --evaluate-every].", least=1)
    keep: int = option(2, "Number of recent checkpoints to keep, in addition to the best.", least=1)
    log_every: int = option(10, "Steps between entries of log.jsonl.", least=1)
    tensorboard: bool = option(False, "Same as --loggers tensorboard.")
    loggers: str = option("", "Also log to tensorboard, wandb or mlflow; separate several with commas [none].")

    def _check(self) -> None:
        check_loggers(self.loggers)

    @property
    def chosen_loggers(self) -> list[str]:
        """Return the names of all loggers of the run."""
        return check_loggers(f"{self.loggers},{'tensorboard' if self.tensorboard else ''}")


# ---- classification


@dataclass(frozen=True)
class DataOptions(SourceOptions):
    """Labelled data, its preprocessing and augmentation, and label noise to add."""

    labels: str | None = option(None, "File with the labels [stored with the features].")
    features_column: str | None = option(
        None, "Column with embeddings, images or image paths [detected by name and type]."
    )
    text_column: str | None = option(None, "Column with texts, for hf: backbones [detected by name and type].")
    label_column: str | None = option(None, "Column with labels [detected by name and type].")
    split_column: str | None = option(None, "Column with the name of each row's split [split].")
    text_length: int = option(128, "Maximum number of tokens per text; longer texts are cut.", least=1)
    validation: str | None = option(None, "Path of the validation split [part of DATA].")
    test: str | None = option(None, "Path of the test split [part of DATA].")
    label_noise: str = option("none", "Replace training labels with wrong ones.", ("none", *LABEL_NOISE))
    label_noise_rate: float = option(0.0, "Share of the training labels to replace.", least=0, most=1, also=("--rate",))
    image_mean: str | None = option(None, "Mean of red, green and blue, such as 0.5,0.5,0.5 [the backbone's].")
    image_std: str | None = option(
        None, "Standard deviation of red, green and blue, such as 0.5,0.5,0.5 [the backbone's]."
    )
    interpolation: str | None = option(
        None, "Interpolation for resizing: bilinear, bicubic, nearest, … [the backbone's]."
    )
    crop: float | None = option(
        None, "Side of the centre crop, as a share of the resized image [the backbone's].", positive=True
    )
    resize: str | None = option(
        None, "Which side is resized before the centre crop: shorter, squash (both) or border [the backbone's]."
    )
    rand_augment: str = option("", "RandAugment of timm, such as rand-m9-mstd0.5 [none].")
    random_erasing: float = option(0.0, "Probability that a rectangle of a training image is erased.", least=0, most=1)
    mixup: float = option(0.0, "α of mixup, which blends images and their labels, such as 0.2; 0: off.", least=0)
    cutmix: float = option(0.0, "α of cutmix, which pastes a rectangle of another image, such as 1.0; 0: off.", least=0)

    def _check(self) -> None:
        if self.label_noise != "none" and not self.label_noise_rate:
            raise ValueError(f"label_noise is {self.label_noise!r} and label_noise_rate 0; give a rate, such as 0.2")
        if self.label_noise == "none" and self.label_noise_rate:
            names = ", ".join(LABEL_NOISE)
            raise ValueError(f"label_noise_rate is {self.label_noise_rate} and label_noise none; choose {names}")


@dataclass(frozen=True)
class HeadOptions(Options):
    """The head, its covariance, its temperature and its classifier."""

    section: ClassVar[str] = "head"

    head: str = option("het-xl", "Type of the head.", HEAD_NAMES)
    link: str = option(
        "auto", "Link function; auto is sigmoid if examples have several labels, else softmax.", ("auto", *LINKS)
    )
    classifier: str = option(
        "linear",
        "Classifier; sampled and retrieved train on few classes per step, sharded splits classes over processes.",
        CLASSIFIERS,
    )
    negatives: int = option(
        1024, "sampled: number of negative classes per batch; retrieved: in addition to the neighbours.", least=1
    )
    neighbours: int = option(32, "retrieved: number of nearest classes per example.", least=1)
    rank: int = option(RANK, "Rank R of the covariance.", least=0)
    covariance: str = option("efficient", "Form of the covariance.", COVARIANCES)
    residual: str = option("rank1", "Part of the covariance that is added to its factors.", RESIDUALS)
    noise_init: float = option(0.1, "Initial scale of the noise; the paper's authors use 1.", positive=True)
    noise_scale: float | None = option(
        None, "Factor of the noise in evaluation [fitted on validation rows with a backbone, else 1].", least=0
    )
    flip_rate: float | None = option(
        None,
        "Share of training labels that are uniformly random [estimated for a head alone, else 0].",
        least=0,
        below=1,
    )
    noise_features: int | None = option(
        None, "het-xl: size M of a separate noise space [none: the feature space].", least=1
    )
    buckets: int | None = option(None, "het-h: number of buckets H [D].", least=1)
    mc_dropout: float = option(
        0.0, "det: dropout rate of the features in training and in each of S predictions.", least=0, below=1
    )
    temperature: str = option(
        str(TEMPERATURE), "Temperature τ: a number, learned, or auto (learned if data and steps suffice)."
    )
    temperature_init: float = option(1.0, "Initial value of a learned τ; the paper uses the middle, 2.525.",
                                     positive=True)  # fmt: skip
    temperature_low: float = option(0.05, "Lower bound of a learned τ.", positive=True)
    temperature_high: float = option(5.0, "Upper bound of a learned τ.", positive=True)
    train_samples: int = option(TRAIN_SAMPLES, "Number of samples S in training.", least=1)
    eval_samples: int = option(EVAL_SAMPLES, "Number of samples S in evaluation and prediction.", least=1)
    sampler: str = option("orthogonal", "How the noise samples are drawn.", SAMPLER_NAMES)
    bias_init: float | None = option(
        None, "Initial bias of the classifier [as in nn.Linear; sigmoid: the log-odds of each class]."
    )

    def _check(self) -> None:
        if self.temperature not in ("auto", "learned"):
            try:
                positive = 0 < float(self.temperature) < math.inf
            except ValueError:
                positive = False
            if not positive:
                raise ValueError(f"temperature must be a positive number, learned or auto, found {self.temperature!r}")
        if self.temperature == "learned" and not self.temperature_low < self.temperature_init < self.temperature_high:
            raise ValueError(
                f"temperature_init must lie between temperature_low, {self.temperature_low:g}, and temperature_high, "
                f"{self.temperature_high:g}, found {self.temperature_init:g}"
            )
        if self.mc_dropout and self.head != "det":
            raise ValueError(f"mc_dropout = {self.mc_dropout:g} needs head = det, found {self.head}")
        if self.classifier != "linear" and (self.head not in ("det", "het-xl") or self.noise_features is not None):
            head = f"head = {self.head}" + ("" if self.noise_features is None else " with noise_features")
            heads = "head = det, or het-xl without noise_features"
            raise ValueError(f"classifier = {self.classifier} goes with {heads}, found {head}")


@dataclass(frozen=True)
class BackboneOptions(Options):
    """The network in front of the head."""

    section: ClassVar[str] = "backbone"

    backbone: str = option("auto", f"{', '.join(BACKBONES)}. auto is mlp for tokens, cnn for images, else none.")
    features: int | None = option(None, "Output size D of mlp and cnn [mlp 128; cnn 256].", least=1)
    width: int | None = option(
        None, "Hidden width of mlp, or channels of cnn's first stage [mlp 512; cnn 32].", least=1
    )
    depth: int = option(2, "Hidden layers of mlp, or blocks per stage of cnn.", least=1)
    embedding: int = option(64, "Size of the token embeddings.", least=1)
    dropout: float = option(0.0, "Dropout rate of mlp.", least=0, below=1)
    standardize: bool | None = option(
        None, "Standardise input vectors with the mean and deviation of the training rows [yes; images: no]."
    )
    normalize_features: bool = option(False, "Scale each feature vector to length √D.")
    frozen: bool = option(False, "Train only the head; features are computed once and cached.")
    drop_path: float = option(
        0.0,
        "Stochastic depth: drop rate of the residual branch of the last block.",
        least=0,
        below=1,
    )
    pretrained: bool = option(True, "timm: and hf: backbones: start from published weights.")
    start_from: str | None = option(
        None, "Weights to start from: a run directory, or a .safetensors file of timm or transformers."
    )


@dataclass(frozen=True)
class ClassifierOptimOptions(OptimOptions):
    """Optimisation of a classifier and of its temperature."""

    recipe: str | None = option(None, "Use the options of this recipe as defaults; hetxl recipes lists all.")
    layer_decay: float = option(
        1.0,
        "Factor by which the learning rate shrinks with each layer of the backbone, from top to bottom.",
        least=0,
        most=1,
    )
    accumulate: int = option(1, "Gradient accumulation steps.", least=1)
    temperature_learning_rate: float = option(
        0.1, "Learning rate of a learned τ, as a multiple of --learning-rate.", least=0
    )
    temperature_hold: float = option(0.0, "Share of the steps during which a learned τ keeps its initial value.",
                                     least=0, most=1)  # fmt: skip
    temperature_prior: float = option(0.0, "Weight of the penalty (log τ)² on a learned τ.", least=0)
    temperature_method: str = option(
        "train", "How τ is learned: on the training loss (train), or on a validation loss.", LEARNED
    )
    temperature_held_out: float = option(
        0.0,
        "gradient, bilevel: share of each batch used for validation; 0: use the validation split.",
        least=0,
        below=1,
    )
    noise_weight_decay: float | None = option(None, "Weight decay of the covariance [as --weight-decay].", least=0)
    noise_start: float | None = option(
        None, "Share of the steps, at the start, that train without noise [0; 0.3 for a head alone].", least=0, below=1
    )
    prior: float | None = option(
        None, "A head alone: prior variance of the logits [chosen on held-out rows].", positive=True
    )
    ema: float = option(
        0.0, "Decay of a moving average of the weights, which evaluation uses; 0: off.", least=0, below=1
    )
    label_smoothing: float = option(
        0.0, "Label smoothing (softmax): share of the target spread over all classes.", least=0, below=1
    )
    patience: int = option(0, "Stop after this many evaluations without a lower validation NLL; 0: never.", least=0)

    def _check(self) -> None:
        method, held_out = self.temperature_method, self.temperature_held_out
        if self.prior is not None and self.weight_decay:
            raise ValueError(f"prior is {self.prior:g} and weight_decay {self.weight_decay:g}; give one of them")
        if self.batch_size % self.accumulate:
            sizes = f"{self.batch_size} and {self.accumulate}"
            raise ValueError(f"batch_size must be a multiple of accumulate, found {sizes}")
        if method == "train" and held_out:
            raise ValueError(
                f"temperature_held_out is {held_out:g} and temperature_method train; choose gradient or bilevel"
            )
        if method == "bilevel" and self.optimizer != "adamw":
            raise ValueError(f"temperature_method = bilevel needs optimizer = adamw, found {self.optimizer}")
        if method != "train" and self.precision == "float16":
            raise ValueError(f"temperature_method = {method} goes with precision = float32 or bfloat16, found float16")


@dataclass(frozen=True)
class ClassifierParallelOptions(ParallelOptions):
    """Processes of a classifier's run, and how they split its classes."""

    class_shards: int = option(0, "--classifier sharded: number of processes that split the classes; 0: all.", least=0)


@dataclass(frozen=True)
class ClassifierOutputOptions(OutputOptions):
    """Output of a classifier's run, with the number of examples per evaluation."""

    evaluation_examples: int = option(5000, "Number of validation examples per evaluation; 0: all.", least=0)
    test_examples: int = option(0, "Number of test examples in the final evaluation; 0: all.", least=0)


# Fields are ordered from the last base to the first, which is the order of the flags and of config.json.
@dataclass(frozen=True)
class TrainConfig(
    ClassifierOutputOptions,
    ClassifierParallelOptions,
    ClassifierOptimOptions,
    BackboneOptions,
    HeadOptions,
    DataOptions,
):
    """All options of a classifier's run, saved with the run as `config.json`."""

    def _check(self) -> None:
        method = self.temperature_method
        if method != "train" and self.temperature != "learned":
            raise ValueError(f"temperature_method = {method} needs temperature = learned, found {self.temperature}")
        if self.data_parallel == "fsdp" and (method != "train" or self.ema or self.temperature_prior):
            raise ValueError(
                "data_parallel = fsdp goes with temperature_method = train, and without ema and temperature_prior; "
                "use data_parallel = ddp"
            )
        if method == "bilevel" and self.classifier != "linear":
            raise ValueError(f"temperature_method = bilevel needs classifier = linear, found {self.classifier}")
        if self.class_shards and self.classifier != "sharded":
            raise ValueError(
                f"class_shards is {self.class_shards} and classifier {self.classifier}; choose classifier = sharded"
            )
        if self.classifier == "sharded":
            self._check_sharded()
        mixing = next((name for name in ("mixup", "cutmix") if getattr(self, name)), None)
        if mixing is not None and (self.classifier != "linear" or method != "train"):
            raise ValueError(f"{mixing} needs classifier = linear and temperature_method = train")
        for name in ("rand_augment", "random_erasing", "mixup", "cutmix"):
            if self.frozen and getattr(self, name):
                raise ValueError(f"{name} has no effect with frozen, whose features are computed once; leave it out")
        if self.label_smoothing and self.classifier != "linear":
            raise ValueError(f"label_smoothing needs all classes; leave it out with classifier = {self.classifier}")
        if self.label_smoothing and self.link == "sigmoid":
            raise ValueError("label_smoothing is for the softmax link; leave it out with link = sigmoid")

    def _check_sharded(self) -> None:
        """Raise for options that need all classes, or a whole weight, in one process."""
        required = {
            "data_parallel": ("ddp",),
            "temperature_method": ("train",),
            "optimizer": ("adamw", "sgd"),
            "precision": ("float32", "bfloat16"),
            "prior": (None,),
            "flip_rate": (None, 0.0),
            "mc_dropout": (0.0,),
        }
        for name, values in required.items():
            if getattr(self, name) not in values:
                allowed = " or ".join(f"{name} = {value}" for value in values if value)
                raise ValueError(
                    f"classifier = sharded goes with {allowed or f'no {name}'}, found {name} = {getattr(self, name)}"
                )


@dataclass(frozen=True)
class ComparisonOptions(Options):
    """The options that only `hetxl compare` has."""

    section: ClassVar[str] = "comparison"

    baselines: bool = option(False, "Also train an ensemble, MC dropout, Laplace and label smoothing.")
    members: int = option(5, "Number of DET runs in the ensemble.", least=2)

    def _check(self) -> None:
        if self.members != 5 and not self.baselines:
            raise ValueError(f"members is {self.members} and baselines off; add --baselines, or leave members out")


@dataclass(frozen=True)
class CompareConfig(ComparisonOptions, TrainConfig):
    """The options of a comparison: those of its runs, and those of the comparison itself."""

    def run_options(self) -> TrainConfig:
        """Return the options of a run."""
        return TrainConfig(**{spec.name: getattr(self, spec.name) for spec in dataclasses.fields(TrainConfig)})


# ---- contrastive learning


@dataclass(frozen=True)
class PairOptions(SourceOptions):
    """Pairs of images and texts, and swaps between them."""

    data: str = option(
        "icons", "icons (options as in icons:held_out=phosphor), or the path of a directory, a manifest or arrays."
    )
    data_seed: int = option(0, "Seed for swaps, and for splitting data that has no splits.", least=0)
    image_size: int | None = option(
        None, "Height and width that images from files are resized to [the image tower's, or 64].", least=8
    )
    swap: float = option(0.0, "Share of the training pairs whose texts are swapped with each other.", least=0, most=1)
    swap_within: bool = option(False, "Swap only within categories.")

    def _check(self) -> None:
        if self.swap_within and not self.swap:
            raise ValueError("swap_within is on and swap 0; give a share, such as --swap 0.2")


@dataclass(frozen=True)
class EmbeddingNoiseOptions(Options):
    """The contrastive loss, and the noise on the embeddings."""

    section: ClassVar[str] = "head"

    head: str = option("het-xl", "het-xl: noise on the embeddings; det: none.", ("det", "het-xl"))
    link: str = option("softmax", "softmax: CLIP's loss; sigmoid: SigLIP's.", LINKS)
    noise: str = option("both", "het-xl: towers whose embeddings have noise.", ("both", "image", "text"))
    covariance: str = option("low_rank", "Form of the covariance.", COVARIANCES)
    rank: int = option(15, "Rank R of the covariance.", least=0)
    residual: str = option("rank1", "Part of the covariance that is added to its factors.", RESIDUALS)
    noise_init: float = option(
        0.1, "Initial length of the noise, relative to the length of an embedding.", positive=True
    )
    noise_group: int = option(
        256, "Maximum number of examples that share the coefficients of a sample; 1: no sharing.", least=1
    )
    samples: int = option(1, "Number of samples S in training.", least=1)
    eval_samples: int = option(
        0, "Number of samples S of a second zero-shot evaluation, with noise; 0: only without.", least=0
    )
    normalize: str = option("before", "When embeddings are scaled to length 1.", ("before", "after", "both", "none"))
    scale_init: float | None = option(None, "Initial value of the learned scale of the logits [3; 10 for det].",
                                      positive=True)  # fmt: skip
    bias_init: float = option(-10.0, "sigmoid: initial value of the learned bias.")
    max_scale: float = option(100.0, "Upper bound of the learned scale.", positive=True)

    def _check(self) -> None:
        if self.scale_init is not None and self.scale_init > self.max_scale:
            raise ValueError(f"scale_init must be at most max_scale = {self.max_scale:g}, found {self.scale_init:g}")

    @property
    def noise_side(self) -> str:
        """Return the embeddings that have noise; none for DET."""
        return "none" if self.head == "det" else self.noise


@dataclass(frozen=True)
class TowerOptions(Options):
    """The image tower, the text tower and the prompts."""

    section: ClassVar[str] = "towers"

    features: int = option(128, "Size D of the embeddings.", least=1)
    image: str = option("cnn", f"Image tower: {', '.join(IMAGE_TOWERS)}. Data with vectors needs none.")
    image_lock: str = option(
        "free", "free: trained; locked: not trained (LiT); mapped: locked, and its vectors are computed once.", LOCKS
    )
    image_weights: str = option("published", "published, random, or a .safetensors file of the tower's library.")
    width: int = option(8, "cnn: channels of the first stage, a multiple of 8.", least=8)
    depth: int = option(1, "cnn: blocks per stage.", least=1)
    text: str = option("ngrams", f"Text tower: {', '.join(TEXT_TOWERS)}.")
    text_lock: str = option("free", "As --image-lock; encoders from other packages are always mapped.", LOCKS)
    text_weights: str = option("published", "As --image-weights.")
    text_length: int = option(64, "hf: maximum number of tokens per text; longer texts are cut.", least=1)
    projections: str = option("both", "Towers that get a trained linear projection.", ("both", "image", "text"))
    buckets: int = option(16384, "ngrams: number of buckets for hashed character n-grams.", least=1)
    embedding: int = option(128, "ngrams: size of the n-gram embeddings.", least=1)
    text_width: int = option(256, "ngrams: width of the hidden layers.", least=1)
    text_depth: int = option(1, "ngrams: number of hidden layers.", least=1)
    dropout: float = option(0.0, "ngrams: dropout rate after every hidden layer.", least=0, below=1)
    templates: str = option(
        "{}",
        "Prompt templates separated by |, such as '{}|an icon of {}', or a file of them. Training picks one at random.",
    )

    def _check(self) -> None:
        if self.width % 8:
            raise ValueError(f"width must be a multiple of 8, found {self.width}")
        for side, known in (("image", IMAGE_TOWERS), ("text", TEXT_TOWERS)):
            name = getattr(self, side)
            library, _, model = name.partition(":")
            if name not in known and not (model and f"{library}:" in "".join(known)):
                raise ValueError(f"{side} must be one of {', '.join(known)}, found {name!r}{_near(name, known)}")
        for template in self.prompts:
            if template.count("{}") != 1:
                raise ValueError(f"templates must hold {{}} once each, where the text goes, found {template!r}")

    @property
    def prompts(self) -> tuple[str, ...]:
        """The templates as a tuple."""
        return read_templates(self.templates)


def read_templates(text: str) -> tuple[str, ...]:
    """Return prompts separated by |, or those of a file, one per line or a JSON list; {c} means {}."""
    lines = text.split("|")
    if text.endswith((".txt", ".json")):
        try:
            content = Path(text).expanduser().read_text(encoding="utf-8")
            lines = (
                json.loads(content) if text.endswith(".json") else filter(None, map(str.strip, content.splitlines()))
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"templates: {text} cannot be read as a file of templates: {error}") from None
    return tuple(str(line).replace("{c}", "{}") for line in lines)


@dataclass(frozen=True)
class PairOptimOptions(OptimOptions):
    """Optimisation of two towers, with other defaults and a learning rate for the scale."""

    recipe: str | None = option(None, "Use the options of this recipe as defaults; hetxl recipes lists all.")
    accumulate: int = option(
        1, "Number of parts that a batch is split into for the towers; the loss sees the whole batch.", least=1
    )
    ema: float = option(
        0.0, "Decay of a moving average of the weights, which evaluation uses; 0: off.", least=0, below=1
    )
    epochs: float = option(7.0, "Number of epochs.", least=0)  # pyright: ignore[reportIncompatibleVariableOverride]
    batch_size: int = option(256, "Pairs per optimiser step, over all processes.", least=2)
    learning_rate: float = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        1.6e-2, "Peak learning rate; the default suits small towers trained from scratch.", positive=True
    )
    noise_learning_rate: float = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        0.01, "Learning rate of the covariance, as a multiple of --learning-rate.", least=0
    )
    scale_learning_rate: float = option(
        10.0, "Learning rate of the logits' scale and bias, as a multiple of --learning-rate.", least=0
    )
    weight_decay: float = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        0.01, "Decoupled weight decay, except on the scale, biases and norms.", least=0
    )
    precision: str = option(
        "float32", "Precision of the towers' matrix products in training.", ("float32", "bfloat16", "float16")
    )
    seed: int = option(0, "Seed for the initial weights, the order of the pairs and all noise.", least=0)

    def _check(self) -> None:
        if self.batch_size % self.accumulate:
            sizes = f"{self.batch_size} and {self.accumulate}"
            raise ValueError(f"batch_size must be a multiple of accumulate, found {sizes}")


@dataclass(frozen=True)
class PairOutputOptions(OutputOptions):
    """Output of a contrastive run, with the number of pairs per evaluation."""

    out: str | None = option(None, "Directory of the run [runs/contrastive-DATA-HEAD].")
    evaluate_every: int | None = option(None, "Steps between evaluations [a fifth of the run].", least=1)
    keep: int = option(2, "Number of recent checkpoints to keep.", least=1)
    evaluation_pairs: int = option(2000, "Number of validation pairs per evaluation; 0: all.", least=0)


@dataclass(frozen=True)
class ContrastiveConfig(
    PairOutputOptions, ParallelOptions, PairOptimOptions, TowerOptions, EmbeddingNoiseOptions, PairOptions
):
    """All options of a contrastive run, saved with the run as `config.json`."""

    patience: ClassVar[int] = 0  # the training loop reads it from every configuration

    def _check(self) -> None:
        if self.data_parallel == "fsdp" and self.ema:
            raise ValueError("data_parallel = fsdp goes without ema; use data_parallel = ddp")


RunConfig = TrainConfig | ContrastiveConfig
"""The configuration of a run, of either task."""
Config = typing.TypeVar("Config", TrainConfig, ContrastiveConfig)


# ---- checks


@functools.cache  # reading hints takes milliseconds, and studies create hundreds of configurations
def option_types(cls: type[Options]) -> dict[str, tuple[type, bool]]:
    """Return the type of every option, and whether it may be None."""
    kinds = {}
    for name, hint in typing.get_type_hints(cls).items():
        optional = isinstance(hint, types.UnionType)
        kinds[name] = (next(kind for kind in hint.__args__ if kind is not type(None)) if optional else hint, optional)
    return kinds


def _coerced(name: str, value: Any, expected: tuple[type, bool]) -> Any:
    """Convert a value to its type; numbers may change their type if nothing is lost."""
    kind, optional = expected
    if value is None and optional:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and name == "temperature" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        required = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}
        raise ValueError(f"{name} must be {required[kind.__name__]}, found {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, found {value}")
    return value


def _check_bounds(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise if a value is not one of its option's choices, or is out of bounds."""
    choices, least, most, below = (metadata[key] for key in ("choices", "least", "most", "below"))
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, found {value!r}{_near(value, choices)}")
    if metadata["positive"] and not value > 0:
        raise ValueError(f"{name} must be positive, found {value}")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}], found {value}")
    if below is not None and not least <= value < below:
        raise ValueError(f"{name} must be in [{least}, {below}), found {value}")
    if least is not None and not value >= least:
        raise ValueError(f"{name} must be at least {least}, found {value}")


def _near(name: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
