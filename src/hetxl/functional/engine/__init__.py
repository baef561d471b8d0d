"""The fused Monte Carlo engine: the primitives without a tensor of all samples.

`plan` chooses the implementation, the order of evaluation and the block sizes. `logit_rows` computes the rows of logits
that all samples of an example are linear in, and backpropagates through them. `softmax` and `sigmoid` average over
samples. `blocked` iterates over the blocks, and `autograd` makes the result differentiable. `predict` computes
predictions without gradients, with `candidates` and `pilots` for the top classes. `operators` registers the evaluations
with the compiler.

Every primitive takes `impl`: "reference" evaluates with a tensor of all samples, "blocked" in blocks, and "auto" in
blocks wherever they cover the case. Another implementation, such as a kernel for GPUs, is a module with these four
functions and an entry in `plan.OTHERS`.
"""

import torch
from torch import Tensor

from hetxl.functional.distribution import LogitDistribution, Order
from hetxl.functional.engine.autograd import Job, LogProbsJob, NllJob, NormaliserJob
from hetxl.functional.engine.inputs import batch_shape_of, gather_inputs
from hetxl.functional.engine.operators import run_compiled
from hetxl.functional.engine.plan import IMPLS, Plan, choose_impl, plan
from hetxl.functional.engine.predict import Summary, mc_predict
from hetxl.functional.targets import UNWEIGHTED, Targets, Weights, inverse, logit_losses, reduce_losses, softmax_losses
from hetxl.registry import Link

__all__ = ["IMPLS", "Plan", "Summary", "mc_log_normalisers", "mc_log_probs", "mc_nll", "mc_predict", "plan"]


def mc_log_probs(
    distribution: LogitDistribution,
    z: Tensor | None,
    *,
    temperature: Tensor | float,
    link: Link,
    order: Order | None = None,
    memory_budget: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return log-probabilities averaged over samples, differentiable, in O(B·K) memory.

        probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
        return probs.log()                                                   # sigmoid: logit(probs)

    Args:
        distribution: distribution over the logits, [..., K].
        z: [..., S, Q] or [S, Q] standard normals; None without noise.
        temperature: τ
        order: "samples" or "factors" to force an order; None for the choice of the plan.
        memory_budget: bytes of working memory, see `plan`.
        impl: "auto", "blocked" or "reference".

    Returns:
        [..., K] log-probabilities; for the sigmoid link the logits of the mean probabilities.
    """
    if z is None:
        distribution = distribution.without_noise()
    if (other := choose_impl(impl, distribution, z)) is not None:
        return other.mc_log_probs(distribution, z, temperature=temperature, link=link, order=order)
    inputs = gather_inputs(distribution, z, temperature)
    out = _run(LogProbsJob(inputs, inputs.product_precision(), link, order, memory_budget))
    if link == "sigmoid":
        out = out[0] - out[1]
    return out.view(*batch_shape_of(distribution, z), out.shape[-1])


def mc_nll(
    distribution: LogitDistribution,
    z: Tensor | None,
    targets: Targets,
    *,
    temperature: Tensor | float,
    link: Link,
    order: Order | None = None,
    reduction: str = "mean",
    weights: Weights = UNWEIGHTED,
    memory_budget: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return the negative log-likelihood of the targets under the averaged probabilities, with its gradients.

        probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
        return -probs.log().gather(-1, ids)                                  # sigmoid: summed binary cross-entropy

    Class ids (softmax) and labels in any form (sigmoid) need memory for one block only. Rows of probabilities and label
    smoothing (softmax) need O(B·K), like the rows themselves.

    Args:
        distribution: distribution over the logits, [..., K].
        z: [..., S, Q] or [S, Q] standard normals; None without noise.
        targets: class ids [...], rows [..., K], or lists of labels (sigmoid), as `check_targets` returns them.
        temperature: τ
        order: "samples" or "factors" to force an order; None for the choice of the plan.
        reduction: "mean" over the examples that are not ignored (0 if there are none), "sum" or "none".
        weights: weights of examples and classes, and label smoothing.
        memory_budget: bytes of working memory, see `plan`.
        impl: "auto", "blocked" or "reference".

    Returns:
        A scalar, or [...] for reduction "none" (0 where an example is ignored).
    """
    if z is None:
        distribution = distribution.without_noise()
    options = {"temperature": temperature, "link": link}
    if (other := choose_impl(impl, distribution, z)) is not None:
        return other.mc_nll(distribution, z, targets, order=order, reduction=reduction, weights=weights, **options)
    batch_shape = batch_shape_of(distribution, z)
    if link == "softmax" and (targets.ids is None or weights.smoothing):
        if z is None:
            losses = logit_losses(distribution.mean / temperature, targets, weights)
        else:
            log_probs = mc_log_probs(distribution, z, order=order, memory_budget=memory_budget, impl=impl, **options)
            losses = softmax_losses(log_probs, targets, weights)
        factor, normaliser = weights.factors(targets, batch_shape, link, losses)
        return reduce_losses(losses, factor, normaliser, reduction)

    labels = targets.dense if targets.lists is None else targets.lists.values
    for name, value in {"targets": labels, "weight": weights.example, "class_weight": weights.classes}.items():
        if value is not None and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which this loss does not give it; pass {name}.detach()")
    inputs = gather_inputs(distribution, z, temperature)
    factor, normaliser = weights.factors(targets, batch_shape, link, inputs.temperature)
    if reduction == "mean":
        factor = factor * inverse(normaliser)
    ids = None if targets.ids is None else targets.ids.flatten()
    dense = None if targets.dense is None else targets.dense.reshape(-1, targets.dense.shape[-1])
    flat = Targets(ids, dense, targets.lists)
    scalar, products = reduction != "none", inputs.product_precision()
    labelled = (flat, factor.flatten().detach(), weights, scalar)
    out = _run(NllJob(inputs, products, link, order, memory_budget, *labelled))
    return out if scalar else out.view(batch_shape)


def mc_log_normalisers(
    distribution: LogitDistribution,
    z: Tensor | None,
    *,
    temperature: Tensor | float,
    excluded: Tensor | None = None,
    order: Order | None = None,
    memory_budget: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return log Σ_k exp(u_k / τ) of every sample, with its gradients, block by block.

    With the label's own logit this gives the loss, and normalisers over parts of the classes can be combined.

        return logsumexp(distribution.sample(z) / temperature, -1)

    Args in addition to those of `mc_log_probs`:
        excluded: [...], a class of each example to exclude, or −1; None for all classes.

    Returns:
        [..., S]
    """
    if z is None:
        distribution = distribution.without_noise()
    if (other := choose_impl(impl, distribution, z)) is not None:
        return other.mc_log_normalisers(distribution, z, temperature=temperature, excluded=excluded, order=order)
    inputs = gather_inputs(distribution, z, temperature)
    flat = None if excluded is None else excluded.flatten()
    out = _run(NormaliserJob(inputs, inputs.product_precision(), "softmax", order, memory_budget, flat))
    return out.view(*batch_shape_of(distribution, z), out.shape[-1])


def _run(job: Job) -> Tensor:
    return run_compiled(job) if torch.compiler.is_compiling() else job.run()
