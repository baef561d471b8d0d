"""A last-layer Laplace posterior of a trained DET, its prior chosen on held-out rows."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.metrics.records import evaluating, label_entries
from hetxl.metrics.scaling import summed_loss
from hetxl.nn import Head
from hetxl.nn.averaged import LaplaceHead

PRIORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Prior variances of the logits to choose from."""


@torch.no_grad()
def fit_laplace(
    head: Head, features: Iterable[Tensor], held_out: Sequence[Tensor], targets: Tensor | LabelLists, *,
    rows: int | None = None,
) -> LaplaceHead:  # fmt: skip
    """Return a trained DET with a posterior over its last layer; the prior has the lowest NLL of held-out rows.

    Args:
        head: a `DetHead` with a linear classifier, which the result shares.
        features: of training rows, batches [b, D]; read once.
        held_out: of rows that it was not trained on, batches [b, D].
        targets: of all held-out rows in their order: class ids [n], −100 for those to leave out; for the sigmoid link
            also lists of labels.
        rows: the number of training rows, where `features` are of some of them.
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
