"""The grid of heads that many tests run over."""

import torch

from hetxl.nn import HEADS, Head, build_head

LINKS = ("softmax", "sigmoid")
COVARIANCES = ("efficient", "low_rank", "diagonal", "full")
RESIDUALS = ("rank1", "diagonal")

VARIANTS = {name: (name, {}) for name in HEADS} | {"het-xl-own": ("het-xl", {"noise_features": 3})}
"""The four heads, and HET-XL with its own projection."""


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
