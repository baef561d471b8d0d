"""The names that options and tables have, each written once: heads, covariances, residuals, links, samplers, metrics.

Everything that offers a choice reads it here: constructors, `hetxl.convert`, the command line, reports and studies.
A new head needs its class in `hetxl.nn.heads` and its entry in `HEAD_ENTRIES`; a new metric its line in
`hetxl.metrics.summarise` and, to be in tables, its entry in `METRIC_ENTRIES`. Nothing here loads torch.
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
"""The defaults of τ, R and S through every door: heads, `hetxl.convert`, the command, scikit-learn and Lightning. 256
orthogonal samples are as exact as the paper's 1,000 independent ones unless the noise is large (docs/methods.md)."""


@dataclass(frozen=True)
class HeadEntry:
    """A head as options, tables and files know it.

    Attributes:
        name: what options and commands call it.
        label: what tables and reports call it.
        class_name: its class in `hetxl.nn`.
        options: arguments that its constructor has beside those of all heads.
        noise: whether it samples; False for DET, to which the options of the noise mean nothing.
        lift: how noise becomes logits: "product" by a matrix, "copy" without one.
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
    """A metric as tables show it."""

    name: str  # its key in `hetxl.metrics.summarise` and in result.json
    title: str
    better: Literal["lower", "higher"]
    percent: bool = False  # whether it is a share, shown in percent
    digits: int = 2  # decimals


METRIC_ENTRIES = (
    MetricEntry("precision@1", "accuracy", "higher", percent=True),
    MetricEntry("precision@5", "precision@5", "higher", percent=True),
    MetricEntry("calibration_error", "calibration error", "lower", percent=True),
    MetricEntry("brier", "Brier", "lower", digits=4),
)
"""What tables of heads show beside NLL, in their order."""
METRIC_NAMES = ("nll", *(entry.name for entry in METRIC_ENTRIES))
