"""The options of a contrastive training, checked; they are also the flags of `hetxl contrastive train`."""

import dataclasses
import importlib
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl.functional._checks import one_of
from hetxl.training.config import option

if typing.TYPE_CHECKING:
    from typing_extensions import Self

HEADS = ("det", "het-xl")
LABELS = {"det": "DET", "het-xl": "HET-XL"}
TEXT_TOWERS = ("ngrams", "minilm")
NORMALIZE = ("before", "after", "both", "none")
SECTIONS = ("data", "head", "towers", "training", "output")


@dataclass(frozen=True)
class ContrastiveConfig:
    """Everything that a run depends on; it is saved with the run as `config.json`."""

    data: str = option("icons", "data", "icons (options as in icons:held_out=phosphor), a folder, manifest or arrays.")
    data_seed: int = option(0, "data", "Of the split, where the data has none, and of the swaps.")
    swap: float = option(0.0, "data", "Share of the training pairs whose texts are swapped.")
    swap_within: bool = option(False, "data", "Swap within categories.")
    image_size: int = option(64, "data", "Height and width that pictures from files are brought to.")
    workers: int = option(2, "data", "Processes that decode pictures.")

    head: str = option("het-xl", "head", "het-xl has noise on the embeddings, det none.", HEADS)
    link: str = option("softmax", "head", "softmax is CLIP's loss, sigmoid SigLIP's.", ("softmax", "sigmoid"))
    noise: str = option("both", "head", "Towers that have noise (het-xl).", ("both", "image", "text"))
    covariance: str = option("low_rank", "head", "Its form.", ("low_rank", "efficient", "diagonal", "full"))
    rank: int = option(15, "head", "R, rank of the covariance.")
    residual: str = option("rank1", "head", "What it has beside its factors.", ("rank1", "diagonal"))
    noise_init: float = option(0.1, "head", "Length of the noise at the start, over that of an embedding.")
    noise_group: int = option(256, "head", "Examples that share the coefficients of a draw, at most; 1 for none.")
    samples: int = option(1, "head", "S in training.")
    eval_samples: int = option(0, "head", "S of a second zero-shot evaluation, beside that without noise; 0 for none.")
    normalize: str = option("before", "head", "When embeddings are brought to length 1.", NORMALIZE)
    scale_init: float | None = option(None, "head", "Start of the learned scale of the logits [3; det 10].")
    bias_init: float = option(-10.0, "head", "Start of the learned bias (sigmoid).")
    max_scale: float = option(100.0, "head", "Bound of the learned scale.")

    features: int = option(128, "towers", "D, size of the embeddings.")
    width: int = option(8, "towers", "Channels of the image tower's first stage, a multiple of 8.")
    depth: int = option(1, "towers", "Blocks in each of its stages.")
    text: str = option("ngrams", "towers", "The text tower; minilm is a locked sentence encoder.", TEXT_TOWERS)
    buckets: int = option(16384, "towers", "ngrams: buckets of the hashed character n-grams.")
    embedding: int = option(128, "towers", "ngrams: size of an n-gram's vector.")
    text_width: int = option(256, "towers", "ngrams: width of the hidden layers.")
    text_depth: int = option(1, "towers", "ngrams: hidden layers.")
    dropout: float = option(0.0, "towers", "ngrams: dropout after every hidden layer.")
    templates: str = option(
        "{}", "towers", "What texts are put into, with | between, as in '{}|an icon of {}': at random in training."
    )

    steps: int | None = option(None, "training", "Optimiser steps; instead of --epochs.")
    epochs: float = option(7.0, "training", "Passes over the training pairs.")
    batch_size: int = option(256, "training", "Pairs of a step, over all processes.")
    learning_rate: float = option(
        1.6e-2, "training", "Peak learning rate of AdamW; small towers that are trained from nothing take a high one."
    )
    noise_learning_rate: float = option(
        0.01, "training", "Learning rate of the covariance, as a multiple: its many weights run ahead in short runs."
    )
    scale_learning_rate: float = option(
        10.0, "training", "Learning rate of the scale and bias of the logits, as a multiple: short runs need it."
    )
    warmup: float = option(0.05, "training", "Steps of linear warm-up; below 1 a share of all steps.")
    warmup_from: float = option(1e-5, "training", "Learning rate that warm-up starts from.")
    schedule: str = option("cosine", "training", "Decay to zero.", ("linear", "cosine", "constant"))
    weight_decay: float = option(0.01, "training", "Decoupled weight decay; none on the scale, biases and norms.")
    beta1: float = option(0.9, "training", "AdamW's first decay rate.")
    beta2: float = option(0.999, "training", "AdamW's second decay rate.")
    clip: float = option(1.0, "training", "Largest norm of the gradient; 0 for no limit.")
    precision: str = option("float32", "training", "Of the towers' products.", ("float32", "bfloat16"))
    seed: int = option(0, "training", "Of the initial weights, the order of the pairs and all noise.")
    device: str = option("auto", "training", "cpu, cuda, mps, …; auto takes an accelerator if there is one.")

    out: str | None = option(None, "output", "Directory of the run [runs/contrastive-DATA-HEAD].")
    evaluate_every: int | None = option(None, "output", "Steps between evaluations [a fifth of the run].")
    evaluation_pairs: int = option(2000, "output", "Validation pairs of those evaluations; 0 for all.")
    checkpoint_every: int | None = option(None, "output", "Steps between checkpoints [as evaluations].")
    keep: int = option(2, "output", "How many of the last checkpoints to keep.")
    log_every: int = option(10, "output", "Steps between lines of log.jsonl.")
    tensorboard: bool = option(False, "output", "Also write TensorBoard's event files.")

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _checked(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
            if field.metadata["choices"]:
                one_of(field.name, value, field.metadata["choices"])
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, found {value}")
        for name in ("learning_rate", "noise_init", "scale_init", "max_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, found {value}")
        for name in ("dropout", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), found {getattr(self, name)}")
        if not 0 <= self.swap <= 1:
            raise ValueError(f"swap must be from 0 to 1, the share of pairs to swap, found {self.swap}")
        if self.swap_within and not self.swap:
            raise ValueError("swap_within is on and swap 0; give a share, such as --swap 0.2")
        if self.scale_init is not None and self.scale_init > self.max_scale:
            raise ValueError(f"scale_init must be at most max_scale = {self.max_scale:g}, found {self.scale_init:g}")
        if self.width % 8:
            raise ValueError(f"width must be a multiple of 8, found {self.width}")
        for template in self.prompts:
            if template.count("{}") != 1:
                raise ValueError(f"templates must hold {{}} once each, where the text goes, found {template!r}")

    @property
    def prompts(self) -> tuple[str, ...]:
        """The templates, one by one."""
        return tuple(self.templates.split("|"))

    @property
    def noise_side(self) -> str:
        """Which queries have noise: none for DET."""
        return "none" if self.head == "det" else self.noise

    def to_dict(self) -> dict[str, Any]:
        """Sections of options."""
        found: dict[str, Any] = {name: {} for name in SECTIONS}
        for field in dataclasses.fields(self):
            found[field.metadata["section"]][field.name] = getattr(self, field.name)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "configuration") -> "Self":
        """From options, in their sections or not; a key that does not exist is an error that names the nearest."""
        return cls(**cls.flatten(values, where))

    @classmethod
    def flatten(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Options without their sections, every name checked."""
        known = [field.name for field in dataclasses.fields(cls)]
        flat: dict[str, Any] = {}
        for name, value in values.items():
            # `data` and `head` are sections and options: a table is the section.
            if isinstance(value, Mapping):
                one_of(f"a section of {where}", name, SECTIONS)
            for key, inner in (value if isinstance(value, Mapping) else {name: value}).items():
                one_of(f"a key of {where}", key, known)
                if key in flat:
                    raise ValueError(f"{key!r} is given twice in {where}; keep one")
                flat[key] = inner
        return flat

    @classmethod
    def read_toml(cls, path: Path) -> dict[str, Any]:
        """The options of a TOML file, names checked."""
        # Python 3.10 has no TOML reader of its own.
        tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"--config {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"--config {path}: not valid TOML: {error}") from None
        return cls.flatten(values, str(path))


_AT_LEAST: dict[str, float] = {
    "data_seed": 0, "image_size": 8, "workers": 0, "rank": 0, "noise_group": 1, "samples": 1, "eval_samples": 0,
    "features": 1, "width": 8, "depth": 1, "buckets": 1, "embedding": 1, "text_width": 1, "text_depth": 1, "steps": 1,
    "epochs": 0, "batch_size": 2, "noise_learning_rate": 0, "scale_learning_rate": 0, "warmup": 0, "warmup_from": 0,
    "weight_decay": 0, "clip": 0, "seed": 0,
    "evaluate_every": 1, "evaluation_pairs": 0, "checkpoint_every": 1, "keep": 1, "log_every": 1,
}  # fmt: skip


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value as its type; numbers may be written either way where nothing is lost."""
    from hetxl.training.config import _coerced

    if isinstance(hint, types.UnionType):
        return _coerced(name, value, (next(kind for kind in hint.__args__ if kind is not type(None)), True))
    return _coerced(name, value, (hint, False))
