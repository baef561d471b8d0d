"""The evaluations as torch operators, for compiled graphs.

`torch.compile` does not trace an operator: it knows the shapes of its results (`register_fake`) and its gradients
(`register_autograd`), and calls it. The loop over blocks stays in Python, without a graph break. An operator accepts
only tensors and plain values, so a job is split into both and rebuilt inside. A kernel for another device would be
registered for the same operators. Without compilation these operators are not used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hetxl.functional.engine.autograd import Job, LogProbsJob, NllJob, NormaliserJob
from hetxl.functional.engine.inputs import GivenMean, Inputs, LinearMean, NoiseInput
from hetxl.functional.lifts import ClassifierLift, HashLift, IdentityLift, Lift, LinearLift
from hetxl.functional.noise import GaussianNoise
from hetxl.functional.targets import LabelLists, Targets, Weights


def take_apart(inputs: Inputs) -> tuple[dict[str, Tensor], str]:
    """Split an evaluation into its tensors by name, those with gradients first, and the kinds of its noise."""
    tensors, noise = inputs.tensors(), inputs.noise
    if noise is None:
        return tensors, ""
    if noise.z is not None:
        tensors["z"] = noise.z
    if noise.lift.kind == "hash":
        tensors["buckets"] = noise.lift.buckets
    return tensors, f"{noise.lift.kind},{noise.gaussian.residual_kind}"


def put_together(tensors: dict[str, Tensor], kinds: str) -> Inputs:
    """Rebuild an evaluation from its parts."""
    if "mean" in tensors:
        mean = GivenMean(tensors["mean"])
    else:
        mean = LinearMean(tensors["features"], tensors["weight"], tensors.get("bias"))
    if not kinds:
        return Inputs(mean, None, tensors["temperature"])
    lift, residual = kinds.split(",")
    factors, scale, spread = (tensors.get(name) for name in ("factors", "scale", "residual"))
    gaussian = GaussianNoise(factors, scale, spread, "rank1" if residual == "rank1" else "diagonal")
    return Inputs(mean, NoiseInput(gaussian, tensors.get("z"), _lift(lift, tensors)), tensors["temperature"])


def _lift(kind: str, tensors: dict[str, Tensor]) -> Lift:
    if kind == "hash":
        return HashLift(tensors["buckets"])
    if kind == "projection":
        return LinearLift(tensors["projection"])
    return IdentityLift() if kind == "identity" else ClassifierLift(tensors["weight"])


def named(tensors: Sequence[Tensor], names: str) -> dict[str, Tensor]:
    """Return tensors by their names, a string separated by commas."""
    return dict(zip(names.split(","), tensors, strict=True))


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as operator `hetxl::name`, whose results are new tensors."""
    return torch.library.custom_op(f"hetxl::{name}", mutates_args=())


def run_compiled(job: Job) -> Tensor:
    """Compute `job.run()` through an operator, for a compiled graph."""
    tensors, kinds = take_apart(job.inputs)
    needs = [name for name in job.inputs.tensors() if torch.is_grad_enabled() and tensors[name].requires_grad]
    tensors |= job.constants()
    how = (job.kind, job.products, job.link, job.order or "", job.memory_budget or 0, job.scalar)
    return _evaluate(list(tensors.values()), ",".join(tensors), kinds, ",".join(needs), *how)[0]


@operator("evaluate")
def _evaluate(
    tensors: Sequence[Tensor], names: str, kinds: str, needed: str, kind: str, products: torch.dtype, link: str,
    order: str, budget: int, scalar: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the result of a job; a scalar is followed by the required gradients."""
    job = _job(tensors, names, kinds, kind, products, link, order, budget, scalar)
    wants = frozenset(needed.split(",") if needed else ())
    with torch.no_grad(), job.plain_precision():
        evaluation = job.evaluation(job.inputs.tensors(), wants if scalar else frozenset())
        return [job.forward(evaluation), *_finished(evaluation.gradients)]


@operator("evaluate_backward")
def _evaluate_backward(
    tensors: Sequence[Tensor], names: str, kinds: str, needed: str, kind: str, products: torch.dtype, link: str,
    order: str, budget: int, scalar: bool, output: Tensor, gradient: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return the required gradients, given that of a result."""
    job = _job(tensors, names, kinds, kind, products, link, order, budget, scalar)
    with torch.no_grad(), job.plain_precision():
        evaluation = job.evaluation(job.inputs.tensors(), frozenset(needed.split(",")))
        job.backward(evaluation, output, gradient)
        return _finished(evaluation.gradients)


def _finished(gradients: Any) -> list[Tensor]:
    """Return gradients that share no memory, as an operator must."""
    return [gradient for gradient in gradients.finished() if gradient is not None]


def _job(
    tensors: Sequence[Tensor], names: str, kinds: str, kind: str, products: torch.dtype, link: Any, order: Any,
    budget: int, scalar: bool,
) -> Job:  # fmt: skip
    """Rebuild a job from its parts."""
    parts = named(tensors, names)
    how = (put_together(parts, kinds), products, link, order or None, budget or None)
    if kind == "log_probs":
        return LogProbsJob(*how)
    if kind == "normalisers":
        return NormaliserJob(*how, parts.get("excluded"))
    lists = None
    if "classes" in parts:
        lists = LabelLists(parts["examples"], parts["classes"], parts.get("values"), len(parts["factor"]))
    targets = Targets(parts.get("ids"), parts.get("dense"), lists)
    return NllJob(*how, targets, parts["factor"], Weights(classes=parts.get("class_weight")), scalar)


@_evaluate.register_fake
def _evaluate_shapes(
    tensors: Sequence[Tensor], names: str, kinds: str, needed: str, kind: str, products: torch.dtype, link: str,
    order: str, budget: int, scalar: bool,
) -> list[Tensor]:  # fmt: skip
    parts = named(tensors, names)
    inputs = put_together(parts, kinds)
    shapes: dict[str, tuple[int, ...]] = {
        "nll": () if scalar else (inputs.batch,),
        "log_probs": (inputs.batch, inputs.num_classes),
        "normalisers": (inputs.batch, inputs.samples),
    }
    shape = (2, *shapes[kind]) if kind == "log_probs" and link == "sigmoid" else shapes[kind]
    output = inputs.temperature.new_empty(shape, dtype=inputs.wide)
    return [output, *(_like(parts[name]) for name in needed.split(",") if scalar and needed)]


@_evaluate_backward.register_fake
def _backward_shapes(tensors: Sequence[Tensor], names: str, kinds: str, needed: str, *_: Any) -> list[Tensor]:
    parts = named(tensors, names)
    return [_like(parts[name]) for name in needed.split(",")]


def _like(tensor: Tensor) -> Tensor:
    """Return an empty gradient with the shape of a tensor."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, names, kinds, needed, *how = inputs
    ctx.set_materialize_grads(False)
    ctx.described, ctx.count = (names, kinds, needed, *how), len(tensors)
    scalar = how[-1]
    ctx.save_for_backward(*(output[1:] if scalar else (*tensors, output[0])))


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of the tensors: those of the forward pass, scaled, or from a second pass over the blocks."""
    names, _, needed, *how = ctx.described
    gradient = gradients[0]
    rest = (None,) * len(ctx.described)
    if gradient is None or not needed:
        return [None] * ctx.count, *rest
    if how[-1]:
        formed = [saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors]
    else:
        *tensors, output = ctx.saved_tensors
        formed = _evaluate_backward(tensors, *ctx.described, output, gradient)
    by_name = dict(zip(needed.split(","), formed, strict=True))
    return [by_name.get(name) for name in names.split(",")], *rest


_evaluate.register_autograd(_backward, setup_context=_setup)
