"""Sigmoid, block by block. The classes are independent, so a block of them is finished, gradients included, as soon as
all its samples are there.

For one example and class, with u_s the logits of the samples (already divided by τ),

    log p̄ = log mean_s σ(u_s)               d log p̄ / d u_s       =   σ(u_s) σ(−u_s) / Σ σ(u_s′)
    log(1 − p̄) = log mean_s σ(−u_s)         d log(1 − p̄) / d u_s = − σ(u_s) σ(−u_s) / Σ σ(−u_s′)

so whatever the loss is, its gradient is σ(u_s) σ(−u_s) times one factor for each class.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional.targets import Targets, known_ids

LIMIT = 40.0  # beyond this σ(−u) is exp(−u) to the last bit, and samples e⁴⁷ times less likely still count in float32


class MeanSigmoid(NamedTuple):
    """Averages over the samples of a class, each [...]."""

    log_p: Tensor  # log p̄
    log_not_p: Tensor  # log(1 − p̄)
    per_p: Tensor  # 1 / Σ σ(u)
    per_not_p: Tensor  # 1 / Σ σ(−u)
    entropy: Tensor | None = None  # mean over the samples of the entropy of each


def mean_sigmoid_rows(logits: Tensor, backward: bool, entropy: bool = False) -> MeanSigmoid:
    """Means over the samples of logits u [..., S], which are overwritten; with `backward` by σ(u) σ(−u).

    When all samples of a class lie beyond ±40 they are shifted to start there, which changes σ(∓u) by a known factor
    and the other one, 1 to the last bit, not at all. Sums over samples then never underflow.
    """
    expected = (F.softplus(logits) - logits * logits.sigmoid()).mean(-1) if entropy else None
    up = (logits.amin(-1) - LIMIT).clamp_(min=0)
    down = (-LIMIT - logits.amax(-1)).clamp_(min=0)
    logits.sub_((up - down).unsqueeze(-1))
    positive = torch.sigmoid(logits)
    negative = logits.neg_().sigmoid_()
    sum_positive, sum_negative = positive.sum(-1), negative.sum(-1)
    if backward:
        negative.mul_(positive)
    count = math.log(logits.shape[-1])
    log_p, log_not_p = sum_positive.log() - count - down, sum_negative.log() - count - up
    return MeanSigmoid(log_p, log_not_p, 1 / sum_positive, 1 / sum_negative, expected)


class LabelBlocks:
    """Blocks [k, n] of a label matrix [B, K] that is given dense, as one class id for each example, or as lists."""

    def __init__(self, targets: Targets, like: Tensor):
        self.dense, self.like = None, like  # the blocks are of like's precision and device
        if targets.dense is not None:
            self.dense = targets.dense.reshape(-1, targets.dense.shape[-1])
        elif targets.ids is not None:
            self.classes = known_ids(targets.ids).flatten()
            self.examples = torch.arange(len(self.classes), device=like.device)
            self.values = torch.ones(len(self.classes), dtype=like.dtype, device=like.device)
        else:
            assert targets.lists is not None
            lists = targets.lists
            self.classes, self.examples = lists.classes.to(like.device), lists.examples.to(like.device)
            self.values = (torch.ones(len(self.classes)) if lists.values is None else lists.values).to(like)

    def block(self, examples: slice, classes: slice) -> Tensor:
        """The labels of some examples for some classes, [k, n]."""
        if self.dense is not None:
            return self.dense[examples, classes].T.to(self.like.dtype)
        count, size = classes.stop - classes.start, examples.stop - examples.start
        row, column = self.classes - classes.start, self.examples - examples.start
        hit = (row >= 0) & (row < count) & (column >= 0) & (column < size)
        out = self.like.new_zeros(count * size)
        # Entries of other blocks add 0 at place 0: no look at the data, no wait for a device.
        out.index_add_(0, torch.where(hit, row * size + column, 0), torch.where(hit, self.values, 0.0))
        return out.clamp_(max=1).view(count, size)
