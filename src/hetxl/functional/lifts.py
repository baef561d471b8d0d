"""Step 2 of every head, **lift**: the linear map from the noise space [..., N] to the logits [..., K].

| head | lift |
| --- | --- |
| HET | identity, N = K |
| HET-H | indexing by the hash h(k), N = H |
| HET-XL | the classifier's own weight W, N = D |
| HET-XL with its own projection | W′, N = M |

Because a lift is linear, the basis can be lifted before it is mixed into samples. Each lift also computes the variance
of every logit, and the covariance of a few logits, without the basis of all classes, [..., Q, K].
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl._seeds import GOLDEN, splitmix64
from hetxl.functional._torch import slices, to_accumulation_dtype
from hetxl.functional.noise import GaussianNoise, added

ELEMENTS = 2**22  # block size of the lifted basis when only its squares are needed

LiftKind = Literal["identity", "hash", "classifier", "projection"]


class Lift(Protocol):
    """A linear map from noise space to logit space, with its `kind`, one of four."""

    kind: ClassVar[LiftKind]

    def __call__(self, noise: Tensor) -> Tensor:
        """Lift noise [..., N] to all classes, [..., K]."""
        ...

    def variance(self, noise: GaussianNoise) -> Tensor:
        """Return the variance of each logit, [..., K]: `self(noise.basis()).square().sum(-2)`."""
        ...

    def covariance(self, noise: GaussianNoise, classes: Tensor) -> Tensor:
        """Return the covariance [..., k, k] of the logits of the given classes [..., k] of each example."""
        ...


@dataclass(frozen=True, eq=False)
class IdentityLift:
    """HET: the noise lives on the logits (Eq. heteroscedastic_probs)."""

    kind: ClassVar[LiftKind] = "identity"

    def __call__(self, noise: Tensor) -> Tensor:
        """[..., K] → [..., K]."""
        return noise

    def variance(self, noise: GaussianNoise) -> Tensor:
        """[..., K]"""
        return noise.variance()

    def covariance(self, noise: GaussianNoise, classes: Tensor) -> Tensor:
        """[..., k, k] among classes [..., k]."""
        return noise.covariance_among(classes)


@dataclass(frozen=True, eq=False)
class HashLift:
    """HET-H: class k reads the noise of its bucket h(k); Hᵀε by indexing, never as a matrix (Eq. het_hashing)."""

    buckets: Tensor  # [K], h(k) in 0 … H − 1

    kind: ClassVar[LiftKind] = "hash"

    def __call__(self, noise: Tensor) -> Tensor:
        """[..., H] → [..., K]."""
        return noise.index_select(-1, self.buckets)

    def variance(self, noise: GaussianNoise) -> Tensor:
        """[..., K]"""
        return self(noise.variance())

    def covariance(self, noise: GaussianNoise, classes: Tensor) -> Tensor:
        """[..., k, k] among classes [..., k]; those of one bucket share its noise."""
        return noise.covariance_among(self.buckets[classes])


@dataclass(frozen=True, eq=False)
class LinearLift:
    """HET-XL with a projection W′ of its own (Eq. het_xl_ind_d)."""

    weight: Tensor  # [K, N]

    kind: ClassVar[LiftKind] = "projection"

    def __call__(self, noise: Tensor) -> Tensor:
        """[..., N] → [..., K]."""
        # The noise may come from an autocast region that has ended.
        return F.linear(noise.to(self.weight.dtype), self.weight)

    def variance(self, noise: GaussianNoise) -> Tensor:
        """[..., K], by blocks of classes, since a diagonal residual has more rows than there are features."""
        noise = noise.accumulated()
        spread = noise.residual if noise.residual_kind == "diagonal" else None
        rows = noise if spread is None else replace(noise, residual=None)
        basis = None if rows.size == 0 else rows.basis()  # [..., R or Q, N]
        step = max(1, ELEMENTS // max(1, 0 if basis is None else basis[..., 0].numel()))
        variances = []
        for classes in slices(self.weight.shape[0], step):
            weight = to_accumulation_dtype(self.weight[classes])
            parts = []
            if basis is not None:
                parts.append(F.linear(basis.to(weight.dtype), weight).square().sum(-2))
            if spread is not None:
                parts.append(F.linear(spread.square().to(weight.dtype), weight.square()))
            variances.append(added(parts))
        return torch.cat(variances, -1)

    def covariance(self, noise: GaussianNoise, classes: Tensor) -> Tensor:
        """[..., k, k] among classes [..., k], reading k rows of the weight for each example."""
        seen = noise.project(to_accumulation_dtype(self.weight[classes]))  # [..., k, Q]
        return seen @ seen.mT


class ClassifierLift(LinearLift):
    """HET-XL: the noise passes through the classifier's own W (Eq. het-xs). Its bias belongs to the mean."""

    kind: ClassVar[LiftKind] = "classifier"


def hash_classes(num_classes: int, buckets: int, seed: int = 0) -> Tensor:
    """Map every class to a bucket, the same on every platform and for every number of classes.

    The hash is splitmix64 on 64-bit integers, so it does not depend on torch's generators or the machine, and class k
    keeps its bucket when classes are added.

    Args:
        num_classes: K
        buckets: H
        seed: seed of the hash; different seeds give independent hashes.

    Returns:
        [K] int64, each in 0 … H − 1.
    """
    start = np.uint64(seed * 0xD1B54A32D192ED03 % 2**64)
    mixed = splitmix64(np.arange(num_classes, dtype=np.uint64) * np.uint64(GOLDEN) + start)
    return torch.from_numpy((mixed % np.uint64(buckets)).astype(np.int64))
