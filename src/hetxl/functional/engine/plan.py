"""Plan an evaluation before it starts: choose the implementation and the sizes of the blocks."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hetxl._checks import integer_at_least, one_of
from hetxl.functional import reference
from hetxl.functional.distribution import ORDERS, LogitDistribution, Order
from hetxl.functional.engine.inputs import Inputs
from hetxl.registry import Link

DEFAULT_BUDGET = 448 * 2**20
"""Bytes for the engine's working memory: blocks of rows, their gradients and the sampled logits."""

CACHED_LOGITS = 2**21
"""Sampled logits worked on at a time: few enough to stay in a processor's cache from one operation to the next."""

GROUPED_ROWS = 512  # rows at which a product with W becomes efficient; more do not help

LiftCost = Literal["product", "copy"]
OTHERS: dict[str, Any] = {"reference": reference}
"""Implementations beside the blocks, by name: modules with the four primitives, as `hetxl.functional.reference` has."""
IMPLS = ("auto", "blocked", *OTHERS)


def choose_impl(impl: str, distribution: LogitDistribution, z: Tensor | None) -> Any:
    """Return the module of `OTHERS` that computes an evaluation, or None for evaluation in blocks.

    "auto" chooses blocks wherever they cover the case, and the reference otherwise; other names force an
    implementation. A kernel for GPUs would be one more entry in `OTHERS`, which "auto" chooses here.
    """
    one_of("impl", impl, IMPLS)
    if impl in OTHERS:
        return OTHERS[impl]
    uncovered = ""
    if distribution.opaque:
        uncovered = "noise through a classifier that is not linear"
    elif z is not None and z.requires_grad:
        uncovered = "normals that require a gradient"
    elif torch.compiler.is_exporting():
        uncovered = "graphs that are being exported, which must hold plain operations"
    if uncovered and impl == "blocked":
        raise ValueError(f'impl="blocked" does not cover {uncovered}; use impl="auto" or impl="reference"')
    return reference if uncovered else None


@dataclass(frozen=True)
class Plan:
    """The choices for an evaluation and its expected cost. Printing the plan shows the reasons.

    Attributes:
        order: "samples" or "factors": which of them are lifted.
        rows: P, rows of logits for each example: S or Q + 1.
        batch_block: number of examples whose rows are in memory at once.
        group: number of examples whose sampled logits are in memory at once.
        sample_block: number of samples whose logits are in memory at once.
        class_block: number of classes whose rows are in memory at once; K for all.
        passes: 1, or 2 for two passes over the classes: one for the normalisers, one for the gradients.
        flops: floating-point operations of loss and gradients, multiplications and additions counted separately.
        bytes: working memory beyond inputs and gradients.
        budget: the limit on `bytes`.
        sizes: B, D, K, N, Q and S of the evaluation.
    """

    order: Order
    rows: int
    batch_block: int
    group: int
    sample_block: int
    class_block: int
    passes: int
    flops: int
    bytes: int
    budget: int
    sizes: dict[str, int]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={value:,}" for name, value in self.sizes.items())
        lifted = f"{self.rows:,} rows an example go through the lift"
        classes = "all classes" if self.class_block >= self.sizes["K"] else f"{self.class_block:,} classes"
        return (
            f"{self.order} first for {sizes}: {lifted}; blocks of {self.batch_block:,} examples and {classes}, sampled "
            f"logits of {self.group:,} × {self.sample_block:,} samples, {self.passes} pass"
            f"{'es' if self.passes > 1 else ''} over the classes; {self.flops / 1e9:,.1f} GFLOP, "
            f"{self.bytes / 2**20:,.0f} of {self.budget / 2**20:,.0f} MiB"
        )


def plan(
    batch: int,
    in_features: int,
    num_classes: int,
    noise_features: int,
    size: int,
    num_samples: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    linear: bool = True,
    lift: LiftCost = "product",
    link: Link = "softmax",
    order: Order | None = None,
    memory_budget: int | None = None,
) -> Plan:
    """Choose the order of evaluation and the sizes of its blocks.

    Args:
        batch: B
        in_features: D
        num_classes: K
        noise_features: N; 0 without noise.
        size: Q, rows of the basis; 0 without noise.
        num_samples: S
        dtype: dtype of the features; sums are at least float32.
        device: on CPUs a block of samples fits in the cache; on other devices it fills the budget.
        linear: whether the lift is known to be linear; otherwise the order is "samples".
        lift: "product" for a lift through W or W′, "copy" for HET and HET-H, whose lift costs nothing.
        order: an order to force; None for the cheaper one.
        memory_budget: bytes of working memory [default: 448 MiB]. A block has at least one example and one class.
    """
    budget = DEFAULT_BUDGET if memory_budget is None else integer_at_least("memory_budget", memory_budget, 1)
    if order is not None:
        one_of("order", order, ORDERS)
        if order == "factors" and not linear:
            raise ValueError('order="factors" needs a linear classifier; this one is opaque: use order="samples"')
    if not size:
        order = "samples"
    width = 8 if dtype == torch.float64 else 4
    samples = num_samples if size else 1
    lift_row = (noise_features or in_features) * num_classes if lift == "product" else num_classes
    mixing = samples * (size + 1) * num_classes
    cost = {"samples": samples * lift_row, "factors": (size + 1) * lift_row + mixing}
    if lift == "copy":  # drawing in logit space costs as much as mixing, and its backward pass costs more
        cost["samples"] += samples * max(size - 1, 0) * num_classes
    if order is None:
        prefers_factors = cost["factors"] < cost["samples"] or (lift == "copy" and samples > size)
        order = "factors" if linear and size and prefers_factors else "samples"
    rows = size + 1 if order == "factors" else samples
    blocks = _blocks(order, link, batch, num_classes, rows, samples, width, budget, torch.device(device).type == "cpu")
    # Forward in each pass, backward to the rows and to W; in HET and HET-H only the mean logits go through W.
    products = batch * in_features * num_classes if lift == "copy" else batch * rows * lift_row
    flops = 2 * ((2 + blocks.passes) * products)
    if order == "factors" or lift == "copy":
        flops += 2 * (1 + blocks.passes) * batch * mixing
    sizes = {"B": batch, "D": in_features, "K": num_classes, "N": noise_features, "Q": size, "S": num_samples}
    return Plan(order, rows, flops=flops, budget=budget, sizes=sizes, **blocks._asdict())


def plan_for(inputs: Inputs, link: Link, order: Order | None = None, memory_budget: int | None = None) -> Plan:
    """Return the plan for given inputs."""
    first, noise = inputs.mean.first, (inputs.noise_features, inputs.noise_size, inputs.samples)
    copied = inputs.noise is not None and inputs.noise.lift.kind in ("identity", "hash")
    lift: LiftCost = "copy" if copied else "product"
    options = {"lift": lift, "link": link, "order": order, "memory_budget": memory_budget}
    sizes = (inputs.batch, first.shape[-1], inputs.num_classes, *noise)
    return plan(*sizes, dtype=first.dtype, device=first.device, **options)


class _Blocks(NamedTuple):
    batch_block: int
    group: int
    sample_block: int
    class_block: int
    passes: int
    bytes: int


def _blocks(
    order: Order, link: Link, batch: int, classes: int, rows: int, samples: int, width: int, budget: int, cached: bool
) -> _Blocks:
    """Return the sizes of the blocks and their bytes."""
    batch, samples = max(batch, 1), max(samples, 1)
    by_rows = min(batch, -(-GROUPED_ROWS // rows))
    if order == "samples":
        # The rows are the sampled logits: all those of an example at once, modified in place.
        column = width * rows * (2 if link == "sigmoid" else 1)  # bytes for one class of one example
        fitting = budget // (column * classes)
        worthwhile = min(batch, max(by_rows, CACHED_LOGITS // (classes * rows)))
        # With fewer than 64 rows at once, reading W would limit the speed.
        if fitting >= min(worthwhile, -(-64 // rows)):
            block = max(1, min(worthwhile, fitting))
            return _Blocks(block, block, samples, classes, 1, column * classes * block)
        class_block = min(classes, max(1, budget // (column * by_rows)))
        passes = 1 if link == "sigmoid" else 2
        return _Blocks(by_rows, by_rows, samples, class_block, passes, column * class_block * by_rows)

    if link == "sigmoid":  # classes are independent: one pass computes all samples of a block
        sampled = 3 * width * max(CACHED_LOGITS, samples)
        fitting = max(budget - sampled, 0) // (width * classes * rows)
        block = max(1, min(by_rows, fitting))
        class_block = classes if fitting >= 1 else max(1, (budget - sampled) // (width * rows))
        return _Blocks(block, 1, samples, class_block, 1, sampled + width * class_block * block * rows)
    # Use whole vectors of samples: reductions over the classes are several times slower for other widths.
    sample_block = min(samples, max(32, CACHED_LOGITS // classes // 32 * 32) if cached else samples)
    group = max(1, min(batch, CACHED_LOGITS // (classes * sample_block)))
    shared = width * classes * group * (2 * rows + sample_block)  # a copy of the rows, their gradients, the logits
    fitting = (budget - shared) // (width * classes * rows)
    if fitting >= group:
        block = min(max(group, min(by_rows, fitting) // group * group), batch)
        return _Blocks(block, group, sample_block, classes, 1, shared + width * classes * block * rows)
    # The rows of one example do not fit: process the classes in blocks, in two passes.
    column = width * (3 * rows + sample_block)
    class_block = min(classes, max(1, budget // column))
    return _Blocks(1, 1, sample_block, class_block, 2, column * class_block)
