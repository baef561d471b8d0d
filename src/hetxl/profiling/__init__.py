"""The cost of a head: its parameters, counted on modules without data, and its training memory."""

from hetxl.profiling.backbones import PRESETS, Backbone, build_backbone
from hetxl.profiling.parameters import (
    HeadParameters,
    HeadRow,
    ParameterCount,
    TrainingBytes,
    compare_heads,
    count_head,
    count_parameters,
    format_bytes,
    format_count,
)

__all__ = [
    "PRESETS",
    "Backbone",
    "HeadParameters",
    "HeadRow",
    "ParameterCount",
    "TrainingBytes",
    "build_backbone",
    "compare_heads",
    "count_head",
    "count_parameters",
    "format_bytes",
    "format_count",
]
