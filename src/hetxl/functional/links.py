"""Step 3 of every head, **average**: the mean over samples of softmax or sigmoid, kept in logarithms.

Always a log-mean-exp, never the logarithm of a clipped probability: the loss and its gradient stay finite and right
when every sampled probability underflows.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Link = Literal["softmax", "sigmoid"]
LINKS: tuple[Link, ...] = ("softmax", "sigmoid")


def log_mean_exp(values: Tensor, dim: int) -> Tensor:
    """log(mean(exp(values), dim)), without leaving the logarithm."""
    return torch.logsumexp(values, dim) - math.log(values.shape[dim])


def mean_softmax(logits: Tensor) -> Tensor:
    """log of the mean over samples of softmax(logits): [..., S, K] → [..., K]."""
    return log_mean_exp(torch.log_softmax(logits, dim=-1), dim=-2)


def mean_sigmoid(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log(1 − p) of the mean over samples of sigmoid(logits): [..., S, K] → two of [..., K]."""
    return log_mean_exp(F.logsigmoid(logits), dim=-2), log_mean_exp(F.logsigmoid(-logits), dim=-2)


def softmax_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats of categorical log-probabilities, [..., K] → [...]; a class of probability 0 adds nothing."""
    return -(log_probs.exp() * _finite(log_probs)).sum(-1)


def sigmoid_entropy(log_p: Tensor, log_not_p: Tensor) -> Tensor:
    """Summed entropy in nats of K independent labels given log p and log(1 − p), two of [..., K] → [...]."""
    return -(log_p.exp() * _finite(log_p) + log_not_p.exp() * _finite(log_not_p)).sum(-1)


def _finite(log_probs: Tensor) -> Tensor:
    """−∞ as the smallest number there is, which times 0 is 0."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
