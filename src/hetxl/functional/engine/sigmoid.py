"""Sigmoid, block by block. The classes are independent, so the samples of a block of classes suffice to compute its
results and gradients.

For one example and class, with u_s the logits of the samples (already divided by τ),

    log p̄ = log mean_s σ(u_s)               d log p̄ / d u_s       =   σ(u_s) σ(−u_s) / Σ σ(u_s′)
    log(1 − p̄) = log mean_s σ(−u_s)         d log(1 − p̄) / d u_s = − σ(u_s) σ(−u_s) / Σ σ(−u_s′)

so the gradient of any loss is σ(u_s) σ(−u_s) times one factor for each class.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional.targets import Targets, known_ids

LIMIT = 40.0  # beyond it σ(−u) is exp(−u) to the last bit, and float32 still holds samples e⁴⁷ times less likely


class MeanSigmoid(NamedTuple):
    """Averages over the samples of a class, each [...]."""

    log_p: Tensor  # log p̄
    log_not_p: Tensor  # log(1 − p̄)
    per_p: Tensor  # 1 / Σ σ(u)
    per_not_p: Tensor  # 1 / Σ σ(−u)
    entropy: Tensor | None = None  # mean of the samples' entropies


def mean_sigmoid_rows(logits: Tensor, backward: bool, entropy: bool = False) -> MeanSigmoid:
    """Average over the samples of logits u [..., S], which are overwritten; with `backward` by σ(u) σ(−u).

    If all samples of a class lie beyond ±40, they are shifted to start there. The shift changes σ(∓u) by a known factor
    and leaves σ(±u) at 1 to the last bit. Sums over samples then never underflow.
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
    """Blocks [k, n] of a label matrix [B, K], from a dense matrix, one class id for each example, or lists."""

    def __init__(self, targets: Targets, like: Tensor):
        self.dense, self.like = None, like  # the blocks have like's precision and device
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
        """Return the labels of some examples for some classes, [k, n]."""
        if self.dense is not None:
            return self.dense[examples, classes].T.to(self.like.dtype)
        count, size = classes.stop - classes.start, examples.stop - examples.start
        row, column = self.classes - classes.start, self.examples - examples.start
        hit = (row >= 0) & (row < count) & (column >= 0) & (column < size)
        out = self.like.new_zeros(count * size)
        # Entries of other blocks add 0 at position 0: selecting them would synchronise with the device.
        out.index_add_(0, torch.where(hit, row * size + column, 0), torch.where(hit, self.values, 0.0))
        return out.clamp_(max=1).view(count, size)
