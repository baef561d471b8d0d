"""Uniform label noise: a share ε of the labels is drawn uniformly from all K classes.

    p(label | x) = (1 − ε) p(class | x) + ε / K

The parameter ε separates the label that an example would get from its true class.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURES = (0.1, 2.0)
"""Range of τ in `fit_flip_rate`: probabilities of noisy labels are flatter than those of true classes."""
POINTS, HALVINGS = 24, 40
SIGNIFICANT = 6.6
"""Significance threshold of twice the gain in log-likelihood: the 99 % quantile of χ² with one degree of freedom."""


def flipped_log_probs(log_probs: Tensor, rate: float) -> Tensor:
    """Return log((1 − ε) p + ε / K) of log-probabilities [..., K] of the classes."""
    return flipped(log_probs, rate, log_probs.shape[-1])


def flipped(log_prob: Tensor, rate: float, num_classes: int) -> Tensor:
    """Return log((1 − ε) p + ε / K) of some log p, [...]."""
    return torch.logaddexp(log_prob + math.log1p(-rate), log_prob.new_tensor(math.log(rate / num_classes)))


class FlipRate(NamedTuple):
    """An estimate of ε."""

    rate: float
    evidence: float  # twice the gain in log-likelihood over ε = 0

    @property
    def significant(self) -> bool:
        """Return whether the labels support ε > 0."""
        return self.evidence > SIGNIFICANT


@torch.no_grad()
def fit_flip_rate(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> FlipRate:
    """Return the maximum-likelihood ε of held-out labels, from logits of a model trained on labels with the same noise.

        max over ε and τ of Σ log((1 − ε) softmax(logits / τ)[target] + ε / K)

    The model has fitted the noise with flat probabilities; τ < 1 sharpens them again. Wrong labels that concentrate on
    few classes are no evidence for ε, which models uniform noise.

    Args:
        logits: [n, K]
        targets: [n] class ids.
        weight: [n], weight of each row; None for 1.
    """
    low, high = map(math.log, TEMPERATURES)
    # Double precision, because the evidence is a small difference of large sums.
    logits = logits.double()
    weight = torch.ones_like(logits[:, 0]) if weight is None else weight.double()
    temperatures = torch.linspace(low, high, POINTS, dtype=torch.float64, device=logits.device).exp()
    rows = torch.arange(len(logits), device=logits.device)
    probs = torch.stack([torch.log_softmax(logits / tau, -1)[rows, targets].exp() for tau in temperatures])  # [T, n]
    uniform = 1 / logits.shape[1]
    lower, upper = torch.zeros_like(temperatures), torch.ones_like(temperatures)
    for _ in range(HALVINGS):  # bisection: the likelihood is concave in ε, so its slope falls
        rates = (lower + upper) / 2
        mixed = torch.lerp(probs, torch.full_like(probs, uniform), rates[:, None])
        rises = (weight * (uniform - probs) / mixed).sum(1) > 0
        lower, upper = torch.where(rises, rates, lower), torch.where(rises, upper, rates)
    mixed = torch.lerp(probs, torch.full_like(probs, uniform), lower[:, None])
    likelihood = (weight * mixed.clamp(min=1e-300).log()).sum(1)
    without = (weight * probs.clamp(min=1e-300).log()).sum(1)
    best = int(likelihood.argmax())
    return FlipRate(float(lower[best]), 2 * float(likelihood[best] - without.max()))
