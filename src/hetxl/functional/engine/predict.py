"""Prediction in blocks: averaged probabilities of all classes, or the top ones without a tensor of all."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetxl.functional import reference
from hetxl.functional.approximations import APPROXIMATIONS, approximate_log_probs
from hetxl.functional.distribution import LogitDistribution, Order, choose_order
from hetxl.functional.engine.evaluate import Evaluation
from hetxl.functional.engine.inputs import Inputs, batch_shape_of, gather_inputs
from hetxl.functional.engine.plan import DEFAULT_BUDGET
from hetxl.functional.engine.prune import (
    PILOTS,
    among_candidates,
    candidate_rows,
    choose_candidates,
    label_entropies_outside,
    pilot_probs,
    prunable,
)
from hetxl.functional.engine.rows import Gradients, row_block
from hetxl.functional.engine.setup import fusable, plan_for, product_precision
from hetxl.functional.engine.sigmoid import MeanSigmoid
from hetxl.functional.links import Link, sigmoid_entropy, softmax_entropy

METHODS = ("mc", "deterministic", *APPROXIMATIONS)

TOLERANCE = 5e-4
"""Probability that a prediction of the top classes may leave out."""


class Summary(NamedTuple):
    """A prediction for a batch [...].

    Attributes:
        log_probs: [..., K], or [..., k] for the top classes, most probable first.
        indices: [..., k], or None for all classes.
        entropy: [...], of the averaged probabilities.
        expected_entropy: [...], mean over the samples of the entropy of each.
        left_out: [...], estimated probability of classes that were not sampled; None when all were.
    """

    log_probs: Tensor
    indices: Tensor | None
    entropy: Tensor
    expected_entropy: Tensor
    left_out: Tensor | None


@torch.compiler.disable()
@torch.no_grad()
def mc_predict(
    distribution: LogitDistribution,
    z: Tensor | None,
    *,
    temperature: Tensor | float,
    link: Link,
    method: str = "mc",
    top_k: int | None = None,
    tolerance: float = TOLERANCE,
    order: Order | None = None,
    memory_budget: int | None = None,
) -> Summary:
    """Averaged probabilities, all or the top ones, with entropies; without gradients.

        probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
        return probs.topk(top_k)

    Args:
        distribution: over the logits, [..., K].
        z: [..., S, Q] or [S, Q] standard normals; None without noise or samples.
        temperature: τ
        link: "softmax" or "sigmoid"
        method: "mc", "deterministic", or one of `hetxl.functional.approximations`.
        top_k: only the k most probable classes.
        tolerance: with top_k, the probability that may be left out to save work; 0 samples every class.
        order: "samples" or "factors" to force one.
        memory_budget: bytes of working memory, see `plan`.
    """
    if method == "deterministic" or distribution.noise is None:
        distribution, z, method = distribution.without_noise(), None, "mc"
    shape = batch_shape_of(distribution, z)
    if not fusable(distribution, z) or shape.numel() == 0:
        order = order or choose_order(distribution, 1 if z is None else z.shape[-2])
        return _plain(distribution, z, temperature, link, method, top_k, order)
    inputs = gather_inputs(distribution, z, temperature)
    parts = list(_chunks(inputs, link, method, top_k, tolerance, order, memory_budget or DEFAULT_BUDGET))

    def joined(place: int) -> Any:
        """One column of all parts, in the shape of the batch; None where a prediction has none."""
        if parts[0][place] is None:
            return None
        column = torch.cat([part[place] for part in parts])
        return column.view(*shape, *column.shape[1:])

    return Summary(*(joined(place) for place in range(5)))


def _plain(
    distribution: LogitDistribution,
    z: Tensor | None,
    temperature: Tensor | float,
    link: Link,
    method: str,
    top_k: int | None,
    order: Order,
) -> Summary:
    """The reference evaluation, for what the blocks do not cover."""
    if method == "mc":
        log_probs, entropy, expected = reference.mc_predict(
            distribution, z, temperature=temperature, link=link, order=order
        )
    else:
        mean, factors = distribution.mean / temperature, distribution.factors / temperature
        log_probs, entropy = _with_entropy(*approximate_log_probs(method, mean, factors, link))
        expected = entropy
    indices = None
    if top_k is not None:
        log_probs, indices = log_probs.topk(top_k)
    return Summary(log_probs, indices, entropy, expected, None)


def _chunks(
    inputs: Inputs,
    link: Link,
    method: str,
    top_k: int | None,
    tolerance: float,
    order: Order | None,
    budget: int,
) -> Iterator[tuple[Any, ...]]:
    """The batch in chunks, so that with top_k no [B, K] tensor exists: the five columns of a `Summary` for each."""
    pruning = method == "mc" and top_k is not None and tolerance > 0 and prunable(inputs, top_k)
    rows = PILOTS if pruning else 3
    size = max(1, min(inputs.batch, 64, budget // (8 * rows * inputs.num_classes)))
    for start in range(0, inputs.batch, size):
        chunk = inputs.of_examples(slice(start, start + size))
        if pruning and top_k is not None:
            yield _pruned(chunk, link, top_k, tolerance, order, budget)
            continue
        log_probs, entropy, expected = _whole(chunk, link, method, order, budget)
        if top_k is None:
            yield log_probs, None, entropy, expected, None
        else:
            values, indices = log_probs.topk(top_k)
            yield values, indices, entropy, expected, None


def _whole(inputs: Inputs, link: Link, method: str, order: Order | None, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """log p̄ [n, K], entropy [n] and expected entropy [n] of all classes."""
    products = product_precision(inputs)
    if method != "mc":
        plan = plan_for(inputs, link, "factors", budget)
        log_p = inputs.temperature.new_empty(inputs.batch, inputs.num_classes)
        entropy = inputs.temperature.new_empty(inputs.batch)
        for start in range(0, inputs.batch, plan.batch_block):
            examples = slice(start, min(start + plan.batch_block, inputs.batch))
            block = row_block(inputs, examples, "factors", products, Gradients(inputs, frozenset()))
            rows = block.lift(slice(0, inputs.num_classes)).div_(inputs.temperature).permute(1, 2, 0)  # [n, P, K]
            found = approximate_log_probs(method, rows[:, 0], rows[:, 1:], link)
            log_p[examples], entropy[examples] = _with_entropy(*found)
        return log_p, entropy, entropy
    evaluation = Evaluation(inputs, plan_for(inputs, link, order, budget), products)
    if link == "softmax":
        log_p, expected = evaluation.softmax_log_probs(entropy=True)
        return log_p, softmax_entropy(log_p), expected
    log_p = inputs.temperature.new_empty(inputs.batch, inputs.num_classes)
    log_not_p = torch.empty_like(log_p)
    expected = inputs.temperature.new_zeros(inputs.batch)

    def visit(examples: slice, classes: slice, means: MeanSigmoid) -> None:
        log_p[examples, classes] = means.log_p.T
        log_not_p[examples, classes] = means.log_not_p.T
        assert means.entropy is not None
        expected[examples] += means.entropy.sum(0)

    evaluation.sigmoid(visit, entropy=True)
    return log_p, sigmoid_entropy(log_p, log_not_p), expected


def _pruned(
    inputs: Inputs, link: Link, top_k: int, tolerance: float, order: Order | None, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The top classes of a chunk from candidates; examples for which those would leave out too much get all classes.

    Entropies are those among the candidates, to which the classes left out would add at most −ρ log(ρ / K) for a share
    ρ; for the sigmoid link the other labels add theirs by the pilots.
    """
    products = product_precision(inputs)
    pilots = pilot_probs(inputs, products, link)
    found = choose_candidates(pilots, top_k, tolerance, link)
    few = among_candidates(inputs, candidate_rows(inputs, found.classes, products))
    log_probs, entropy, expected = _whole(few, link, "mc", "factors", budget)
    if link == "softmax":  # what is left out belongs to other classes
        log_probs = log_probs + (-found.left_out.clamp(max=0.5).unsqueeze(-1)).log1p()
    else:
        more, expected_more = label_entropies_outside(pilots, found.classes)
        entropy, expected = entropy + more, expected + expected_more
    values, places = log_probs.topk(top_k)
    indices, left_out = found.classes.gather(-1, places), found.left_out.clone()
    missing = (~found.enough).nonzero().flatten()
    if len(missing):
        all_probs, all_entropy, all_expected = _whole(inputs.of_examples(missing), link, "mc", order, budget)
        values[missing], indices[missing] = all_probs.topk(top_k)
        entropy[missing], expected[missing], left_out[missing] = all_entropy, all_expected, 0.0
    return values, indices, entropy, expected, left_out


def _with_entropy(log_p: Tensor, log_not_p: Tensor | None) -> tuple[Tensor, Tensor]:
    return log_p, softmax_entropy(log_p) if log_not_p is None else sigmoid_entropy(log_p, log_not_p)
