"""What the study of the levers varies: each lever is a few settings of one option, around HET-XL with its defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DET = "DET"
DEFAULT = "HET-XL"


@dataclass(frozen=True)
class Variant:
    """One setting of a lever, or what all of them are compared with.

    Attributes:
        label: how tables call it.
        options: of the training, beyond those of the data; HET-XL unless they name another head.
        held_out: whether τ is fitted afterwards, on validation rows that the loss is not measured on.
    """

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False


@dataclass(frozen=True)
class Lever:
    """Something that can be set.

    Attributes:
        name: as on the command line.
        what: it is.
        variants: its settings, beside DET and HET-XL with the defaults.
        apart: whether its losses are of another kind, and are compared with each other alone: the first variant is then
            what the others are measured against.
    """

    name: str
    what: str
    variants: tuple[Variant, ...]
    apart: bool = False


REFERENCES = (Variant(DET, {"head": "det"}), Variant(DEFAULT))
"""In every table."""

LEARNED: dict[str, Any] = {"temperature": "learned"}
FAST: dict[str, Any] = {**LEARNED, "temperature_learning_rate": 1.0}
"""τ learned like the other parameters, which overfits where a model can: what a hold or a prior is to mend."""


def _settings(option: str, *values: Any, label: str = "{}", **more: Any) -> tuple[Variant, ...]:
    return tuple(Variant(label.format(value), {**more, option: value}) for value in values)


LEVERS: dict[str, Lever] = {
    lever.name: lever
    for lever in (
        Lever("noise-init", "scale of the noise at the start", _settings("noise_init", 0.01, 0.03, 0.3, 1.0)),
        Lever(
            "noise-learning-rate",
            "learning rate of the covariance, as a multiple of that of the rest",
            _settings("noise_learning_rate", 0.1, 0.3, 3.0, 10.0),
        ),
        Lever("noise-weight-decay", "weight decay of the covariance", _settings("noise_weight_decay", 0.0, 0.1, 1.0)),
        Lever(
            "temperature-init",
            "where a learned τ starts; in the paper at 2.525",
            _settings("temperature_init", 0.5, 1.0, 1.25, 2.525, label="learned from {}", **LEARNED),
        ),
        Lever(
            "temperature-learning-rate",
            "learning rate of a learned τ, as a multiple of that of the rest",
            _settings("temperature_learning_rate", 0.01, 0.1, 1.0, label="learned at {}", **LEARNED),
        ),
        Lever(
            "temperature-prior",
            "weight of a penalty (log τ)² on a τ that is learned like the rest",
            (
                Variant("learned, no prior", FAST),
                *_settings("temperature_prior", 0.01, 0.1, 1.0, label="learned, prior {}", **FAST),
            ),
        ),
        Lever(
            "temperature-hold",
            "share of the steps for which a τ that is learned like the rest stays at 1; warm-up takes 0.05",
            (
                Variant("learned, not held", FAST),
                *_settings("temperature_hold", 0.05, 0.5, label="learned, held for {}", **FAST),
            ),
        ),
        Lever(
            "temperature-held-out",
            "a τ that is fitted after the training, on rows that were held out of it",
            (Variant("fitted on held-out rows", held_out=True),),
        ),
        Lever("samples", "S in training", _settings("train_samples", 1, 2, 8, 16)),
        Lever("rank", "R, rank of the covariance", _settings("rank", 0, 2, 5, 25, 50)),
        Lever("sampler", "where the normals come from", _settings("sampler", "iid", "antithetic", "sobol")),
        Lever(
            "features",
            "features brought to the length √D before the head",
            (
                Variant("DET, normalised", {"head": "det", "normalize_features": True}),
                Variant("HET-XL, normalised", {"normalize_features": True}),
            ),
        ),
        Lever("residual", "what the covariance has beside its factors", _settings("residual", "diagonal")),
        Lever(
            "link",
            "sigmoid instead of softmax; the loss is then a sum of binary cross-entropies",
            (
                Variant("DET, sigmoid", {"head": "det", "link": "sigmoid"}),
                Variant("HET-XL, sigmoid", {"link": "sigmoid"}),
            ),
            apart=True,
        ),
    )
}
"""By name, in the order of the tables."""
