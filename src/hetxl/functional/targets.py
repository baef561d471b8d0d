"""Targets of losses, checked once and converted to one of three forms: class ids, a dense matrix, or lists of labels.
Also the weights and reductions of losses, which all implementations share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetxl.functional._torch import not_compiled
from hetxl.registry import Link

IGNORE_INDEX = -100
"""Class id of ignored examples, as in torch.nn.functional.cross_entropy."""


@dataclass(frozen=True)
class LabelLists:
    """The labels of each example as lists, without a [B, K] matrix; the label of every class not listed is 0.

    Attributes:
        examples: [n] int64, index of each entry's example in the flattened batch.
        classes: [n] int64, its class.
        values: [n] in [0, 1]; None for ones.
        batch: B, the number of examples.
    """

    examples: Tensor
    classes: Tensor
    values: Tensor | None
    batch: int

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int] | Tensor], device: torch.device | None = None) -> "LabelLists":
        """Create from a list (or 1-d integer tensor) of class ids per example."""
        rows = [torch.as_tensor(row, dtype=torch.int64, device=device).reshape(-1) for row in lists]
        lengths = torch.tensor([len(row) for row in rows], device=device, dtype=torch.int64)
        examples = torch.repeat_interleave(torch.arange(len(rows), device=device), lengths)
        classes = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)
        return cls(examples, classes, None, len(rows))

    @classmethod
    def from_sparse(cls, matrix: Tensor) -> "LabelLists":
        """Create from a sparse COO tensor [B, K] of labels."""
        matrix = matrix.coalesce()
        examples, classes = matrix.indices()
        return cls(examples, classes, matrix.values(), matrix.shape[0])

    def dense(self, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [B, K]."""
        out = torch.zeros(self.batch, num_classes, dtype=dtype, device=self.classes.device)
        values = torch.ones((), dtype=dtype, device=out.device) if self.values is None else self.values.to(dtype)
        values = values.expand(len(self.classes))
        # The values of a class that is listed twice add up, to at most 1.
        return out.index_put_((self.examples, self.classes), values, accumulate=True).clamp_(max=1)


@dataclass(frozen=True)
class Targets:
    """Checked targets, in exactly one of three forms.

    Attributes:
        ids: [...] int64 class ids, IGNORE_INDEX for ignored examples; or None.
        dense: [..., K] class probabilities (softmax) or labels in [0, 1] (sigmoid); or None.
        lists: labels as lists (sigmoid); or None.
    """

    ids: Tensor | None = None
    dense: Tensor | None = None
    lists: LabelLists | None = None


TargetsLike = Tensor | LabelLists | Sequence[Sequence[int] | Tensor]


def check_targets(
    targets: TargetsLike, batch_shape: torch.Size, num_classes: int, link: Link, ignore_index: int = IGNORE_INDEX
) -> Targets:
    """Return the targets in their form, or raise if they fit none.

    Args:
        targets: class ids [...] (both links: under the sigmoid an id stands for its one-hot row); a row of
            probabilities or 0/1 labels for each example, [..., K]; or for the sigmoid link lists of class ids, one list
            for each example, a sparse COO tensor [B, K] or a `LabelLists`.
        batch_shape: [...], the features' leading shape.
        num_classes: K
        ignore_index: another class id to ignore, in addition to −100.
    """
    if isinstance(targets, Tensor) and not targets.is_sparse:
        if targets.shape == batch_shape:
            return Targets(ids=_check_ids(targets, num_classes, ignore_index))
        if targets.shape == (*batch_shape, num_classes):
            if targets.is_complex():
                raise TypeError(f"targets must be real, found dtype {targets.dtype}")
            dense = targets if targets.is_floating_point() else targets.float()
            return Targets(dense=_in_unit(dense, f"rows of {'class probabilities' if link == 'softmax' else 'labels'}"))
        raise ValueError(
            f"targets must be class ids of shape {list(batch_shape)} or one row of {num_classes} values for each "
            f"example, {[*batch_shape, num_classes]}; found shape {list(targets.shape)}"
        )
    if isinstance(targets, Tensor) and targets.shape != (batch_shape.numel(), num_classes):
        raise ValueError(
            f"targets given as a sparse tensor must have shape {[batch_shape.numel(), num_classes]}, "
            f"found {list(targets.shape)}"
        )
    return Targets(lists=_check_lists(targets, batch_shape.numel(), num_classes, link))


def _check_ids(ids: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"targets given as class ids must be integers, found dtype {ids.dtype}; cast them with .long()")
    ids = ids.long()
    if ignore_index != IGNORE_INDEX:
        ids = ids.masked_fill(ids == ignore_index, IGNORE_INDEX)
    return _in_range(ids, num_classes)


def _check_lists(targets: TargetsLike, batch: int, num_classes: int, link: Link) -> LabelLists:
    if link != "sigmoid":
        raise TypeError('targets given as lists of labels are for link="sigmoid"; for link="softmax" give class ids')
    lists = targets if isinstance(targets, LabelLists) else _as_lists(targets)
    if lists.batch != batch:
        raise ValueError(f"targets holds lists for {lists.batch} examples and features has {batch}")
    values = None if lists.values is None else _in_unit(lists.values, "labels")
    return LabelLists(lists.examples, _in_range(lists.classes, num_classes, ignores=False), values, batch)


# Lists of varying length cause a graph break when compiled; `LabelLists` are tensors and do not.
@not_compiled
def _as_lists(targets: Tensor | Sequence[Sequence[int] | Tensor]) -> LabelLists:
    if isinstance(targets, Tensor):
        return LabelLists.from_sparse(targets)
    if isinstance(targets, list | tuple):
        return LabelLists.from_lists(targets)
    raise TypeError(f"targets must be a tensor, lists of class ids or LabelLists, found {type(targets).__name__}")


# The values must be checked, because an id out of range would give a finite loss. A compiled graph checks them in an
# operator that returns its argument, since it would drop an operator without a used result.
def _in_range(ids: Tensor, num_classes: int, ignores: bool = True) -> Tensor:
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return _checked_ids(ids, num_classes, ignores)
    if ignores:
        _check_range(ids, ids != IGNORE_INDEX, num_classes, f", and {IGNORE_INDEX} for examples to leave out")
    else:
        _check_range(ids, torch.ones_like(ids, dtype=torch.bool), num_classes, "")
    return ids


def _in_unit(values: Tensor, what: str) -> Tensor:
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return _checked_unit(values, what)
    _check_unit(values, what)
    return values


@torch.library.custom_op("hetxl::checked_ids", mutates_args=())
def _checked_ids(ids: Tensor, num_classes: int, ignores: bool) -> Tensor:
    return _in_range(ids, num_classes, ignores).clone()


@torch.library.custom_op("hetxl::checked_unit", mutates_args=())
def _checked_unit(values: Tensor, what: str) -> Tensor:
    return _in_unit(values, what).clone()


_checked_ids.register_fake(lambda ids, num_classes, ignores: torch.empty_like(ids))
_checked_unit.register_fake(lambda values, what: torch.empty_like(values))
# Gradients of soft targets pass through.
_checked_unit.register_autograd(lambda ctx, gradient: (gradient, None))


def _check_range(ids: Tensor, counted: Tensor, num_classes: int, also: str) -> None:
    if _can_look_at(ids):
        wrong = ((ids < 0) | (ids >= num_classes)) & counted
        allowed = f"allowed are 0 to {num_classes - 1}{also}"
        if ids.is_cuda:
            # Reading the values would wait for the stream. Indexing kernels fail at K, but accept −1 as the last class.
            torch._assert_async(~wrong.any(), f"targets holds a class id out of range; {allowed}")
        elif wrong.any():
            raise ValueError(f"targets holds the class id {int(ids[wrong].flatten()[0])}; {allowed}")


def _check_unit(values: Tensor, what: str) -> None:
    if _can_look_at(values) and not values.is_cuda:
        wrong = (values < 0) | (values > 1)
        if wrong.any():
            value = float(values[wrong].flatten()[0])
            raise ValueError(f"targets given as {what} must lie in [0, 1], found {value:g}")


def _can_look_at(values: Tensor) -> bool:
    """Return whether values can be read: not on the meta device, nor while a graph is exported."""
    return not (values.is_meta or torch.compiler.is_exporting())


REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Weights:
    """Weights of losses, with the meaning of torch.nn.functional.cross_entropy where it has the same option.

    Attributes:
        example: [...], factor of each example's loss.
        classes: [K], factor of each class's term of the loss; None for ones. For the softmax link the term of class k
            is −t_k log p̄_k, so with class ids this is a factor of the example.
        smoothing: ε, the share of the target that is spread evenly over all classes (softmax).
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
        """Return the factor of each example's loss, [...], 0 if it is ignored, and their sum, which divides the mean.

        For softmax with class ids, an example's factor is the weight of its class; with smoothing, the loss already
        contains the class weights.
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


UNWEIGHTED = Weights()  # all factors are 1


def known_ids(ids: Tensor) -> Tensor:
    """Return class ids with ignored ones set to 0, so that they can be used as an index."""
    return ids.masked_fill(ids == IGNORE_INDEX, 0)


def coefficients(targets: Targets, weights: Weights, num_classes: int, like: Tensor) -> Tensor:
    """Return softmax targets as a matrix [..., K]: the loss of an example is −Σ_k coefficient_k log p̄_k."""
    dense = dense_labels(targets, torch.Size(), num_classes, like)
    if weights.smoothing:
        dense = dense * (1 - weights.smoothing) + weights.smoothing / num_classes
    return dense if weights.classes is None else dense * weights.classes.to(like.dtype)


def softmax_losses(log_probs: Tensor, targets: Targets, weights: Weights) -> Tensor:
    """Return the losses [...] of log-probabilities [..., K] for softmax targets.

        return -(coefficients(targets, weights, K, log_probs) * log_probs).sum(-1)

    Class ids need no matrix of coefficients, only the label's term, and a sum over the classes for the smoothing.
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
    """Return the losses [...] of logits [..., K] for softmax targets.

        return softmax_losses(torch.log_softmax(logits, -1), targets, weights)

    torch's loss makes fewer passes over memory, but has no gradients for class weights.
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
    """Return sigmoid targets as a matrix of labels, [..., K]."""
    if targets.lists is not None:
        return targets.lists.dense(num_classes, like.dtype).view(*batch_shape, num_classes)
    if targets.ids is not None:
        return torch.nn.functional.one_hot(known_ids(targets.ids), num_classes).to(like.dtype)
    assert targets.dense is not None
    return targets.dense.to(like.dtype)


def reduce_losses(losses: Tensor, weights: Tensor, normaliser: Tensor, reduction: str) -> Tensor:
    """Weight losses [...] and reduce them by "mean", "sum" or "none".

    The mean divides by the normaliser, Σ weights. Without examples it is 0 with zero gradients, not NaN, so that a rank
    without examples does not spoil a step.
    """
    # `where`, not only a product, because the loss of an ignored example may be infinite.
    losses = torch.where(weights == 0, 0.0, losses * weights)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total * inverse(normaliser)


def inverse(normaliser: Tensor) -> Tensor:
    """Return 1 / normaliser, or 1 if the normaliser is 0."""
    return 1 / torch.where(normaliser == 0, 1.0, normaliser)
