"""Operations of one example's sampled logits: by the paper's table with its constants, and counted on our modules."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from hetxl.functional.distribution import Order
from hetxl.studies.measure import HeadSize
from hetxl.studies.paper import figures

HEADS = {"HET": "het", "HET-XL": "het-xl"}
Label = Literal["HET", "HET-XL"]


def terms(label: str) -> list[list[str]]:
    """The terms of each operation of the paper's table, as products of letters: "DKS" is D·K·S."""
    return figures()["complexity"][label]


def evaluated(term: str, sizes: Mapping[str, int]) -> int:
    """The value of a product of letters."""
    return prod(sizes[letter] for letter in term)


def paper_operations(label: str, sizes: Mapping[str, int]) -> list[int]:
    """The multiplications of each operation of the paper's table, without dropping any term.

    Args:
        label: "HET" or "HET-XL".
        sizes: D, K, R and S.
    """
    return [sum(evaluated(term, sizes) for term in row) for row in terms(label)]


def line_in_samples(label: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The paper's total as a + b·S: a, b."""
    none, one = (sum(paper_operations(label, {**sizes, "S": samples})) for samples in (0, 1))
    return none, one - none


def crossing(first: Sequence[float], second: Sequence[float]) -> float | None:
    """S from which the second is above the first, both being a + b·S; None if they do not cross for S above 0.

    Args:
        first: a and b.
        second: a and b.
    """
    if second[1] == first[1]:
        return None
    samples = (first[0] - second[0]) / (second[1] - first[1])
    return samples if samples > 0 and second[1] > first[1] else None


def counted(label: str, size: HeadSize, samples: int, order: Order) -> int:
    """Floating-point operations in the matrix products of our module, for one example; nothing is computed.

    Args:
        label: "HET" or "HET-XL".
        size: of the head.
        samples: S
        order: "samples" first, as the paper does, or "factors" first.
    """
    head = size.build(HEADS[label], device="meta")
    features = torch.empty(1, size.features, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        distribution = head.logit_distribution(features)
        distribution.sample(torch.empty(1, samples, distribution.size, device="meta"), order)
    return counter.get_total_flops()


def predicted(label: str, size: HeadSize, samples: int, order: Order) -> int:
    """What `counted` should find: two for each multiplication in a product of matrices.

    Two linear maps make the scales, one the mean logits; then S draws of R factors go through W (samples first), or
    R + 1 rows go through W and are mixed S times (factors first).

    Args:
        label: "HET" or "HET-XL".
        size: of the head.
        samples: S
        order: "samples" or "factors".
    """
    features, classes, rank = size.features, size.classes, size.rank
    space = classes if label == "HET" else features  # N
    found = 2 * features * space + features * classes
    lift = features * classes if label == "HET-XL" else 0
    if order == "samples":
        found += samples * (rank * space + lift)
    else:
        found += (rank + 1) * lift + samples * (rank + 1) * classes
    return 2 * found
