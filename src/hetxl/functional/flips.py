"""Labels that were replaced by any class alike: a share ε of them is drawn uniformly from all K classes.

    p(label | x) = (1 − ε) p(class | x) + ε / K

The one parameter ε tells the label that an example would be given from the class that it has.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURES = (0.1, 2.0)
"""Range of the τ that `fit_flip_rate` tries: probabilities of noisy labels are flatter than those of their classes."""
POINTS, HALVINGS = 24, 40
SIGNIFICANT = 6.6
"""Twice the gain in log-likelihood from which ε counts; the 99 % quantile of χ² with one degree of freedom."""


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
        """Whether the labels support ε > 0."""
        return self.evidence > SIGNIFICANT


@torch.no_grad()
def fit_flip_rate(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> FlipRate:
    """Return the ε that is most likely for held-out labels, with logits of a model that was trained on such labels.

        max over ε and τ of Σ log((1 − ε) softmax(logits / τ)[target] + ε / K)

    The model has fitted the noise with flat probabilities; τ < 1 takes that back. Wrong labels that are confused with
    few classes give ε no evidence: it needs classes that are wrong alike.

    Args:
        logits: [n, K]
        targets: [n] class ids.
        weight: [n], how often each row counts; None for once.
    """
    low, high = map(math.log, TEMPERATURES)
    # Doubles: evidence is a small difference of large sums.
    logits = logits.double()
    weight = torch.ones_like(logits[:, 0]) if weight is None else weight.double()
    temperatures = torch.linspace(low, high, POINTS, dtype=torch.float64, device=logits.device).exp()
    rows = torch.arange(len(logits), device=logits.device)
    probs = torch.stack([torch.log_softmax(logits / tau, -1)[rows, targets].exp() for tau in temperatures])  # [T, n]
    uniform = 1 / logits.shape[1]
    lower, upper = torch.zeros_like(temperatures), torch.ones_like(temperatures)
    for _ in range(HALVINGS):  # the likelihood is concave in ε: its slope falls
        rates = (lower + upper) / 2
        mixed = torch.lerp(probs, torch.full_like(probs, uniform), rates[:, None])
        rises = (weight * (uniform - probs) / mixed).sum(1) > 0
        lower, upper = torch.where(rises, rates, lower), torch.where(rises, upper, rates)
    mixed = torch.lerp(probs, torch.full_like(probs, uniform), lower[:, None])
    likelihood = (weight * mixed.clamp(min=1e-300).log()).sum(1)
    without = (weight * probs.clamp(min=1e-300).log()).sum(1)
    best = int(likelihood.argmax())
    return FlipRate(float(lower[best]), 2 * float(likelihood[best] - without.max()))
