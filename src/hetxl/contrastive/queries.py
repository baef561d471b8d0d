"""The query side of one direction: embeddings with their draws of noise, as the engine takes them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetxl.functional import Affine, GaussianNoise, LabelLists, LinearLift, Link, LogitDistribution, Targets, mc_nll


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries of one direction, each with S draws.

    Attributes:
        features: [n, D], what the noise is added to.
        noise: the Gaussian around them; None without noise.
        z: [n, S, Q] or [S, Q] standard normals; None without noise.
    """

    features: Tensor
    noise: GaussianNoise | None = None
    z: Tensor | None = None

    @classmethod
    def explicit(cls, samples: Tensor) -> "Queries":
        """Queries whose draws are given as they are, [n, S, D]."""
        count, draws, width = samples.shape
        if draws == 1:
            return cls(samples.squeeze(1))
        # Draws that are the factors themselves, each mixed in alone: the engine then averages over them.
        same = torch.eye(draws, dtype=samples.dtype, device=samples.device)
        return cls(samples.new_zeros(count, width), GaussianNoise(samples), same)

    @property
    def count(self) -> int:
        """S."""
        return 1 if self.z is None else self.z.shape[-2]

    @property
    def samples(self) -> Tensor:
        """The draws, [n, S, D]; the features themselves without noise, [n, 1, D]."""
        if self.noise is None or self.z is None:
            return self.features.unsqueeze(1)
        drawn = self.noise.draw(self.z.to(self.noise.dtype))
        return self.features.unsqueeze(1) + drawn.to(self.features.dtype)


def summed_loss(
    queries: Queries,
    keys: Tensor,
    own: Tensor,
    *,
    link: Link,
    scale: Tensor,
    bias: Tensor | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """Σ_n −log p̄ of each query's own key among the keys (sigmoid: and of 1 − p̄ for all others), block by block.

        logits = scale * queries.samples @ keys.T + bias                                     # [n, S, K]
        softmax:  -log_mean_exp(log_softmax(logits, -1), 1).gather(-1, own).sum()
        sigmoid:  -log_mean_exp(logsigmoid(±logits), 1).sum()

    Args:
        queries: n of them.
        keys: [K, D], the classifier of this batch.
        own: [n], the place of each query's own key. For the sigmoid link one outside 0 … K − 1 is not among them.
        link: "softmax" or "sigmoid"
        scale: of the logits, a scalar.
        bias: of the logits, a scalar; sigmoid only.
        memory_budget: bytes of working memory, see `hetxl.functional.plan`.
    """
    temperature = 1 / scale
    # The engine divides by τ what has the bias in it already.
    affine = Affine(keys, None if bias is None else (bias * temperature).to(keys.dtype).expand(len(keys)))
    lift = None if queries.noise is None else LinearLift(keys)
    logits = LogitDistribution(queries.features, affine, queries.noise, lift)
    targets = Targets(ids=own) if link == "softmax" else Targets(lists=_lists(own, len(keys)))
    return mc_nll(
        logits, queries.z, targets, temperature=temperature, link=link, reduction="sum", memory_budget=memory_budget
    )


def _lists(own: Tensor, keys: int) -> LabelLists:
    # Places outside are moved nowhere by their value of 0, so that no look at the data is needed.
    inside = (own >= 0) & (own < keys)
    examples = torch.arange(len(own), device=own.device)
    return LabelLists(examples, own.clamp(0, max(keys - 1, 0)), inside.to(torch.float32), len(own))
