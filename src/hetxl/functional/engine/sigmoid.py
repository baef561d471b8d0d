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

LIMIT = 40.0
"""Beyond this σ(−u) is exp(−u) to the last bit, and samples e⁴⁷ times less likely still count in float32."""


class MeanSigmoid(NamedTuple):
    """What the samples of a class come to, each [...].

    Attributes:
        log_p: log p̄
        log_not_p: log(1 − p̄)
        per_p: 1 / Σ σ(u)
        per_not_p: 1 / Σ σ(−u)
        entropy: mean over the samples of the entropy of each; None unless asked for.
    """

    log_p: Tensor
    log_not_p: Tensor
    per_p: Tensor
    per_not_p: Tensor
    entropy: Tensor | None = None


def mean_sigmoid_rows(logits: Tensor, backward: bool, entropy: bool = False) -> MeanSigmoid:
    """Means over the samples; with `backward` the logits are overwritten by σ(u) σ(−u).

    When all samples of a class lie beyond ±40 they are shifted to start there, which changes σ(∓u) by a known factor
    and the other one, 1 to the last bit, not at all. Sums over samples then never underflow.

    Args:
        logits: u, [..., S]; overwritten.
        backward: whether the gradient is wanted.
        entropy: whether the mean entropy of the samples is wanted.
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
    return MeanSigmoid(
        sum_positive.log() - count - down,
        sum_negative.log() - count - up,
        1 / sum_positive,
        1 / sum_negative,
        expected,
    )
