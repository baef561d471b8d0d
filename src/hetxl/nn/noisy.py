"""What a head hands to its classifier: features with their noise, and how to average over it."""

from dataclasses import dataclass, replace
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

    def flat(self) -> "NoisyFeatures":
        """The same with one batch dimension: features [B, D], z [B, S, Q]."""
        shape = self.features.shape[:-1]
        if len(shape) == 1 and (self.z is None or self.z.dim() == 3):
            return self

        def flat(values: Tensor | None, kept: int) -> Tensor | None:
            """[..., X] or [..., X, Y] to [B, X] or [B, X, Y]."""
            if values is None:
                return None
            return values.expand(*shape, *values.shape[-kept:]).reshape(shape.numel(), *values.shape[-kept:])

        noise = self.noise
        if noise is not None:
            shared = noise.factors is not None and noise.factors.dim() == 2
            factors = noise.factors if shared else flat(noise.factors, 2)
            noise = GaussianNoise(factors, flat(noise.scale, 1), flat(noise.residual, 1), noise.residual_kind)
        features = self.features.reshape(-1, self.features.shape[-1])
        return replace(self, features=features, noise=noise, z=flat(self.z, 2))

    def of_examples(self, examples: slice | Tensor) -> "NoisyFeatures":
        """Some examples of a flat batch."""
        noise = None if self.noise is None else self.noise.of_examples(examples)
        z = None if self.z is None else self.z[examples]
        return replace(self, features=self.features[examples], noise=noise, z=z)

    def projected(self, weight: Tensor) -> "NoisyFeatures":
        """A flat batch after a linear map without bias, weight [H, D]: features and noise in H dimensions."""
        noise = self.noise
        if noise is not None:
            noise = GaussianNoise(noise.basis() @ weight.T)
        return replace(self, features=self.features @ weight.T, noise=noise)

    def logits_at(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Sampled logits [..., S] of one class of each example, before the temperature, in at least float32.

        Args:
            rows: [..., D], the class's row of W.
            bias: [...] or None
        """
        wide = torch.float64 if self.features.dtype == torch.float64 else torch.float32
        rows = rows.to(wide)
        found = (rows * self.features.to(wide)).sum(-1, keepdim=True)
        if bias is not None:
            found = found + bias.to(wide).unsqueeze(-1)
        if self.noise is None or self.z is None:
            return found
        seen = self.noise.seen_by(rows.unsqueeze(-2))  # [..., 1, Q]
        return found + (self.z.to(seen.dtype) @ seen.mT).squeeze(-1)

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
