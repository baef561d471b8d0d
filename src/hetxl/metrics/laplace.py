"""A last-layer Laplace posterior for a trained DET, with a prior chosen on held-out rows."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.metrics.records import evaluating, label_entries
from hetxl.metrics.scaling import summed_loss
from hetxl.nn import Head
from hetxl.nn.averaged import LaplaceHead

PRIORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Candidate prior variances of the logits."""


@torch.no_grad()
def fit_laplace(
    head: Head, features: Iterable[Tensor], held_out: Sequence[Tensor], targets: Tensor | LabelLists, *,
    rows: int | None = None,
) -> LaplaceHead:  # fmt: skip
    """Return a trained DET with a posterior over its last layer; the prior minimises the NLL of held-out rows.

    Args:
        head: a `DetHead` with a linear classifier, which the result shares.
        features: features of training rows, batches [b, D], read once.
        held_out: features of rows that the head was not trained on, batches [b, D].
        targets: targets of all held-out rows in order: class ids [n], −100 for ignored rows; for the sigmoid link also
            lists of labels.
        rows: number of training rows, if `features` has only a sample of them.
    """
    laplace = LaplaceHead.of(head)
    total = sum(map(len, held_out))
    labels = label_entries(targets, total, head.num_classes, head.link)
    if not int((labels.ids != IGNORE_INDEX).sum()):
        raise ValueError(f"targets must hold at least one example with a label, found none among {total}")
    with evaluating(laplace):
        laplace.measure(features, rows)
        losses = dict.fromkeys(PRIORS, 0.0)
        for prior in PRIORS:
            laplace.prior, first = prior, 0
            for batch in held_out:
                some = labels.of(first, first + len(batch)).to(batch.device)
                losses[prior] += float(summed_loss(laplace(batch), some, 1.0, head.link))
                first += len(batch)
        laplace.prior = min(losses, key=losses.__getitem__)
    return laplace
