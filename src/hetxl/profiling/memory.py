"""Estimate the memory to train a classifier, and the number of classes that fit into a given memory.

    W and b          width · K · (D + 1)
    their gradients  the same; with sparse gradients three times the rows of the active classes
    moments          twice the size of W and b (Adam)
    blocks           the working memory of the loss, see `hetxl.functional.plan`
    index            retrieved classifier: a copy of the rows, and their ids

Everything grows with K except the blocks, which are limited by the memory budget.
"""

from dataclasses import dataclass

from hetxl._checks import integer_at_least, one_of
from hetxl.functional import plan

CLASSIFIERS = ("linear", "sampled", "retrieved")

TOUCHED = 3
"""Copies of the active rows with sparse gradients: the gradient, its sorted copy, and the step."""

INDEX_BYTES = 8
"""Bytes of a class's id in the index."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step, by purpose."""

    weights: int  # W and b
    gradients: int
    moments: int  # moments of the optimiser
    blocks: int  # working memory of the loss
    index: int  # index of a retrieved classifier

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.weights + self.gradients + self.moments + self.blocks + self.index


def training_memory(
    in_features: int,
    num_classes: int,
    *,
    classifier: str = "linear",
    batch: int = 256,
    samples: int = 16,
    size: int = 51,
    active: int = 4096,
    sparse: bool = False,
    moments: int = 2,
    width: int = 4,
    memory_budget: int | None = None,
) -> Memory:
    """Return the memory of a training step of a head with a "linear", "sampled" or "retrieved" classifier, without the
    backbone.

    Args:
        samples: S; 1 for DET.
        size: Q, rows of the noise's basis, R + 1 with the rank-1 residual; 0 for DET.
        active: number of active classes in addition to the batch's labels; None for all classes.
        moments: number of tensors like W in the optimiser: 2 for Adam, 1 for SGD with momentum.
        width: bytes per number.
        memory_budget: memory budget of the loss, see `hetxl.functional.plan`.
    """
    one_of("classifier", classifier, CLASSIFIERS)
    for name, value in {"in_features": in_features, "num_classes": num_classes, "batch": batch}.items():
        integer_at_least(name, value, 1)
    row = width * (in_features + 1)
    few = min(num_classes, active + batch)
    looked_at = num_classes if classifier == "linear" else few
    blocks = plan(
        batch, in_features, looked_at, in_features if size else 0, size, samples, memory_budget=memory_budget
    ).bytes
    touched = TOUCHED * few * row if classifier != "linear" else 0
    return Memory(
        weights=num_classes * row,
        gradients=touched if sparse and classifier != "linear" else num_classes * row + touched,
        moments=moments * num_classes * row,
        blocks=blocks,
        index=num_classes * (row + INDEX_BYTES) if classifier == "retrieved" else 0,
    )


def largest_num_classes(in_features: int, memory: int, **options: object) -> int:
    """Return the largest K whose training fits into `memory` bytes, or 0; options are those of `training_memory`."""
    fits, beyond = 0, 1
    while training_memory(in_features, beyond, **options).total <= memory:  # pyright: ignore[reportArgumentType]
        fits, beyond = beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        total = training_memory(in_features, middle, **options).total  # pyright: ignore[reportArgumentType]
        fits, beyond = (middle, beyond) if total <= memory else (fits, middle)
    return fits
