"""The loss of a converted model of transformers, from labels as transformers and its Trainer give them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.integrations.layer import HeadLayer

ROW_SUM = 0.01
"""How far from 1 the sum of a row of class probabilities may be, as in half precision."""


def check_one_class(labels: Tensor, num_classes: int) -> None:
    """Raise for rows [..., K] of several labels: transformers takes all rows for those, where nothing else is said."""
    if not labels.is_floating_point() or labels.shape[-1:] != (num_classes,):
        return
    sums = labels.float().sum(-1)
    wrong = sums[(sums - 1).abs() > ROW_SUM]
    if len(wrong):
        raise ValueError(
            f"labels have a row that sums to {float(wrong[0]):g}, not to 1 as the probabilities of one class do. For "
            'any number of labels set config.problem_type="multi_label_classification", or link="sigmoid", when the '
            'model is converted: hetxl.convert(model, link="sigmoid"). To train a softmax on them: link="softmax"'
        )


def labels_loss(head: HeadLayer, rows: Tensor, outputs: Tensor | None, labels: Tensor, count: Any) -> Tensor:
    """The mean loss over the labels, or their sum over a count of them; from the outputs where those are there.

    Args:
        head: of the model.
        rows: [..., D]
        outputs: of the head for them, [..., K], or None.
        labels: class ids [...], or a row for each example, [..., K].
        count: entries of the labels of all batches that a step accumulates, as Trainer counts; None for the mean.
    """
    reduction = "mean" if count is None else "sum"
    in_rows = labels.shape == (*rows.shape[:-1], head.num_classes)
    if in_rows and count is not None:
        count = count / head.num_classes  # a row is one label
    if outputs is None:
        total = head(rows, labels, rows=True, reduction=reduction)
    elif head.link == "softmax":
        flat = labels.flatten(0, -2).float() if in_rows else labels.flatten()
        total = F.cross_entropy(outputs.flatten(0, -2).float(), flat, reduction=reduction)
    else:
        total = F.binary_cross_entropy_with_logits(outputs.float(), labels.float(), reduction="none").sum(-1)
        total = total.mean() if count is None else total.sum()
    return total if count is None else total / torch.as_tensor(count, device=total.device)
