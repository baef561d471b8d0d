"""Distance of features to those of the training rows: one Gaussian per class, with a shared covariance."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SHRINKAGE = 0.01
"""Share of the mean variance added to that of every direction, so that no variance is 0."""
BLOCK = 2**24
"""Largest number of distances held in memory."""


@dataclass(frozen=True)
class ClassDensity:
    """Class means in whitened coordinates, where the variance around the means is the same in all directions.

    Attributes:
        means: [C, D], whitened means of the C classes that have rows.
        whitening: [D, D]; `features @ whitening` are the whitened features.
    """

    means: Tensor
    whitening: Tensor

    @torch.no_grad()
    def distance(self, features: Tensor) -> Tensor:
        """Return the squared Mahalanobis distance of features [..., D] to the nearest class mean, divided by D, [...].

            ((features.unsqueeze(-2) - means) @ inverse * (features.unsqueeze(-2) - means)).sum(-1).min(-1).values / D

        About 1 for training rows.
        """
        flat = features.reshape(-1, features.shape[-1]).to(self.whitening) @ self.whitening
        blocks = flat.split(max(1, BLOCK // len(self.means)))
        nearest = torch.cat([torch.cdist(block, self.means).square().amin(1) for block in blocks])
        return nearest.reshape(features.shape[:-1]) / features.shape[-1]

    def to(self, device: torch.device | str) -> "ClassDensity":
        """Move to another device."""
        return ClassDensity(self.means.to(device), self.whitening.to(device))


@torch.no_grad()
def fit_density(features: Iterable[Tensor], targets: Tensor, num_classes: int) -> ClassDensity:
    """Fit the density of training rows in one pass. Assign it to `head.density` for `Prediction.novelty`.

    Args:
        features: batches [b, D] of training rows.
        targets: class ids [n] of all rows, in the same order; rows with a negative id are ignored.
        num_classes: K
    """
    sums = counts = moments = None
    first = 0
    for batch in features:
        ids = targets[first : first + len(batch)].to(batch.device)
        if len(ids) != len(batch):
            raise ValueError(f"features holds more examples than targets, which has {len(targets)}")
        first += len(batch)
        rows, ids = batch[ids >= 0].double(), ids[ids >= 0]
        if sums is None or counts is None or moments is None:
            size = batch.shape[-1]
            sums, moments = rows.new_zeros(num_classes, size), rows.new_zeros(size, size)
            counts = rows.new_zeros(num_classes)
        sums.index_add_(0, ids, rows)
        counts += torch.bincount(ids, minlength=num_classes)
        moments += rows.T @ rows
    if first != len(targets):
        raise ValueError(f"features holds {first} examples and targets {len(targets)}")
    if sums is None or counts is None or moments is None or not counts.any():
        raise ValueError(f"targets must hold at least one example with a label, found none among {first}")
    present = counts > 0
    means = sums[present] / counts[present].unsqueeze(1)
    within = (moments - (means * counts[present].unsqueeze(1)).T @ means) / counts.sum()
    if not torch.isfinite(within).all():
        raise ValueError("features must be finite, found NaN or infinity")
    spread = within.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    variances, directions = torch.linalg.eigh(within)
    scale = (variances.clamp(min=0) + SHRINKAGE * spread).rsqrt()
    whitening = directions * scale
    return ClassDensity((means @ whitening).float(), whitening.float())
