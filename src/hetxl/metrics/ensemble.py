"""An ensemble of trained models, the strongest baseline for a head, at several times its cost."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetxl.functional import LogitDistribution
from hetxl.functional.links import log_mean_exp, sigmoid_entropy, softmax_entropy
from hetxl.nn import Head, Prediction

Member = tuple[Callable[[Tensor], Tensor], Head]


class Ensemble(nn.Module):
    """Average the probabilities of several models. It has the interface of a head whose features are the inputs.

    Args:
        members: pairs of a backbone, inputs [b, ...] → [b, D], and a head; all with the same classes and link.
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
        # Registered as modules, so that they move and change mode with the ensemble.
        self.modules_of_backbones = nn.ModuleList([part for part in self.backbones if isinstance(part, nn.Module)])
        self.link, self.num_classes = next(iter(kinds))
        self.eval_samples = max(head.eval_samples for _, head in members)

    @property
    def members(self) -> list[Member]:
        """Return the pairs of backbone and head."""
        return [(backbone, head) for backbone, head in zip(self.backbones, self.heads, strict=True)]  # pyright: ignore[reportReturnType]

    @property
    def temperature(self) -> nn.Module:
        """Return the first member's value."""
        return self.members[0][1].temperature

    @property
    def noise_scale(self) -> float:
        """Return the first member's value."""
        return self.members[0][1].noise_scale

    @property
    def flip_rate(self) -> float:
        """Return the first member's value."""
        return self.members[0][1].flip_rate

    def logit_distribution(self, inputs: Tensor) -> LogitDistribution:
        """Return the first member's distribution, for the size of a batch."""
        backbone, head = self.members[0]
        return head.logit_distribution(backbone(inputs))

    @torch.no_grad()
    def predict(self, inputs: Tensor, top_k: int | None = None, method: str = "mc", **options: Any) -> Prediction:
        """Return averaged probabilities of all classes.

            probs = torch.stack([head.predict(backbone(inputs)).probs for backbone, head in members]).mean(0)

        Options are those of `Head.predict` and apply to each member; inputs are [b, ...]. `expected_entropy` is the
        mean over the members, so `mutual_information` measures their disagreement; `logits` are the first member's.
        """
        predictions = [head.predict(backbone(inputs), method=method, **options) for backbone, head in self.members]
        log_probs = log_mean_exp(torch.stack([each.log_probs for each in predictions]), 0)
        if self.link == "softmax":
            entropy = softmax_entropy(log_probs)
        else:
            # 1 − p is accurate enough: if it rounds to 0, its part of the entropy does too.
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
            expected_entropy=torch.stack([each.expected_entropy for each in predictions]).mean(0),
            left_out=None,
            temperature=predictions[0].temperature,
            logits=predictions[0].logits,
            method=method,
            num_samples=predictions[0].num_samples,
        )
