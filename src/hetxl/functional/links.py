"""Step 3 of every head, **average**: the mean over samples of softmax or sigmoid, kept in logarithms.

The mean is always a log-mean-exp, never the logarithm of a clipped probability, so the loss and its gradient stay
finite and correct when every sampled probability underflows.

`approximate_log_probs` averages over Gaussian logits without samples, from the mean and the lifted basis alone. With m
the mean logits and f_q the rows of the basis in logit space, both divided by τ:

| method | softmax | sigmoid |
| --- | --- | --- |
| `probit` | softmax(m_k / √(1 + π/8 s_k)), s_k = Σ_q f_qk² | σ(m / √(1 + π/8 s)) |
| `mean_field` | the same with m and f centred on their means under softmax(m) | as `probit` |
| `taylor` | p_k (1 + ½ Σ_q [(f_qk − μ_q)² − v_q]) | p + ½ s p (1 − p)(1 − 2p) |

with p = softmax(m) or σ(m), and μ_q and v_q the mean and variance of f_q under p.

`mean_field`, like softmax, does not change when all logits shift together; `probit` does. `taylor` is the exact
second-order expansion in the noise: the most accurate for small noise, and unsuitable for large noise, where its result
is only clipped and normalised. docs/methods.md measures all of them.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.registry import Link


def log_mean_exp(values: Tensor, dim: int) -> Tensor:
    """Return log(mean(exp(values), dim)), computed in logarithms."""
    return torch.logsumexp(values, dim) - math.log(values.shape[dim])


def mean_softmax(logits: Tensor) -> Tensor:
    """log of the mean over samples of softmax(logits): [..., S, K] → [..., K]."""
    return log_mean_exp(torch.log_softmax(logits, dim=-1), dim=-2)


def mean_sigmoid(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log(1 − p) of the mean over samples of sigmoid(logits): [..., S, K] → two of [..., K]."""
    return log_mean_exp(F.logsigmoid(logits), dim=-2), log_mean_exp(F.logsigmoid(-logits), dim=-2)


class Averaged(NamedTuple):
    """The mean of several predictions of a batch [...]."""

    log_p: Tensor  # [..., K]
    log_not_p: Tensor | None  # [..., K] log(1 − p) for the sigmoid link, None for softmax
    expected_entropy: Tensor  # [...], mean of the entropy of each

    @property
    def logits(self) -> Tensor:
        """Return [..., K]: log-probabilities, or for the sigmoid link the logits of the mean probabilities."""
        return self.log_p if self.log_not_p is None else self.log_p - self.log_not_p

    @property
    def entropy(self) -> Tensor:
        """Return the entropy [...] of the mean, in nats."""
        return softmax_entropy(self.log_p) if self.log_not_p is None else sigmoid_entropy(self.log_p, self.log_not_p)


def average_logits(samples: Iterable[Tensor], link: Link) -> Averaged:
    """Average softmax or sigmoid over logits [..., K] sample by sample, in O(batch · K) memory.

    mean_softmax(torch.stack(list(samples), -2))
    """
    sums: list[Tensor] = []
    entropies: Tensor | float = 0.0
    count = 0
    for logits in samples:
        count += 1
        if link == "softmax":
            logs = [torch.log_softmax(logits, dim=-1)]
            entropies = entropies + softmax_entropy(logs[0])
        else:
            logs = [F.logsigmoid(logits), F.logsigmoid(-logits)]
            entropies = entropies + sigmoid_entropy(*logs)
        sums = logs if count == 1 else [torch.logaddexp(a, b) for a, b in zip(sums, logs, strict=True)]
    if not count:
        raise ValueError("samples must hold the logits of at least one sample, found none")
    log_p, *rest = (total - math.log(count) for total in sums)
    return Averaged(log_p, rest[0] if rest else None, torch.as_tensor(entropies) / count)


def softmax_entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats of categorical log-probabilities, [..., K] → [...]; probability 0 adds nothing."""
    return -(log_probs.exp() * _finite(log_probs)).sum(-1)


def sigmoid_entropy(log_p: Tensor, log_not_p: Tensor) -> Tensor:
    """Return the summed entropy in nats of K independent labels from log p and log(1 − p), two of [..., K] → [...]."""
    return -(log_p.exp() * _finite(log_p) + log_not_p.exp() * _finite(log_not_p)).sum(-1)


def _finite(log_probs: Tensor) -> Tensor:
    """Replace −∞ by the smallest finite number, whose product with 0 is 0."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


APPROXIMATIONS = ("mean_field", "probit", "taylor")

SMALLEST = 1e-30  # lower bound of probabilities from `taylor`, whose expansion can be negative


def approximate_log_probs(method: str, mean: Tensor, factors: Tensor, link: Link) -> tuple[Tensor, Tensor | None]:
    """Return averaged log-probabilities without samples.

    Args:
        method: "mean_field", "probit" or "taylor".
        mean: m, [..., K], divided by τ.
        factors: f, [..., Q, K], divided by τ.

    Returns:
        log_p: [..., K]
        log_not_p: [..., K] for the sigmoid link, None for softmax.
    """
    if link == "sigmoid":
        return _sigmoid(method, mean, factors.square().sum(-2))
    if method == "probit":
        return torch.log_softmax(mean / _widening(factors.square().sum(-2)), dim=-1), None
    log_probs = torch.log_softmax(mean, dim=-1)
    probs = log_probs.exp().unsqueeze(-2)  # [..., 1, K]
    centred = factors - (factors * probs).sum(-1, keepdim=True)
    spread = centred.square()
    if method == "mean_field":
        middle = (mean * probs.squeeze(-2)).sum(-1, keepdim=True)
        return torch.log_softmax((mean - middle) / _widening(spread.sum(-2)), dim=-1), None
    change = 0.5 * (spread - (spread * probs).sum(-1, keepdim=True)).sum(-2)  # [..., K]
    # In logarithms, so that very small probabilities do not underflow.
    expanded = log_probs + (1 + change).clamp(min=SMALLEST).log()
    return torch.log_softmax(expanded, dim=-1), None


def _sigmoid(method: str, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    if method == "taylor":
        probs = mean.sigmoid()
        expanded = probs + 0.5 * variance * probs * (1 - probs) * (1 - 2 * probs)
        expanded = expanded.clamp(SMALLEST, 1 - torch.finfo(mean.dtype).eps)
        return expanded.log(), (-expanded).log1p()
    shrunk = mean / _widening(variance)
    return F.logsigmoid(shrunk), F.logsigmoid(-shrunk)


def _widening(variance: Tensor) -> Tensor:
    """Return √(1 + π/8 s), the factor by which Gaussian noise of variance s flattens a sigmoid."""
    return (1 + math.pi / 8 * variance).sqrt()
