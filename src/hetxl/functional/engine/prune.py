"""Prediction of the top classes without sampling all of them.

A few pilot samples go through the whole classifier. The classes that matter under one half of the pilots become the
candidates; how much probability falls outside of them under the other half, which had no part in choosing them,
estimates what is left out. Enough candidates are taken to keep that below a tolerance, and only they are sampled.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hetxl.functional.engine.inputs import Inputs
from hetxl.functional.engine.rows import Gradients, narrow, row_block
from hetxl.functional.links import Link
from hetxl.functional.noise import GaussianNoise

PILOTS = 16
"""Samples that see all classes: half to choose candidates, half to check them."""

ERRORS = 2.0
"""Standard errors by which the estimate of what is left out is raised."""

FEWEST, MOST = 128, 4096
"""Bounds on the number of candidates."""


class Candidates(NamedTuple):
    """Classes worth sampling for a block of examples.

    Attributes:
        classes: [n, C], by falling pilot probability.
        left_out: [n], estimated probability outside of them (softmax), or the largest pilot probability of any class
            outside of them (sigmoid).
        enough: [n], whether that is within the tolerance.
    """

    classes: Tensor
    left_out: Tensor
    enough: Tensor


def prunable(inputs: Inputs, top_k: int) -> bool:
    """Whether pruning can pay: enough classes and samples, and noise that can be had for single classes."""
    enough = inputs.num_classes >= 8 * max(FEWEST, top_k) and inputs.samples >= 4 * PILOTS
    return inputs.noise is not None and inputs.residual_kind == "rank1" and enough


def pilot_probs(inputs: Inputs, products: torch.dtype, link: Link) -> Tensor:
    """Probabilities of all classes under each pilot, [n, K, pilots], for a small block of examples."""
    assert inputs.z is not None
    few = replace(inputs, z=inputs.z[:, :PILOTS])
    rows = row_block(few, slice(0, few.batch), "samples", products, Gradients(few, frozenset()))
    logits = rows.lift(slice(0, few.num_classes)).div_(few.temperature)  # [K, n, pilots]
    return (logits.softmax(0) if link == "softmax" else logits.sigmoid_()).transpose(0, 1)


def choose_candidates(pilots: Tensor, top_k: int, tolerance: float, link: Link) -> Candidates:
    """Candidates for every example from the pilots' probabilities, [n, K, pilots]."""
    first, second = pilots[..., : PILOTS // 2].mean(-1), pilots[..., PILOTS // 2 :]
    most = min(MOST, first.shape[-1] // 4)
    order = first.topk(most, dim=-1).indices  # [n, most]
    checked = second.gather(1, order.unsqueeze(-1).expand(-1, -1, second.shape[-1]))  # [n, most, pilots / 2]
    if link == "softmax":
        # Left out by a cut after each, under each pilot; their mean, plus its error, since pilots are few.
        each = (1 - checked.cumsum(1)).clamp_(min=0)
        outside = each.mean(-1) + ERRORS * each.std(-1) / second.shape[-1] ** 0.5
        limit = tolerance
    else:
        # The largest probability behind each cut; it does no harm while it is well below the k-th best.
        second, checked = second.mean(-1), checked.mean(-1)
        rest = second.scatter(-1, order, 0.0).amax(-1, keepdim=True)
        behind = torch.cat((checked[:, 1:], rest), -1)
        outside = behind.flip(-1).cummax(-1).values.flip(-1)
        limit = 0.5 * checked.topk(top_k, -1).values[:, -1:]
    count = torch.arange(1, most + 1, device=order.device)
    good = (outside <= limit) & (count >= max(FEWEST, top_k))
    enough = good.any(-1)
    cut = torch.where(good, count, most).amin(-1)  # the first that will do
    size = int(cut[enough].max()) if bool(enough.any()) else max(FEWEST, top_k)
    return Candidates(order[:, :size], outside[:, size - 1], enough)


def label_entropies_outside(pilots: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Sigmoid: entropy and expected entropy of the labels that are no candidates, by the pilots; two of [n]."""
    mean = pilots.mean(-1)

    def outside(values: Tensor) -> Tensor:
        return values.sum(-1) - values.gather(-1, classes).sum(-1)

    return outside(_label_entropy(mean)), outside(_label_entropy(pilots).mean(-1))


def _label_entropy(probs: Tensor) -> Tensor:
    """Entropy of each label, in nats."""
    return -(torch.special.xlogy(probs, probs) + torch.special.xlog1py(1 - probs, -probs))


def candidate_rows(inputs: Inputs, classes: Tensor, products: torch.dtype) -> Tensor:
    """The rows of logits, factors-first, of each example's own candidates: [n, C, Q + 1] for classes [n, C]."""
    noise = inputs.noise
    assert noise is not None
    if inputs.mean is not None:
        mean = inputs.mean.gather(-1, classes)
    else:
        assert inputs.weight is not None
        assert inputs.features is not None
        weight = narrow(inputs.weight[classes], products)  # [n, C, D]
        mean = (weight @ narrow(inputs.features, products).unsqueeze(-1)).squeeze(-1)
        if inputs.bias is not None:
            mean = mean.to(inputs.wide) + inputs.bias[classes]
    if inputs.lift in ("identity", "hash"):
        columns = classes if inputs.buckets is None else inputs.buckets[classes]
        lifted = _at_columns(noise, columns).basis().mT  # [n, C, Q]
    else:
        table = inputs.weight if inputs.lift == "classifier" else inputs.projection
        assert table is not None
        lifted = narrow(table[classes], products) @ narrow(noise.basis(), products).mT
    return torch.cat((mean.to(inputs.wide).unsqueeze(-1), lifted.to(inputs.wide)), dim=-1)


def _at_columns(noise: GaussianNoise, columns: Tensor) -> GaussianNoise:
    """The noise of each example at its own columns [n, C] of the noise space."""

    def at(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.gather(-1, columns)

    factors = noise.factors
    if factors is not None and factors.dim() == 2:
        factors = factors.T[columns].mT  # [n, R, C]
    elif factors is not None:
        factors = factors.gather(-1, columns.unsqueeze(1).expand(-1, factors.shape[1], -1))
    return GaussianNoise(factors, at(noise.scale), at(noise.residual), noise.residual_kind)


def among_candidates(inputs: Inputs, rows: Tensor) -> Inputs:
    """Rows [n, C, P] of each example's candidates as an evaluation of its own: mean logits, and HET's noise on them."""
    return replace(
        inputs,
        features=None,
        weight=None,
        bias=None,
        mean=rows[..., 0],
        factors=rows[..., 1:].mT,
        scale=None,
        residual=None,
        projection=None,
        buckets=None,
        lift="identity",
    )
