"""Weights of examples and classes, and the reduction of losses: the same for every evaluation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetxl.functional.links import Link
from hetxl.functional.targets import IGNORE_INDEX, Targets

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Weights:
    """How losses are weighed, as in torch.nn.functional.cross_entropy where that has the same option.

    Attributes:
        example: [...], factor of each example's loss.
        classes: [K], factor of each class's part of it; None for ones. For the softmax link the part of class k is
            −t_k log p̄_k, so with class ids it is a factor of the example.
        smoothing: ε, moves a share ε of the target evenly to all classes (softmax).
    """

    example: Tensor | None = None
    classes: Tensor | None = None
    smoothing: float = 0.0

    def check(self, batch_shape: torch.Size, num_classes: int, link: Link) -> None:
        """Raise unless the weights fit the batch [...] and the classes."""
        if self.example is not None and self.example.shape != batch_shape:
            raise ValueError(f"weight must have shape {list(batch_shape)}, found {list(self.example.shape)}")
        if self.classes is not None and self.classes.shape != (num_classes,):
            raise ValueError(f"class_weight must have shape {[num_classes]}, found {list(self.classes.shape)}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), found {self.smoothing}")
        if self.smoothing and link == "sigmoid":
            raise ValueError(f'label_smoothing={self.smoothing} is for link="softmax"; give soft targets instead')

    def factors(self, targets: Targets, batch_shape: torch.Size, link: Link, like: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of each example's loss, [...], 0 where it is ignored, and their sum for the mean, a scalar.

        With class ids under the softmax an example counts with the weight of its class, in its loss and in the sum;
        with smoothing the loss holds the class weights already.
        """
        factor = torch.ones(batch_shape, dtype=like.dtype, device=like.device)
        if self.example is not None:
            factor = factor * self.example.to(like.dtype)
        if targets.ids is None:
            return factor, factor.sum()
        factor = torch.where(targets.ids == IGNORE_INDEX, 0.0, factor)
        if self.classes is None or link == "sigmoid":
            return factor, factor.sum()
        weighted = factor * self.classes.to(like.dtype)[known_ids(targets.ids)]
        return factor if self.smoothing else weighted, weighted.sum()


UNWEIGHTED = Weights()
"""Every example and every class alike."""


def known_ids(ids: Tensor) -> Tensor:
    """Class ids with the ignored ones made 0, so that they can be used as an index."""
    return ids.masked_fill(ids == IGNORE_INDEX, 0)


def coefficients(targets: Targets, weights: Weights, num_classes: int, like: Tensor) -> Tensor:
    """Softmax targets as a matrix [..., K]: the loss of an example is −Σ_k coefficient_k log p̄_k."""
    if targets.ids is not None:
        dense = torch.nn.functional.one_hot(known_ids(targets.ids), num_classes).to(like.dtype)
    else:
        assert targets.dense is not None
        dense = targets.dense.to(like.dtype)
    if weights.smoothing:
        dense = dense * (1 - weights.smoothing) + weights.smoothing / num_classes
    return dense if weights.classes is None else dense * weights.classes.to(like.dtype)


def softmax_losses(log_probs: Tensor, targets: Targets, weights: Weights) -> Tensor:
    """Losses [...] of log-probabilities [..., K] under softmax targets.

        return -(coefficients(targets, weights, K, log_probs) * log_probs).sum(-1)

    Class ids need no matrix of coefficients: the label's own part, and one sum over the classes for the smoothing.
    """
    num_classes = log_probs.shape[-1]
    if targets.ids is None:
        return -(coefficients(targets, weights, num_classes, log_probs) * log_probs).sum(-1)
    ids = known_ids(targets.ids)
    own = log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if weights.classes is None:
        spread = log_probs.mean(-1)
    else:
        classes = weights.classes.to(log_probs.dtype)
        own, spread = own * classes[ids], log_probs @ classes / num_classes
    return -((1 - weights.smoothing) * own + weights.smoothing * spread)


def logit_losses(logits: Tensor, targets: Targets, weights: Weights) -> Tensor:
    """Losses [...] of logits [..., K] under softmax targets.

        return softmax_losses(torch.log_softmax(logits, -1), targets, weights)

    torch's own loss goes through memory less often. It has no gradients for the weights of classes.
    """
    if weights.classes is not None and weights.classes.requires_grad:
        return softmax_losses(torch.log_softmax(logits, -1), targets, weights)
    flat = logits.reshape(-1, logits.shape[-1])
    if targets.ids is not None:
        labels = targets.ids.flatten()
    else:
        assert targets.dense is not None
        labels = targets.dense.to(logits.dtype).reshape(flat.shape)
    classes = None if weights.classes is None else weights.classes.to(logits.dtype)
    options = {"weight": classes, "label_smoothing": weights.smoothing, "ignore_index": IGNORE_INDEX}
    losses = torch.nn.functional.cross_entropy(flat, labels, reduction="none", **options)
    return losses.view(logits.shape[:-1])


def dense_labels(targets: Targets, batch_shape: torch.Size, num_classes: int, like: Tensor) -> Tensor:
    """Sigmoid targets as a matrix of labels, [..., K]."""
    if targets.lists is not None:
        return targets.lists.dense(num_classes, like.dtype).view(*batch_shape, num_classes)
    if targets.ids is not None:
        return torch.nn.functional.one_hot(known_ids(targets.ids), num_classes).to(like.dtype)
    assert targets.dense is not None
    return targets.dense.to(like.dtype)


def reduce_losses(losses: Tensor, weights: Tensor, normaliser: Tensor, reduction: str) -> Tensor:
    """Weigh losses [...] and reduce them by "mean", "sum" or "none".

    The mean divides by the normaliser, Σ weights; over nothing it is 0 with zero gradients, not NaN: a rank without
    examples must not spoil a step.
    """
    # where, not a product alone: the loss of an example left out may be infinite.
    losses = torch.where(weights == 0, 0.0, losses * weights)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total * inverse(normaliser)


def inverse(normaliser: Tensor) -> Tensor:
    """1 / normaliser, and 1 where it is 0."""
    return 1 / torch.where(normaliser == 0, 1.0, normaliser)
