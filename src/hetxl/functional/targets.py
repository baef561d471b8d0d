"""What a loss accepts as targets, checked once at the border and brought to one of two forms: ids or a dense matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetxl.functional.links import Link

IGNORE_INDEX = -100
"""Class id of examples that count for nothing, as in torch.nn.functional.cross_entropy."""


@dataclass(frozen=True)
class Targets:
    """Checked targets, in exactly one of two forms.

    Attributes:
        ids: [...] int64 class ids, IGNORE_INDEX where an example does not count; or None.
        dense: [..., K] class probabilities (softmax) or labels in [0, 1] (sigmoid); or None.
    """

    ids: Tensor | None = None
    dense: Tensor | None = None


def check_targets(targets: Tensor, batch_shape: torch.Size, num_classes: int, link: Link) -> Targets:
    """Tell which form the targets have and refuse what fits none.

    Args:
        targets: class ids [...] (both links: under the sigmoid an id stands for its one-hot row), or a row of
            probabilities or 0/1 labels for each example, [..., K].
        batch_shape: [...], the features' leading shape.
        num_classes: K
        link: "softmax" or "sigmoid"
    """
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor, found {type(targets).__name__}")
    if targets.shape == batch_shape:
        return Targets(ids=_check_ids(targets, num_classes))
    if targets.shape == (*batch_shape, num_classes):
        return Targets(dense=_check_dense(targets, link))
    raise ValueError(
        f"targets must be class ids of shape {list(batch_shape)} or one row of {num_classes} values for each example, "
        f"{[*batch_shape, num_classes]}; found shape {list(targets.shape)}"
    )


def _check_ids(ids: Tensor, num_classes: int) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"targets given as class ids must be integers, found dtype {ids.dtype}; cast them with .long()")
    ids = ids.long()
    if _can_look_at(ids):
        wrong = ((ids < 0) | (ids >= num_classes)) & (ids != IGNORE_INDEX)
        if wrong.any():
            value = int(ids[wrong].flatten()[0])
            raise ValueError(
                f"targets holds the class id {value}; allowed are 0 to {num_classes - 1}, "
                f"and {IGNORE_INDEX} for examples to leave out"
            )
    return ids


def _check_dense(dense: Tensor, link: Link) -> Tensor:
    if dense.is_complex():
        raise TypeError(f"targets must be real, found dtype {dense.dtype}")
    if not dense.is_floating_point():
        dense = dense.float()
    if _can_look_at(dense):
        wrong = (dense < 0) | (dense > 1)
        if wrong.any():
            value = float(dense[wrong].flatten()[0])
            what = "class probabilities" if link == "softmax" else "labels"
            raise ValueError(f"targets given as rows of {what} must lie in [0, 1], found {value:g}")
    return dense


def _can_look_at(values: Tensor) -> bool:
    """Whether reading the values now is possible and costs no wait.

    Not while a graph is being captured, nor on the meta device. On CUDA a look would stall the stream, and its own
    indexing kernels already stop at an id out of range.
    """
    return not torch.compiler.is_compiling() and values.device.type not in ("meta", "cuda")
