"""The grid of heads that many tests run over."""

import torch

from hetxl.nn import HEADS, Head, build_head
from hetxl.registry import COVARIANCES, LINKS, RESIDUALS

__all__ = ["COVARIANCES", "GRID", "LINKS", "NOISY_GRID", "RESIDUALS", "VARIANTS", "make", "normals", "targets_for"]

VARIANTS = {name: (name, {}) for name in HEADS} | {"het-xl-own": ("het-xl", {"noise_features": 3})}
"""The four heads, and HET-XL with its own projection."""

NOISY_GRID = [
    (variant, covariance, residual)
    for variant in VARIANTS
    for covariance in COVARIANCES
    for residual in RESIDUALS
    if variant != "det" and (covariance != "full" or residual == "rank1")
]
"""Every head with noise, covariance and residual that differ: `full` takes no residual."""
GRID = [("det", "efficient", "rank1"), *NOISY_GRID]
"""The same with DET, which has neither covariance nor residual."""


def make(variant: str, features: int = 5, classes: int = 7, *, dtype: torch.dtype = torch.float64, **options) -> Head:
    """A small head of a variant, in double precision unless stated."""
    name, extra = VARIANTS[variant]
    return build_head(name, features, classes, dtype=dtype, **({"rank": 2} | extra | options))


def normals(head: Head, *batch: int, samples: int = 4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normals of the shape the head takes, [*batch, samples, Q]."""
    size = 0 if head.covariance is None else head.covariance.size
    return torch.randn(*batch, samples, size, dtype=dtype)


def targets_for(head: Head, *batch: int) -> torch.Tensor:
    """Class ids for the softmax, 0/1 rows for the sigmoid."""
    if head.link == "softmax":
        return torch.randint(head.num_classes, batch)
    return torch.randint(2, (*batch, head.num_classes)).double()
