"""Mixup and cutmix: mix each image of a part of a batch, and its label, with another."""

import math

import numpy as np
import torch
from torch import Tensor

from hetxl.functional import LabelLists
from hetxl.functional.targets import IGNORE_INDEX


def mixed(
    images: Tensor, targets: Tensor | LabelLists, num_classes: int, rng: np.random.Generator, *, mixup: float = 0.0,
    cutmix: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mix images [B, C, H, W] with those of the reversed batch, and return them with soft targets [B, K].

        share = rng.beta(mixup, mixup); images = share * images + (1 - share) * images.flip(0)

    Cutmix pastes a rectangle of the other image instead; the share is its area. With both, each batch uses one of them.

    Args:
        targets: class ids [B], or lists of labels.
        mixup: α of the Beta distribution of the share; 0 for no mixup.
        cutmix: the same for cutmix.
    """
    cut = bool(cutmix) and (not mixup or bool(rng.random() < 0.5))
    share = float(rng.beta(cutmix, cutmix) if cut else rng.beta(mixup, mixup))  # of the image itself
    other = images.flip(0)
    if cut:
        rows, columns = (_span(size, math.sqrt(1 - share), rng) for size in images.shape[-2:])
        images = images.clone()
        images[..., rows, columns] = other[..., rows, columns]
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        share = 1 - area / (images.shape[-2] * images.shape[-1])
    else:
        images = share * images + (1 - share) * other
    labels = dense_rows(targets, num_classes)
    return images, share * labels + (1 - share) * labels.flip(0)


def _span(size: int, side: float, rng: np.random.Generator) -> slice:
    """Return a random slice of a length that covers a share of it, clipped at the ends."""
    centre, half = int(rng.integers(size)), int(size * side) // 2
    return slice(max(centre - half, 0), min(centre + half, size))


def dense_rows(targets: Tensor | LabelLists, num_classes: int) -> Tensor:
    """Return class ids [B] or lists of labels as rows [B, K]; rows without a label are 0."""
    if isinstance(targets, LabelLists):
        return targets.dense(num_classes)
    labelled = targets != IGNORE_INDEX
    rows = torch.nn.functional.one_hot(targets.where(labelled, 0), num_classes).float()
    return rows * labelled.unsqueeze(-1)
