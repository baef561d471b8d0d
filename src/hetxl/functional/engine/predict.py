"""Prediction in blocks: averaged probabilities of all classes, or the top ones without a tensor of all."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetxl.functional import reference
from hetxl.functional._torch import not_compiled, slices
from hetxl.functional.distribution import LogitDistribution, Order
from hetxl.functional.engine import top_k as pruning
from hetxl.functional.engine.blocked import Evaluation, mixing_of
from hetxl.functional.engine.inputs import Inputs, batch_shape_of, gather_inputs
from hetxl.functional.engine.logit_rows import Context, row_block
from hetxl.functional.engine.plan import DEFAULT_BUDGET, Impl, choose_impl, plan_for
from hetxl.functional.engine.sigmoid import MeanSigmoid, mean_sigmoid_rows
from hetxl.functional.links import APPROXIMATIONS, approximate_log_probs, sigmoid_entropy, softmax_entropy
from hetxl.registry import Link

METHODS = ("mc", "deterministic", *APPROXIMATIONS)

TOLERANCE = 5e-4
"""How far off the probabilities of the top classes may be, by estimate, when not all classes are sampled."""


class Summary(NamedTuple):
    """A prediction for a batch [...].

    Attributes:
        log_probs: [..., K], or [..., k] for the top classes, most probable first.
        indices: [..., k], or None for all classes.
        entropy: [...], of the averaged probabilities.
        expected_entropy: [...], mean over the samples of the entropy of each.
        left_out: [...], estimated probability of classes that were not sampled by themselves; None when all were.
    """

    log_probs: Tensor
    indices: Tensor | None
    entropy: Tensor
    expected_entropy: Tensor
    left_out: Tensor | None


@not_compiled
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
    impl: Impl = "auto",
) -> Summary:
    """Averaged probabilities, all or the top ones, with entropies; without gradients.

        probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
        return probs.topk(top_k)

    Args beside those of `mc_log_probs`:
        method: "mc", "deterministic", or one of `hetxl.functional.APPROXIMATIONS`.
        top_k: only the k most probable classes.
        tolerance: with top_k, how far off their probabilities may be, by estimate, to save work; 0 samples every class.
    """
    if method == "deterministic" or distribution.noise is None:
        distribution, z, method = distribution.without_noise(), None, "mc"
    shape = batch_shape_of(distribution, z)
    if choose_impl(impl, distribution, z) == "reference" or shape.numel() == 0:
        if method == "mc":
            options = {"temperature": temperature, "link": link, "order": order}
            log_probs, entropy, expected = reference.mc_predict(distribution, z, **options)
        else:
            mean, factors = distribution.mean / temperature, distribution.factors / temperature
            log_probs, entropy = _with_entropy(*approximate_log_probs(method, mean, factors, link))
            expected = entropy
        log_probs, indices = (log_probs, None) if top_k is None else log_probs.topk(top_k)
        return Summary(log_probs, indices, entropy, expected, None)
    inputs = gather_inputs(distribution, z, temperature)
    return joined(list(_chunks(inputs, link, method, top_k, tolerance, order, memory_budget or DEFAULT_BUDGET)), shape)


def joined(parts: Sequence[tuple[Any, ...]], shape: torch.Size) -> Summary:
    """The summaries of parts of a flat batch as one of a batch [...]; a column that the first has not is None."""
    columns: list[Any] = []
    for column in zip(*parts, strict=True):
        together = None if column[0] is None else torch.cat(column)
        # one example alone has a shape of ()
        columns.append(None if together is None else together.view((*shape, *together.shape[1:])))
    return Summary(*columns)


def _chunks(
    inputs: Inputs, link: Link, method: str, top_k: int | None, tolerance: float, order: Order | None, budget: int
) -> Iterator[tuple[Any, ...]]:
    """The batch in chunks, so that with top_k no [B, K] tensor exists: the five columns of a `Summary` for each."""
    prunes = method == "mc" and top_k is not None and tolerance > 0 and pruning.prunable(inputs, top_k, budget)
    each = pruning.bytes_for(inputs) if prunes else 16 * inputs.num_classes
    size = max(1, min(inputs.batch, 8 if prunes else 64, budget // (2 * each)))
    # Memory that all chunks share, of rows [n, K, P] and pilots: pages that are new cost more than the work on them.
    widths = (inputs.noise_size + 1, pruning.PILOTS) if prunes else ()
    scratch = [inputs.temperature.new_empty(size, inputs.num_classes, width) for width in widths]
    for chunk in map(inputs.of_examples, slices(inputs.batch, size)):
        if prunes and top_k is not None:
            yield _pruned(chunk, link, top_k, tolerance, order, budget, scratch)
            continue
        log_probs, *entropies = _whole(chunk, link, method, order, budget)
        yield *((log_probs, None) if top_k is None else log_probs.topk(top_k)), *entropies, None


def _whole(inputs: Inputs, link: Link, method: str, order: Order | None, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """log p̄ [n, K], entropy [n] and expected entropy [n] of all classes."""
    products = inputs.product_precision()
    if method != "mc":
        plan = plan_for(inputs, link, "factors", budget)
        log_p = inputs.temperature.new_empty(inputs.batch, inputs.num_classes)
        entropy = inputs.temperature.new_empty(inputs.batch)
        context = Context.of(inputs, "factors", products)
        for examples in slices(inputs.batch, plan.batch_block):
            lifted = row_block(context, examples).lift(slice(0, inputs.num_classes))
            rows = lifted.div_(inputs.temperature).permute(1, 2, 0)  # [n, P, K]
            averages = approximate_log_probs(method, rows[:, 0], rows[:, 1:], link)
            log_p[examples], entropy[examples] = _with_entropy(*averages)
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
    inputs: Inputs, link: Link, top_k: int, tolerance: float, order: Order | None, budget: int, scratch: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The top classes of a chunk: from few candidates, from more where those do not do, or else from all classes."""
    examples = slice(0, inputs.batch)
    block = row_block(Context.of(inputs, "factors", inputs.product_precision()), examples)
    rows, pilot_logits = (memory[examples] for memory in scratch)
    for classes in slices(inputs.num_classes, pruning.SLICE):
        rows[:, classes] = block.lift(classes).transpose(0, 1)
    mixing = mixing_of(inputs, examples)
    pilots = pruning.pilot_samples(rows, mixing, link, pilot_logits)
    waiting = torch.arange(inputs.batch, device=rows.device)
    columns = [rows.new_empty(inputs.batch, top_k), waiting.new_empty(inputs.batch, top_k)]
    columns += [rows.new_zeros(inputs.batch) for _ in range(3)]
    for size in pruning.sizes_for(inputs.num_classes, top_k):
        some = rows, mixing, pilots
        if len(waiting) < inputs.batch:  # the first time round nothing is copied
            some = rows[waiting], mixing[waiting], pilots.of(waiting)
        candidates = pruning.choose_candidates(*some, size, top_k, tolerance, link)
        done = candidates.enough.nonzero().flatten()
        if len(done):
            *result, trusted = _among(rows, mixing, pilots, candidates, waiting[done], done, top_k, tolerance)
            done = done[trusted]
            for column, values in zip(columns, result, strict=True):
                column[waiting[done]] = values[trusted]
        left = torch.ones_like(candidates.enough).index_fill_(0, done, False)
        waiting = waiting[left]
        if not len(waiting):
            break
    else:
        log_probs, entropy, expected = _whole(inputs.of_examples(waiting), link, "mc", order, budget)
        for column, values in zip(columns, (*log_probs.topk(top_k), entropy, expected), strict=False):
            column[waiting] = values
    return columns[0], columns[1], columns[2], columns[3], columns[4]


def _among(
    rows: Tensor,
    mixing: Tensor,
    pilots: pruning.Pilots,
    candidates: pruning.Candidates,
    examples: Tensor,  # places in the chunk
    which: Tensor,  # rows of the candidates
    top_k: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The top classes of examples among their candidates, and whether they are to be trusted."""
    classes = candidates.classes[which]  # [n, C]
    if len(examples) < len(rows):  # all of them need no copy
        rows, mixing = rows[examples], mixing[examples]
    few = rows.gather(1, classes.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))  # [n, C, P]
    logits = torch.bmm(few, mixing.mT)  # [n, C, S]
    if candidates.weight is not None:
        log_probs, expected, left_out, wrong = pruning.sampled_with_others(
            logits,
            candidates.weight[which],
            top_k,
            lambda samples: pruning.weigh_exactly(rows, mixing, classes, samples),
        )
        # The others are not one class, but as many as their spread says.
        more = left_out * (candidates.spread[which] - left_out.clamp(min=1e-30).log())
        entropy = softmax_entropy(log_probs) + more
        expected = expected + left_out * candidates.spread[which]
        trusted = wrong <= pruning.SURPRISE * tolerance
    else:
        means = mean_sigmoid_rows(logits, False, entropy=True)
        assert means.entropy is not None
        log_probs, left_out = means.log_p, candidates.left_out[which]
        entropy, expected = pruning.label_entropies_outside(pilots.weights[examples], classes)
        entropy = entropy + sigmoid_entropy(means.log_p, means.log_not_p)
        expected = expected + means.entropy.sum(-1)
        trusted = torch.ones_like(left_out, dtype=torch.bool)
    values, places = log_probs.topk(top_k)
    return values, classes.gather(-1, places), entropy, expected, left_out, trusted


def _with_entropy(log_p: Tensor, log_not_p: Tensor | None) -> tuple[Tensor, Tensor]:
    return log_p, softmax_entropy(log_p) if log_not_p is None else sigmoid_entropy(log_p, log_not_p)
