"""The options of a training: one flat set of names, which are also the flags of the command line and the keys of a TOML
file, there under the section that each belongs to."""

import dataclasses
import difflib
import functools
import importlib
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl.data.label_noise import KINDS

if typing.TYPE_CHECKING:
    from typing_extensions import Self

BACKBONES = ("auto", "none", "mlp", "cnn", "timm:NAME", "hf:NAME")
CLASSIFIERS = ("linear", "sampled", "retrieved")
TEMPERATURE_METHODS = ("train", "gradient", "bilevel")
SECTIONS = ("data", "head", "backbone", "training", "output")


def option(default: Any, section: str, help: str, choices: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> Any:
    """A field with what a reader of `--help` sees; `also` are further names of its flag."""
    return field(default=default, metadata={"section": section, "help": help, "choices": choices, "also": also})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on; it is saved with the run as `config.json`."""

    data: str = option(
        "pycode", "data", "pycode, synthetic, words, glyphs, wordnet (with options as in synthetic:noise=2), or a path."
    )
    labels: str | None = option(None, "data", "File with the labels, when they are not beside the features.")
    validation: str | None = option(None, "data", "Data of the validation split, when it is apart.")
    test: str | None = option(None, "data", "Data of the test split, when it is apart.")
    data_seed: int = option(0, "data", "Of the split, where the data has none, and of built-in data.")
    label_noise: str = option("none", "data", "Replace training labels by wrong ones.", ("none", *KINDS))
    label_noise_rate: float = option(0.0, "data", "Share of the training labels to replace.", also=("--rate",))
    image_size: int = option(224, "data", "Height and width that pictures are brought to.")
    workers: int = option(2, "data", "Processes that decode pictures.")

    head: str = option("het-xl", "head", "The head.", ("det", "het", "het-h", "het-xl"))
    link: str = option("auto", "head", "auto: sigmoid for several labels an example.", ("auto", "softmax", "sigmoid"))
    classifier: str = option(
        "linear", "head", "Behind the head; sampled and retrieved train on few classes a step.", CLASSIFIERS
    )
    negatives: int = option(1024, "head", "Classes drawn for a batch: sampled; retrieved: beside the neighbours.")
    neighbours: int = option(32, "head", "Retrieved: classes that an example brings.")
    rank: int = option(50, "head", "R, rank of the covariance.")
    covariance: str = option("efficient", "head", "Its form.", ("efficient", "low_rank", "diagonal", "full"))
    residual: str = option("rank1", "head", "What it has beside its factors.", ("rank1", "diagonal"))
    noise_init: float = option(0.1, "head", "Scale of the noise at the start; 1 for that of the paper's authors.")
    noise_scale: float = option(1.0, "head", "Factor of the noise outside training; 0 leaves it out.")
    noise_features: int | None = option(None, "head", "HET-XL: size M of a noise space of its own.")
    buckets: int | None = option(None, "head", "HET-H: buckets H [D].")
    temperature: str = option(
        "auto", "head", "τ: a number, or learned; auto: by the data's size and the steps, else 1."
    )
    temperature_init: float = option(1.0, "head", "Where a learned τ starts; in the paper in the middle, 2.525.")
    temperature_low: float = option(0.05, "head", "Lower bound of a learned τ.")
    temperature_high: float = option(5.0, "head", "Upper bound of a learned τ.")
    train_samples: int = option(4, "head", "S in training.")
    eval_samples: int = option(256, "head", "S in evaluation and prediction.")
    sampler: str = option(
        "orthogonal", "head", "Where normals come from.", ("iid", "antithetic", "orthogonal", "sobol")
    )
    bias_init: float | None = option(
        None, "head", "Start of the classifier's bias [as nn.Linear's; −10 for the sigmoid link]."
    )

    backbone: str = option("auto", "backbone", f"{', '.join(BACKBONES)}; auto: none, mlp for tokens, cnn for pictures.")
    features: int | None = option(None, "backbone", "D that mlp and cnn give [128; cnn 256].")
    width: int | None = option(None, "backbone", "Hidden width of mlp, channels of cnn's first stage [512; 32].")
    depth: int = option(2, "backbone", "Hidden layers of mlp; blocks in each stage of cnn.")
    embedding: int = option(64, "backbone", "Size of a token's embedding.")
    dropout: float = option(0.0, "backbone", "Dropout of mlp.")
    normalize_features: bool = option(False, "backbone", "Bring every example's features to the length √D.")
    frozen: bool = option(False, "backbone", "Train the head alone; features are computed once.")
    pretrained: bool = option(True, "backbone", "timm and hf: start from published weights.")

    steps: int | None = option(None, "training", "Optimiser steps; instead of --epochs.")
    epochs: float | None = option(
        None,
        "training",
        "Passes over the training data [1, or what makes 1,000 steps, at most 50 unless for 500 of a head alone].",
    )
    batch_size: int = option(256, "training", "Examples of an optimiser step, over all processes.")
    accumulate: int = option(1, "training", "Parts that a process does its share of a batch in.")
    learning_rate: float = option(1e-3, "training", "Peak learning rate of AdamW.")
    noise_learning_rate: float = option(1.0, "training", "Learning rate of the covariance, as a multiple.")
    temperature_learning_rate: float = option(0.1, "training", "Learning rate of a learned τ, as a multiple.")
    temperature_hold: float = option(0.0, "training", "Share of the steps for which a learned τ stays at its start.")
    temperature_prior: float = option(0.0, "training", "Weight of the penalty (log τ)² on a learned τ.")
    temperature_method: str = option(
        "train", "training", "What a learned τ follows: the loss of training, or of validation.", TEMPERATURE_METHODS
    )
    temperature_held_out: float = option(
        0.0, "training", "Share of each batch that gradient and bilevel validate on; 0: the validation split."
    )
    warmup: float = option(0.05, "training", "Steps of linear warm-up; below 1 a share of all steps.")
    warmup_from: float = option(1e-5, "training", "Learning rate that warm-up starts from.")
    schedule: str = option("cosine", "training", "Decay to zero.", ("linear", "cosine", "constant"))
    weight_decay: float = option(0.01, "training", "Decoupled weight decay; none on τ, biases and norms.")
    noise_weight_decay: float | None = option(None, "training", "Weight decay of the covariance [as weight_decay].")
    beta1: float = option(0.9, "training", "AdamW's first decay rate.")
    beta2: float = option(0.999, "training", "AdamW's second decay rate.")
    clip: float = option(1.0, "training", "Largest norm of the gradient; 0 for no limit.")
    precision: str = option("float32", "training", "Of the products.", ("float32", "bfloat16", "float16"))
    ema: float = option(0.0, "training", "Decay of a moving average of the weights, used in evaluation; 0 for none.")
    label_smoothing: float = option(0.0, "training", "Share of the target spread over all classes (softmax).")
    patience: int = option(0, "training", "Stop after this many evaluations without a better validation NLL; 0: never.")
    seed: int = option(0, "training", "Of the initial weights, the order of the data and all noise.")
    device: str = option("auto", "training", "cpu, cuda, mps, …; auto takes an accelerator if there is one.")

    out: str | None = option(None, "output", "Directory of the run [runs/DATA-HEAD].")
    evaluate_every: int | None = option(None, "output", "Steps between evaluations [a tenth of the run].")
    evaluation_examples: int = option(5000, "output", "Validation examples of those evaluations; 0 for all.")
    test_examples: int = option(0, "output", "Test examples of the last evaluation; 0 for all.")
    checkpoint_every: int | None = option(None, "output", "Steps between checkpoints [as evaluations].")
    keep: int = option(2, "output", "How many of the last checkpoints to keep, beside the best.")
    log_every: int = option(10, "output", "Steps between lines of log.jsonl.")
    tensorboard: bool = option(False, "output", "Also write TensorBoard's event files.")

    def __post_init__(self):
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            object.__setattr__(self, spec.name, _coerced(spec.name, value, _type_of(spec.name)))
            allowed = spec.metadata["choices"]
            if allowed and value not in allowed:
                raise ValueError(
                    f"{spec.name} must be one of {', '.join(allowed)}, found {value!r}{_near(value, allowed)}"
                )
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, found {value}")
        for name in ("ema", "label_smoothing", "dropout", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), found {getattr(self, name)}")
        for name in ("learning_rate", "noise_init", "temperature_init", "temperature_low", "temperature_high"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
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
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size must be a multiple of accumulate, found {self.batch_size} and {self.accumulate}"
            )
        for name in ("label_noise_rate", "temperature_hold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], found {getattr(self, name)}")
        if self.label_noise != "none" and not self.label_noise_rate:
            raise ValueError(f"label_noise is {self.label_noise!r} and label_noise_rate 0; give a rate, such as 0.2")
        if self.label_noise == "none" and self.label_noise_rate:
            raise ValueError(
                f"label_noise_rate is {self.label_noise_rate} and label_noise none; choose {', '.join(KINDS)}"
            )
        if self.classifier != "linear":
            self._check_classifier()
        if self.temperature_method != "train":
            self._check_temperature_method()
        elif self.temperature_held_out:
            raise ValueError(
                f"temperature_held_out is {self.temperature_held_out:g} and temperature_method train; choose gradient "
                "or bilevel"
            )
        if self.label_smoothing and self.link == "sigmoid":
            raise ValueError("label_smoothing is for the softmax link; leave it out with link = sigmoid")

    def _check_classifier(self) -> None:
        """Refuse what needs all classes at every step."""
        if self.head not in ("det", "het-xl") or self.noise_features is not None:
            found = f"head = {self.head}" + ("" if self.noise_features is None else " with noise_features")
            raise ValueError(
                f"classifier = {self.classifier} goes with head = det, or het-xl without noise_features, found {found}"
            )
        if self.label_smoothing:
            raise ValueError(f"label_smoothing needs all classes; leave it out with classifier = {self.classifier}")

    def _check_temperature_method(self) -> None:
        """Refuse what a τ that follows another loss cannot go with."""
        if self.temperature != "learned":
            raise ValueError(
                f"temperature_method = {self.temperature_method} needs temperature = learned, found {self.temperature}"
            )
        if not 0 <= self.temperature_held_out < 1:
            raise ValueError(f"temperature_held_out must be in [0, 1), found {self.temperature_held_out}")
        if self.precision == "float16":
            raise ValueError(
                f"temperature_method = {self.temperature_method} goes with precision = float32 or bfloat16, "
                "found float16"
            )
        if self.temperature_method == "bilevel" and self.classifier != "linear":
            raise ValueError(f"temperature_method = bilevel needs classifier = linear, found {self.classifier}")

    def to_dict(self) -> dict[str, Any]:
        """Sections of options, as in a TOML file."""
        values = dataclasses.asdict(self)
        return {name: {key: values[key] for key, at in section_of().items() if at == name} for name in SECTIONS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "configuration") -> "Self":
        """From options, in their sections or not; a key that does not exist is an error that names the nearest."""
        return cls(**flatten(values, where))

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_AT_LEAST: dict[str, float] = {
    "image_size": 8, "workers": 0, "rank": 0, "train_samples": 1, "eval_samples": 1, "features": 1, "width": 1,
    "depth": 1, "embedding": 1, "steps": 1, "epochs": 0, "batch_size": 1, "accumulate": 1, "warmup": 0,
    "warmup_from": 0, "weight_decay": 0, "clip": 0, "patience": 0, "seed": 0, "data_seed": 0, "evaluate_every": 1,
    "evaluation_examples": 0, "test_examples": 0, "checkpoint_every": 1, "keep": 1, "log_every": 1,
    "temperature_learning_rate": 0, "buckets": 1, "noise_features": 1, "noise_learning_rate": 0,
    "noise_weight_decay": 0, "noise_scale": 0, "temperature_prior": 0, "negatives": 1, "neighbours": 1,
}  # fmt: skip


def section_of() -> dict[str, str]:
    """The section of every option."""
    return {spec.name: spec.metadata["section"] for spec in dataclasses.fields(TrainConfig)}


@functools.cache  # reading all hints takes milliseconds, and studies make hundreds of configurations
def _type_of(name: str) -> tuple[type, bool]:
    """The type of an option, and whether it may be None."""
    hint = typing.get_type_hints(TrainConfig)[name]
    if isinstance(hint, types.UnionType):
        return next(kind for kind in hint.__args__ if kind is not type(None)), True
    return hint, False


def _coerced(name: str, value: Any, expected: tuple[type, bool]) -> Any:
    """The value as its type; numbers may be written either way where nothing is lost."""
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
        wanted = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false"}[kind.__name__]
        raise ValueError(f"{name} must be {wanted}, found {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, found {value}")
    return value


def _near(name: object, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def flatten(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options without their sections, every name checked."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must hold sections of options, found {type(values).__name__}")
    sections = section_of()
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
        elif name in SECTIONS:
            for key, inner in value.items():
                take(key, inner, name)
        else:
            raise ValueError(f"unknown section [{name}] in {where}{_near(name, SECTIONS)}")
    return flat


def read_toml(path: Path) -> dict[str, Any]:
    """The options of a TOML file, names checked."""
    # Python 3.10 has no TOML reader of its own.
    tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ValueError(f"--config {path}: no such file") from None
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not valid TOML: {error}") from None
    return flatten(values, str(path))
