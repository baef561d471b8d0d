"""The two primitives, written plainly: the whole [..., S, K] tensor of sampled logits, and autograd.

Every faster evaluation is tested against these functions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional.distribution import LogitDistribution, Order, accumulate
from hetxl.functional.links import (
    Link,
    log_mean_exp,
    mean_sigmoid,
    mean_softmax,
    sigmoid_entropy,
    softmax_entropy,
)
from hetxl.functional.targets import IGNORE_INDEX, Targets

REDUCTIONS = ("mean", "sum", "none")


def mc_log_probs(
    distribution: LogitDistribution,
    z: Tensor | None,
    *,
    temperature: Tensor | float,
    link: Link,
    order: Order,
) -> Tensor:
    """Log-probabilities averaged over samples (Eq. heteroscedastic_probs with σ_τ), differentiable.

        probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
        return probs.log()                                                   # sigmoid: logit(probs)

    Args:
        distribution: over the logits, [..., K].
        z: [..., S, Q] or [S, Q] standard normals; None without noise.
        temperature: τ
        link: "softmax" or "sigmoid"
        order: what is lifted, see `LogitDistribution.sample`.

    Returns:
        [..., K] log-probabilities; for the sigmoid link the logits of the mean probabilities.
    """
    logits = distribution.sample(z, order) / temperature  # [..., S, K]
    if link == "softmax":
        return mean_softmax(logits)
    log_p, log_not_p = mean_sigmoid(logits)
    return log_p - log_not_p


def mc_nll(
    distribution: LogitDistribution,
    z: Tensor | None,
    targets: Targets,
    *,
    temperature: Tensor | float,
    link: Link,
    order: Order,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood of the targets under the averaged probabilities.

        probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
        return -probs.log().gather(-1, ids)                                  # sigmoid: summed binary cross-entropy

    Args:
        distribution: over the logits, [..., K].
        z: [..., S, Q] or [S, Q] standard normals; None without noise.
        targets: ids [...] or dense [..., K].
        temperature: τ
        link: "softmax" or "sigmoid"
        order: what is lifted, see `LogitDistribution.sample`.
        reduction: "mean" over the examples that count (0 if there are none), "sum" or "none".

    Returns:
        A scalar, or [...] for reduction "none" (0 where an example does not count).
    """
    logits = distribution.sample(z, order) / temperature  # [..., S, K]
    counted = torch.ones(logits.shape[:-2], dtype=torch.bool, device=logits.device)
    ids, dense = targets.ids, targets.dense
    if ids is not None:
        counted = ids != IGNORE_INDEX
        ids = ids.masked_fill(~counted, 0)

    if link == "sigmoid":
        if ids is not None:
            dense = F.one_hot(ids, logits.shape[-1])
        assert dense is not None
        log_p, log_not_p = mean_sigmoid(logits)
        losses = -(dense * log_p + (1 - dense) * log_not_p).sum(-1)
    elif ids is not None:
        index = ids[..., None, None].expand(*logits.shape[:-1], 1)  # [..., S, 1]
        log_p = logits.gather(-1, index).squeeze(-1) - logits.logsumexp(-1)  # [..., S]
        losses = -log_mean_exp(log_p, dim=-1)
    else:
        assert dense is not None
        losses = -(dense * mean_softmax(logits)).sum(-1)
    return reduce_losses(losses, counted, reduction)


def reduce_losses(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Apply "mean", "sum" or "none" to losses [...] of which only the `counted` [...] ones count.

    The mean over nothing is 0 with zero gradients, not NaN: a rank without examples must not spoil a step.
    """
    # where, not a product: the loss of an example left out may be infinite, but a NaN in one that counts must show.
    losses = torch.where(counted, losses, torch.zeros_like(losses))
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted.sum().clamp(min=1)


def mc_predict(
    distribution: LogitDistribution,
    z: Tensor | None,
    *,
    temperature: Tensor | float,
    link: Link,
    order: Order,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a prediction needs from one pass over the samples.

    Args:
        distribution: over the logits, [..., K].
        z: [..., S, Q] or [S, Q] standard normals; None without noise.
        temperature: τ
        link: "softmax" or "sigmoid"
        order: what is lifted, see `LogitDistribution.sample`.

    Returns:
        log_probs: [..., K], log of the mean probability (both links).
        entropy: [...], of the mean probabilities.
        expected_entropy: [...], mean over samples of the entropy of each; the part that is not due to the noise.
    """
    logits = accumulate(distribution.sample(z, order) / temperature)
    if link == "softmax":
        per_sample = torch.log_softmax(logits, dim=-1)
        log_probs = log_mean_exp(per_sample, dim=-2)
        return log_probs, softmax_entropy(log_probs), softmax_entropy(per_sample).mean(-1)
    log_p, log_not_p = mean_sigmoid(logits)
    expected = sigmoid_entropy(F.logsigmoid(logits), F.logsigmoid(-logits)).mean(-1)
    return log_p, sigmoid_entropy(log_p, log_not_p), expected
