"""Step 2 of every head, **lift**: the linear map from the noise space [..., N] to the logits [..., K].

| head | lift |
| --- | --- |
| HET | identity, N = K |
| HET-H | indexing by the hash h(k), N = H |
| HET-XL | the classifier's own weight W, N = D |
| HET-XL with its own projection | W′, N = M |

Because a lift is linear, the basis can go through it before it is mixed into samples. Each lift can also answer for a
few classes of each example, which is what covariances among the top classes need.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Lift(Protocol):
    """A linear map from noise space to logit space."""

    def __call__(self, noise: Tensor) -> Tensor:
        """Lift noise [..., N] to all classes, [..., K]."""
        ...

    def select(self, noise: Tensor, classes: Tensor) -> Tensor:
        """Lift noise [..., Q, N] to the stated classes [..., k] of each example, giving [..., Q, k]."""
        ...


def gather_classes(values: Tensor, classes: Tensor) -> Tensor:
    """Columns of values [..., Q, N] at classes [..., k], giving [..., Q, k]."""
    index = classes.unsqueeze(-2).expand(*values.shape[:-1], classes.shape[-1])
    return values.expand(*index.shape[:-1], values.shape[-1]).gather(-1, index)


@dataclass(frozen=True, eq=False)
class IdentityLift:
    """HET: the noise lives on the logits (Eq. heteroscedastic_probs)."""

    def __call__(self, noise: Tensor) -> Tensor:
        """[..., K] → [..., K]."""
        return noise

    def select(self, noise: Tensor, classes: Tensor) -> Tensor:
        """[..., Q, K] at [..., k] → [..., Q, k]."""
        return gather_classes(noise, classes)


@dataclass(frozen=True, eq=False)
class HashLift:
    """HET-H: class k reads the noise of its bucket h(k); Hᵀε by indexing, never as a matrix (Eq. het_hashing).

    Attributes:
        buckets: [K], h(k) in 0 … H − 1.
    """

    buckets: Tensor

    def __call__(self, noise: Tensor) -> Tensor:
        """[..., H] → [..., K]."""
        return noise.index_select(-1, self.buckets)

    def select(self, noise: Tensor, classes: Tensor) -> Tensor:
        """[..., Q, H] at [..., k] → [..., Q, k]."""
        return gather_classes(noise, self.buckets[classes])


@dataclass(frozen=True, eq=False)
class LinearLift:
    """HET-XL: the noise passes through W (Eq. het-xs) or a projection W′ of its own (Eq. het_xl_ind_d).

    Attributes:
        weight: [K, N]. The classifier's bias is no part of the lift: it belongs to the mean.
    """

    weight: Tensor

    def __call__(self, noise: Tensor) -> Tensor:
        """[..., N] → [..., K]."""
        return F.linear(noise, self.weight)

    def select(self, noise: Tensor, classes: Tensor) -> Tensor:
        """[..., Q, N] at [..., k] → [..., Q, k], reading k rows of the weight for each example."""
        return noise @ self.weight[classes].mT
