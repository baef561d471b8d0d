"""The loss over a few active classes that stand for all of them.

The softmax needs Σ_k exp(u_k). Classes that are surely among the active ones stand for themselves; one that was drawn
stands for as many as its expected number of draws says, so that

    Σ_{k active} exp(u_k + offset_k)        with offset 0, or log(times drawn) − log(expected times)

has Σ_k exp(u_k) for its mean. Under the sigmoid exp(offset_k) is a weight of the class's binary cross-entropy.
"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hetxl.functional import IGNORE_INDEX, Affine, LabelLists, Targets, Weights
from hetxl.nn.noisy import NoisyFeatures


class Active(NamedTuple):
    """Classes that a batch's loss looks at.

    Attributes:
        classes: [C] ids, ascending, each once; the batch's labels are all among them.
        offsets: [C] the logarithm of how many classes each stands for; 0 for itself.
    """

    classes: Tensor
    offsets: Tensor


class HasRows(Protocol):
    """A linear classifier that can give a few rows of W and b."""

    def rows(self, classes: Tensor) -> tuple[Tensor, Tensor | None]:
        """[C, D], and [C] or None."""
        ...


def labels_of(targets: Targets) -> Tensor:
    """The classes that occur in a batch's targets, ascending."""
    if targets.dense is not None:
        return (targets.dense.reshape(-1, targets.dense.shape[-1]) != 0).any(0).nonzero().squeeze(-1)
    ids = targets.ids if targets.lists is None else targets.lists.classes
    assert ids is not None
    found = ids.unique()
    return found[found != IGNORE_INDEX]


def with_drawn(labels: Tensor, drawn: Tensor, log_q: Tensor, draws: int) -> Active:
    """The labels, each for itself, and what was drawn among the others.

    A class that was drawn and is a label does not count twice: what stands for the classes that are no labels is the
    draws among those.

    Args:
        labels: [L] ascending, each once.
        drawn: [n] ids, with repetition.
        log_q: [n] log-probability of each in one draw.
        draws: how many draws there were; n may be fewer, where some were thrown away.
    """
    classes, place, times = drawn.unique(return_inverse=True, return_counts=True)
    log_q = torch.empty(len(classes), dtype=log_q.dtype, device=log_q.device).scatter_(0, place, log_q)
    others = ~torch.isin(classes, labels, assume_unique=True)
    offsets = times[others].to(log_q.dtype).log() - log_q[others] - math.log(max(draws, 1))
    together = torch.cat((labels, classes[others]))
    order = together.argsort()
    return Active(together[order], torch.cat((offsets.new_zeros(len(labels)), offsets))[order])


def active_nll(
    classifier: HasRows, noisy: NoisyFeatures, targets: Targets, active: Active, reduction: str, weights: Weights
) -> Tensor:
    """Negative log-likelihood of the targets among the active classes: a scalar, or [...].

    Args:
        classifier: gives rows of W and b.
        noisy: the features with their noise.
        targets: whose labels are all active.
        active: the classes.
        reduction: "mean", "sum" or "none".
        weights: of examples and classes.
    """
    rows, bias = classifier.rows(active.classes)
    offsets = active.offsets.to(rows.dtype)
    class_weights = None if weights.classes is None else weights.classes[active.classes]
    if noisy.link == "softmax":
        # The logits are divided by τ after this, which must not reach what a class stands for.
        shift = noisy.temperature * offsets
        bias = shift if bias is None else bias + shift
    else:
        counts = offsets.exp()
        class_weights = counts if class_weights is None else class_weights * counts
    few = Weights(weights.example, class_weights)
    logits = noisy.through(Affine(rows, bias))
    return noisy.nll(logits, among(targets, active.classes), reduction, few)


def among(targets: Targets, classes: Tensor) -> Targets:
    """Targets with their classes counted among those of [C], ascending."""

    def places(ids: Tensor) -> Tensor:
        return torch.searchsorted(classes, ids)

    if targets.lists is not None:
        lists = targets.lists
        return Targets(lists=LabelLists(lists.examples, places(lists.classes), lists.values, lists.batch))
    if targets.dense is not None:
        return Targets(dense=targets.dense[..., classes])
    assert targets.ids is not None
    left_out = targets.ids == IGNORE_INDEX
    return Targets(ids=places(targets.ids.masked_fill(left_out, 0)).masked_fill(left_out, IGNORE_INDEX))


def check_few(noisy: NoisyFeatures, targets: Targets, weights: Weights) -> None:
    """Refuse what has no meaning where not all classes are looked at in one process."""
    if noisy.link == "softmax" and targets.ids is None:
        raise ValueError(
            "targets must be class ids: rows of probabilities over all classes need a classifier that looks at all of "
            "them in one process, such as LinearClassifier"
        )
    if weights.smoothing:
        raise ValueError(
            f"label_smoothing={weights.smoothing} spreads over all classes, which this classifier does not look at in "
            "one process; leave it out, or use LinearClassifier"
        )


class _SparseRows(torch.autograd.Function):
    """table[index] with a sparse gradient: of millions of rows, only those that were read."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        """[C, ...] rows."""
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """A sparse tensor like the table."""
        (index,) = ctx.saved_tensors
        found = torch.sparse_coo_tensor(index.unsqueeze(0), gradients[0], ctx.shape, check_invariants=False)
        return found, None


def gather_rows(table: Tensor, index: Tensor, sparse: bool) -> Tensor:
    """table[index], rows [..., D] at [...]; with `sparse` the gradient is sparse, for torch.optim.SparseAdam."""
    if not sparse:
        return table[index]
    return _SparseRows.apply(table, index.flatten()).unflatten(0, index.shape)
