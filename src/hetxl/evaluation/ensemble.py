"""Several trained models whose probabilities are averaged: the bar for a head, where cost is no matter."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hetxl.functional import LogitDistribution
from hetxl.functional.links import log_mean_exp, sigmoid_entropy, softmax_entropy
from hetxl.nn import Head, Prediction

Member = tuple[Callable[[Tensor], Tensor], Head]


class Ensemble(nn.Module):
    """The mean of the members' probabilities. For `evaluate` it is a head whose features are the inputs themselves.

    Args:
        members: a backbone, inputs [b, ...] → [b, D], and a head for each; all over the same classes with one link.
    """

    def __init__(self, members: Sequence[Member]):
        super().__init__()
        if not members:
            raise ValueError("members must have at least one model, found none")
        kinds = {(head.link, head.num_classes) for _, head in members}
        if len(kinds) > 1:
            raise ValueError(f"members must share one link and one number of classes, found {sorted(kinds)}")
        self.backbones = [backbone for backbone, _ in members]
        self.heads = nn.ModuleList([head for _, head in members])
        # Modules in their own list, so that they move and switch to evaluation with the ensemble.
        self.modules_of_backbones = nn.ModuleList([one for one in self.backbones if isinstance(one, nn.Module)])
        self.link, self.num_classes = next(iter(kinds))
        self.eval_samples = max(head.eval_samples for _, head in members)

    @property
    def members(self) -> list[Member]:
        """Backbones and heads."""
        return [(backbone, head) for backbone, head in zip(self.backbones, self.heads, strict=True)]  # pyright: ignore[reportReturnType]

    def logit_distribution(self, inputs: Tensor) -> LogitDistribution:
        """The first member's, for the size of a batch."""
        backbone, head = self.members[0]
        return head.logit_distribution(backbone(inputs))

    @torch.no_grad()
    def predict(
        self,
        inputs: Tensor,
        top_k: int | None = None,
        method: str = "mc",
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Averaged probabilities of all classes.

            probs = torch.stack([head.predict(backbone(inputs)).probs for backbone, head in members]).mean(0)

        Its `expected_entropy` is the mean of the members' own, so that `mutual_information` holds what they disagree
        on; its `logits` are the first member's.

        Args:
            inputs: [b, ...]
            top_k: only the k most probable classes.
            method: of each member.
            num_samples: S of each member.
            generator: where their draws come from, one after the other.
        """
        found = [
            head.predict(backbone(inputs), method=method, num_samples=num_samples, generator=generator)
            for backbone, head in self.members
        ]
        log_probs = log_mean_exp(torch.stack([one.log_probs for one in found]), 0)
        if self.link == "softmax":
            entropy = softmax_entropy(log_probs)
        else:
            # 1 − p is exact enough: where it is lost, its share of the entropy is too.
            rest = (1 - log_probs.exp()).clamp_min(torch.finfo(log_probs.dtype).tiny).log()
            entropy = sigmoid_entropy(log_probs, rest)
        indices = None
        if top_k is not None:
            log_probs, indices = log_probs.topk(top_k)
        return Prediction(
            probs=log_probs.exp(),
            log_probs=log_probs,
            indices=indices,
            entropy=entropy,
            expected_entropy=torch.stack([one.expected_entropy for one in found]).mean(0),
            left_out=None,
            temperature=found[0].temperature,
            logits=found[0].logits,
            method=method,
            num_samples=found[0].num_samples,
        )
