"""Labels where this process has only some of the classes: which are here, and their logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional import Affine, LabelLists, Targets
from hetxl.nn.noisy import NoisyFeatures

PROBES = 8
"""Values of a tensor that are compared among processes."""

ROUNDING = 0.05
"""How far they may differ, relative to their size, where a network computed them, perhaps in half precision."""


def local_ids(ids: Tensor, classes: range) -> Tensor:
    """Class ids counted from the first class of a range, and −1 for those outside it."""
    inside = (ids >= classes.start) & (ids < classes.stop)
    return torch.where(inside, ids - classes.start, -1)


def local_labels(targets: Targets, classes: range) -> Targets:
    """The labels of a range of classes, for the sigmoid link; those of an ignored example are none."""
    if targets.dense is not None:
        return Targets(dense=targets.dense[..., classes.start : classes.stop])
    if targets.ids is not None:
        ids = targets.ids.flatten()
        everyone = torch.arange(len(ids), device=ids.device)
        lists = LabelLists(everyone, ids, None, len(ids))
    else:
        assert targets.lists is not None
        lists = targets.lists
    inside = (lists.classes >= classes.start) & (lists.classes < classes.stop)
    values = None if lists.values is None else lists.values[inside]
    found = LabelLists(lists.examples[inside], lists.classes[inside] - classes.start, values, lists.batch)
    return Targets(lists=found)


def label_logits(affine: Affine, noisy: NoisyFeatures, ids: Tensor) -> Tensor:
    """Sampled logits of one class of each example, divided by τ: [..., S].

    Args:
        affine: W and b.
        noisy: features with noise and normals.
        ids: [...], rows of W; 0 is put in place of those below.

    Returns:
        [..., S], in at least float32; 0 where an id is below 0.
    """
    known = ids.clamp(min=0)
    # Sparse: the gradient of a few rows is added to that of all rows, not laid out beside it.
    rows = F.embedding(known, affine.weight, sparse=True)  # [..., D]
    bias = None if affine.bias is None else affine.bias[known]
    return torch.where((ids < 0).unsqueeze(-1), 0.0, noisy.logits_at(rows, bias) / noisy.temperature)


def fingerprint(noisy: NoisyFeatures, targets: Targets) -> tuple[Tensor, Tensor]:
    """A few numbers of a batch, and how far each may differ among processes that see the same one.

    Labels and normals are the same to the bit. What a network computed may differ by its rounding.

    Returns:
        values: [n] float64
        tolerances: [n]
    """
    features, noise = noisy.features.detach(), noisy.noise
    exact = [features.new_tensor([features.numel()], dtype=torch.float64)]
    if targets.ids is not None:
        ids = targets.ids.flatten().double()
        exact.append((ids * torch.arange(1, len(ids) + 1, device=ids.device)).sum().view(1))
    elif targets.lists is not None:
        exact.append(((targets.lists.examples + 1) * (targets.lists.classes + 1)).sum().double().view(1))
    if noisy.z is not None:
        exact.append(_probe(noisy.z.detach()))
    seen = [features, torch.as_tensor(noisy.temperature, device=features.device).detach()]
    if targets.dense is not None:
        seen.append(targets.dense)
    if noise is not None:
        seen += [values.detach() for values in (noise.factors, noise.scale, noise.residual) if values is not None]
    near = [_probe(values) for values in seen]
    sizes = [values.square().mean().sqrt().expand(len(values)) for values in near]
    values = torch.cat(exact + near)
    return values, torch.cat([torch.zeros_like(part) for part in exact] + [ROUNDING * size for size in sizes])


def _probe(values: Tensor) -> Tensor:
    """Some of the values, as many whatever their number, in float64."""
    values = values.flatten()
    if not len(values):
        return values.new_zeros(PROBES, dtype=torch.float64)
    return values[torch.linspace(0, len(values) - 1, PROBES, device=values.device).long()].double()
