"""The names used in options and tables, defined once: heads, covariances, residuals, links, samplers, metrics.

Constructors, `hetxl.convert`, the command line, reports and studies read their choices here. A new head needs a class
in `hetxl.nn.heads` and an entry in `HEAD_ENTRIES`. A new metric needs a line in `hetxl.metrics.summarise`, and an entry
in `METRIC_ENTRIES` to appear in tables. This module does not import torch.
"""

from dataclasses import dataclass
from typing import Literal, get_args

CovarianceName = Literal["efficient", "low_rank", "diagonal", "full"]
Residual = Literal["rank1", "diagonal"]
Link = Literal["softmax", "sigmoid"]
SamplerName = Literal["iid", "antithetic", "orthogonal", "sobol"]

COVARIANCES: tuple[CovarianceName, ...] = get_args(CovarianceName)
RESIDUALS: tuple[Residual, ...] = get_args(Residual)
LINKS: tuple[Link, ...] = get_args(Link)
SAMPLER_NAMES: tuple[SamplerName, ...] = get_args(SamplerName)

TEMPERATURE = 1.0
RANK = 50
TRAIN_SAMPLES = 16
EVAL_SAMPLES = 256
"""The defaults of τ, R and S in heads, `hetxl.convert`, the command, scikit-learn and Lightning. 256 orthogonal samples
are as accurate as the paper's 1,000 independent ones unless the noise is large (docs/methods.md)."""


@dataclass(frozen=True)
class HeadEntry:
    """The names and options of a head.

    Attributes:
        name: name in options and commands.
        label: name in tables and reports.
        class_name: name of its class in `hetxl.nn`.
        options: constructor arguments in addition to those of all heads.
        noise: whether it samples; False for DET, where options of the noise have no effect.
        lift: how noise becomes logits: "product" with a matrix, or "copy" without one.
    """

    name: str
    label: str
    class_name: str
    options: tuple[str, ...] = ()
    noise: bool = True
    lift: Literal["product", "copy"] = "product"


HEAD_ENTRIES = (
    HeadEntry("det", "DET", "DetHead", noise=False),
    HeadEntry("het", "HET", "HetHead", lift="copy"),
    HeadEntry("het-h", "HET-H", "HetHashHead", options=("buckets", "hash_seed"), lift="copy"),
    HeadEntry("het-xl", "HET-XL", "HetXLHead", options=("noise_features",)),
)
"""All heads, in the order of the paper's tables."""
HEAD_NAMES = tuple(entry.name for entry in HEAD_ENTRIES)
HEAD_LABELS = {entry.name: entry.label for entry in HEAD_ENTRIES}
_BY_NAME = {entry.name: entry for entry in HEAD_ENTRIES}


def head_entry(name: str) -> HeadEntry:
    """Return the entry of a head by its name, such as "het-xl"."""
    return _BY_NAME[name]


@dataclass(frozen=True)
class MetricEntry:
    """How tables show a metric."""

    name: str  # key in `hetxl.metrics.summarise` and in result.json
    title: str
    better: Literal["lower", "higher"]
    percent: bool = False  # whether it is a share, shown as a percentage
    digits: int = 2  # decimals


METRIC_ENTRIES = (
    MetricEntry("precision@1", "accuracy", "higher", percent=True),
    MetricEntry("precision@5", "precision@5", "higher", percent=True),
    MetricEntry("calibration_error", "calibration error", "lower", percent=True),
    MetricEntry("brier", "Brier", "lower", digits=4),
)
"""The metrics that tables of heads show after NLL, in order."""
METRIC_NAMES = ("nll", *(entry.name for entry in METRIC_ENTRIES))
