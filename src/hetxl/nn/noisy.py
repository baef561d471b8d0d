"""What a head hands to its classifier: features with their noise, and how to average over it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetxl.functional import (
    Affine,
    GaussianNoise,
    Lift,
    LinearLift,
    Link,
    LogitDistribution,
    Order,
    Summary,
    Targets,
    Weights,
    mc_log_probs,
    mc_nll,
    mc_predict,
)


@dataclass(frozen=True, eq=False)
class NoisyFeatures:
    """Features with the Gaussian around them and the normals drawn for it.

    Attributes:
        features: φ(x), [..., D]
        noise: the Gaussian in noise space; None for a deterministic head.
        z: [..., S, Q] or [S, Q] standard normals; None without noise or samples.
        lift: how noise reaches the logits when it does not go through the classifier (HET, HET-H, an own projection).
        temperature: τ
        link: "softmax" or "sigmoid"
        order: "samples" or "factors" to force one.
        memory_budget: bytes of working memory; None for the default.
        generator: for draws that a classifier makes itself; None for torch's default.
    """

    features: Tensor
    noise: GaussianNoise | None
    z: Tensor | None
    lift: Lift | None
    temperature: Tensor | float
    link: Link
    order: Order | None = None
    memory_budget: int | None = None
    generator: torch.Generator | None = None

    def through(self, affine: Affine) -> LogitDistribution:
        """The Gaussian over the logits of a linear classifier."""
        lift = self.lift if self.lift is not None or self.noise is None else LinearLift(affine.weight)
        return LogitDistribution(self.features, affine, self.noise, lift)

    def nll(self, logits: LogitDistribution, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Negative log-likelihood of targets over all classes of a distribution: a scalar, or [...]."""
        return mc_nll(
            logits, self.z, targets, link=self.link, reduction=reduction, weights=weights, **self.evaluation_options()
        )

    def log_probs(self, logits: LogitDistribution) -> Tensor:
        """Averaged log-probabilities [..., K] (sigmoid: logits of the mean probabilities)."""
        return mc_log_probs(logits, self.z, link=self.link, **self.evaluation_options())

    def predict(self, logits: LogitDistribution, method: str, top_k: int | None, tolerance: float) -> Summary:
        """Averaged probabilities with entropies."""
        return mc_predict(
            logits,
            self.z,
            link=self.link,
            method=method,
            top_k=top_k,
            tolerance=tolerance,
            **self.evaluation_options(),
        )

    def evaluation_options(self) -> dict[str, Any]:
        """τ, the order and the memory budget, as the primitives take them."""
        return {"temperature": self.temperature, "order": self.order, "memory_budget": self.memory_budget}
