"""Prediction in blocks: averaged probabilities of all classes, or of the top classes without a tensor of all."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetxl.functional import reference
from hetxl.functional._torch import slices
from hetxl.functional.distribution import LogitDistribution, Order
from hetxl.functional.engine import candidates, pilots
from hetxl.functional.engine.blocked import Evaluation, mixing_of
from hetxl.functional.engine.inputs import Inputs, batch_shape_of, gather_inputs
from hetxl.functional.engine.logit_rows import Context, Workspace, row_block
from hetxl.functional.engine.operators import named, operator, put_together, take_apart
from hetxl.functional.engine.plan import DEFAULT_BUDGET, choose_impl, plan_for
from hetxl.functional.engine.sigmoid import MeanSigmoid, mean_sigmoid_rows
from hetxl.functional.links import APPROXIMATIONS, approximate_log_probs, sigmoid_entropy, softmax_entropy
from hetxl.registry import Link

METHODS = ("mc", "deterministic", *APPROXIMATIONS)

MANY_SAMPLES = 512  # from this number on, a fit to some samples may replace samples of all classes

TOLERANCE = 5e-4
"""How far off the probabilities of the top classes may be, by estimate, when not all classes are sampled."""


class Summary(NamedTuple):
    """A prediction for a batch [...].

    Attributes:
        log_probs: [..., K], or [..., k] for the top classes, most probable first.
        indices: [..., k], or None for all classes.
        entropy: [...], entropy of the averaged probabilities.
        expected_entropy: [...], mean entropy of the samples.
        left_out: [...], estimated probability of classes that were not sampled individually; None if all were.
    """

    log_probs: Tensor
    indices: Tensor | None
    entropy: Tensor
    expected_entropy: Tensor
    left_out: Tensor | None

    def of_classes(self, classes: Tensor) -> "Summary":
        """Restrict a prediction of all classes to some of them, [..., k]."""
        return self._replace(log_probs=self.log_probs.gather(-1, classes), indices=classes)


@torch.no_grad()
def mc_predict(
    distribution: LogitDistribution,
    z: Tensor | None,
    *,
    temperature: Tensor | float,
    link: Link,
    method: str = "mc",
    top_k: int | None = None,
    classes: Tensor | None = None,
    tolerance: float = TOLERANCE,
    order: Order | None = None,
    memory_budget: int | None = None,
    impl: str = "auto",
) -> Summary:
    """Return averaged probabilities of all or the top classes, with entropies, without gradients.

        probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
        return probs.topk(top_k)

    Args in addition to those of `mc_log_probs`:
        method: "mc", "deterministic", or one of `hetxl.functional.APPROXIMATIONS`.
        top_k: return only the k most probable classes.
        classes: return only these classes of each example, [..., k] ids, in this order; instead of top_k.
        tolerance: with top_k, the largest estimated error of their probabilities; 0 samples every class.
    """
    if method == "deterministic" or distribution.noise is None:
        distribution, z, method = distribution.without_noise(), None, "mc"
    shape = batch_shape_of(distribution, z)
    other = choose_impl(impl, distribution, z)
    if other is not None or shape.numel() == 0:
        if method == "mc":
            options = {"temperature": temperature, "link": link, "order": order}
            log_probs, entropy, expected = (other or reference).mc_predict(distribution, z, **options)
        else:
            mean, factors = distribution.mean / temperature, distribution.factors / temperature
            log_probs, entropy = _with_entropy(*approximate_log_probs(method, mean, factors, link))
            expected = entropy
        summary = Summary(log_probs, None, entropy, expected, None)
        choice = top_k if classes is None else classes
        return summary if choice is None else Summary(*selected(log_probs, choice), entropy, expected, None)
    inputs = gather_inputs(distribution, z, temperature)
    options = (tolerance, order, memory_budget or DEFAULT_BUDGET)
    if torch.compiler.is_compiling():
        summary = joined([_as_operator(inputs, link, method, top_k, *options)], shape)
        return summary if classes is None else summary.of_classes(classes)
    choice = top_k if classes is None else classes.reshape(-1, classes.shape[-1])
    return joined(list(_chunks(inputs, link, method, choice, *options)), shape)


def selected(log_probs: Tensor, choice: int | Tensor) -> tuple[Tensor, Tensor]:
    """Select the most probable classes of log-probabilities [..., K], or the stated [..., k], with their ids."""
    return log_probs.topk(choice) if isinstance(choice, int) else (log_probs.gather(-1, choice), choice)


@operator("predict")
def _predict(
    tensors: Sequence[Tensor], names: str, kinds: str, link: str, method: str, top_k: int, tolerance: float, order: str,
    budget: int,
) -> list[Tensor]:  # fmt: skip
    """Return the columns of a `Summary` of a flat batch; indices only with top_k, and 0 if nothing was left out."""
    inputs = put_together(named(tensors, names), kinds)
    options: Any = (link, method, top_k or None, tolerance, order or None, budget)
    parts = joined(list(_chunks(inputs, *options)), torch.Size((inputs.batch,)))
    left_out = torch.zeros_like(parts.entropy) if parts.left_out is None else parts.left_out
    indices = [] if parts.indices is None else [parts.indices]
    return [parts.log_probs.clone(), *indices, parts.entropy.clone(), parts.expected_entropy.clone(), left_out]


@_predict.register_fake
def _predict_shapes(
    tensors: Sequence[Tensor], names: str, kinds: str, link: str, method: str, top_k: int, *_: Any
) -> list[Tensor]:
    inputs = put_together(named(tensors, names), kinds)
    each = inputs.temperature.new_empty(inputs.batch, dtype=inputs.wide)
    shape = (inputs.batch, top_k or inputs.num_classes)
    indices = [each.new_empty(shape, dtype=torch.int64)] if top_k else []
    return [each.new_empty(shape), *indices, *(torch.empty_like(each) for _ in range(3))]


def _as_operator(
    inputs: Inputs, link: Link, method: str, top_k: int | None, tolerance: float, order: Order | None, budget: int
) -> tuple[Any, ...]:
    tensors, kinds = take_apart(inputs)
    options = (link, method, top_k or 0, tolerance, order or "", budget)
    log_probs, *indices, entropy, expected, left_out = _predict(
        list(tensors.values()), ",".join(tensors), kinds, *options
    )
    return log_probs, indices[0] if indices else None, entropy, expected, None if top_k is None else left_out


def joined(parts: Sequence[tuple[Any, ...]], shape: torch.Size) -> Summary:
    """Join summaries of parts of a flat batch into one of a batch [...]; columns missing in the first are None."""
    columns: list[Any] = []
    for column in zip(*parts, strict=True):
        together = None if column[0] is None else torch.cat(column)
        # a single example has the shape ()
        columns.append(None if together is None else together.view((*shape, *together.shape[1:])))
    return Summary(*columns)


def _chunks(
    inputs: Inputs, link: Link, method: str, choice: int | Tensor | None, tolerance: float, order: Order | None,
    budget: int,
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """Yield the five columns of a `Summary` for each chunk of the batch, so that the top or stated classes [B, k] need
    no [B, K] tensor."""
    few = method == "mc" and choice is not None and tolerance > 0
    if isinstance(choice, Tensor):
        few = few and link == "softmax" and candidates.applies(inputs, choice.shape[1])
    else:
        few = few and candidates.applies(inputs, choice or 1)
    # Allow for the mean logits of a chunk and a few tensors of that size; more rows at once gain nothing.
    size = max(1, min(inputs.batch, 64, budget // (32 * inputs.num_classes)))
    shared = (candidates.rows_of(inputs) if few else None, Workspace(inputs.temperature))
    for examples in slices(inputs.batch, size):
        chunk, here = inputs.of_examples(examples), choice[examples] if isinstance(choice, Tensor) else choice
        if few and here is not None:
            yield _by_candidates(chunk, link, here, tolerance, order, budget, *shared)
            continue
        log_probs, *entropies = _whole(chunk, link, method, order, budget)
        yield *((log_probs, None) if here is None else selected(log_probs, here)), *entropies, None


def _whole(inputs: Inputs, link: Link, method: str, order: Order | None, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p̄ [n, K], entropy [n] and expected entropy [n] over all classes."""
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


def _by_candidates(
    inputs: Inputs, link: Link, choice: int | Tensor, tolerance: float, order: Order | None, budget: int,
    rows: candidates.Rows | None, workspace: Workspace,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Predict the top or stated classes of a chunk from few candidates, or all classes where these do not suffice."""
    *columns, trusted = candidates.top_classes(inputs, link, choice, tolerance, rows, workspace)
    waiting = (~trusted).nonzero().squeeze(-1)
    # Pilots sample all classes, which saves time only with very many samples.
    top_k = choice if isinstance(choice, int) else None
    pays = top_k is not None and inputs.samples >= MANY_SAMPLES and pilots.prunable(inputs, top_k, budget)
    for some in waiting.split(8 if pays else 64):
        part = inputs.of_examples(some)
        if pays and top_k is not None:
            values = _by_pilots(part, link, top_k, tolerance, order, budget)
        else:
            log_probs, entropy, expected = _whole(part, link, "mc", order, budget)
            chosen = selected(log_probs, choice if isinstance(choice, int) else choice[some])
            values = (*chosen, entropy, expected, torch.zeros_like(entropy))
        for column, value in zip(columns, values, strict=True):
            column[some] = value
    return tuple(columns)


def _by_pilots(
    inputs: Inputs, link: Link, top_k: int, tolerance: float, order: Order | None, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Predict the top classes of a few examples with pilots, from few candidates, from more, or from all classes."""
    examples = slice(0, inputs.batch)
    block = row_block(Context.of(inputs, "factors", inputs.product_precision()), examples)
    rows = inputs.temperature.new_empty(inputs.batch, inputs.num_classes, inputs.noise_size + 1)
    for classes in slices(inputs.num_classes, pilots.SLICE):
        rows[:, classes] = block.lift(classes).transpose(0, 1)
    mixing = mixing_of(inputs, examples)
    seen = pilots.pilot_samples(rows, mixing, link)
    waiting = torch.arange(inputs.batch, device=rows.device)
    columns = [rows.new_empty(inputs.batch, top_k), waiting.new_empty(inputs.batch, top_k)]
    columns += [rows.new_zeros(inputs.batch) for _ in range(3)]
    for size in pilots.sizes_for(inputs.num_classes, top_k):
        some = rows, mixing, seen
        if len(waiting) < inputs.batch:  # the first iteration needs no copies
            some = rows[waiting], mixing[waiting], seen.of(waiting)
        chosen = pilots.choose_candidates(*some, size, top_k, tolerance, link)
        done = chosen.enough.nonzero().flatten()
        if len(done):
            *result, trusted = _among(rows, mixing, seen, chosen, waiting[done], done, top_k, tolerance)
            done = done[trusted]
            for column, values in zip(columns, result, strict=True):
                column[waiting[done]] = values[trusted]
        left = torch.ones_like(chosen.enough).index_fill_(0, done, False)
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
    seen: pilots.Pilots,
    chosen: pilots.Candidates,
    examples: Tensor,  # positions in the chunk
    which: Tensor,  # rows of the candidates
    top_k: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Predict the top classes of examples among their candidates, and judge whether the result can be trusted."""
    classes = chosen.classes[which]  # [n, C]
    if len(examples) < len(rows):  # a selection of all needs no copy
        rows, mixing = rows[examples], mixing[examples]
    few = rows.gather(1, classes.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))  # [n, C, P]
    logits = torch.bmm(few, mixing.mT)  # [n, C, S]
    if chosen.weight is not None:
        log_probs, expected, left_out, wrong = pilots.sampled_with_others(
            logits,
            chosen.weight[which],
            top_k,
            lambda samples: pilots.weigh_exactly(rows, mixing, classes, samples),
        )
        # The others are not one class: add the entropy of their distribution.
        more = left_out * (chosen.spread[which] - left_out.clamp(min=1e-30).log())
        entropy = softmax_entropy(log_probs) + more
        expected = expected + left_out * chosen.spread[which]
        trusted = wrong <= pilots.SURPRISE * tolerance
    else:
        means = mean_sigmoid_rows(logits, False, entropy=True)
        assert means.entropy is not None
        log_probs, left_out = means.log_p, chosen.left_out[which]
        entropy, expected = pilots.label_entropies_outside(seen.weights[examples], classes)
        entropy = entropy + sigmoid_entropy(means.log_p, means.log_not_p)
        expected = expected + means.entropy.sum(-1)
        trusted = torch.ones_like(left_out, dtype=torch.bool)
    values, places = log_probs.topk(top_k)
    return values, classes.gather(-1, places), entropy, expected, left_out, trusted


def _with_entropy(log_p: Tensor, log_not_p: Tensor | None) -> tuple[Tensor, Tensor]:
    return log_p, softmax_entropy(log_p) if log_not_p is None else sigmoid_entropy(log_p, log_not_p)
