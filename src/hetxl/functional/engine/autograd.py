"""The fused evaluations as differentiable functions.

A scalar loss computes its gradients in the forward pass, block by block, and only scales them in the backward pass.
Losses per example and log-probabilities process the blocks again in the backward pass. For second derivatives, all of
them use the reference evaluation, which autograd can differentiate again.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetxl.functional import reference
from hetxl.functional._torch import without_autocast
from hetxl.functional.distribution import Order
from hetxl.functional.engine.blocked import Evaluation
from hetxl.functional.engine.inputs import Inputs
from hetxl.functional.engine.plan import plan_for
from hetxl.functional.engine.sigmoid import LabelBlocks, MeanSigmoid
from hetxl.functional.links import mean_sigmoid, mean_softmax
from hetxl.functional.targets import Targets, Weights, known_ids
from hetxl.registry import Link


@dataclass(frozen=True)
class Job(ABC):
    """An evaluation: its options, and the inputs that are not tensors of autograd."""

    inputs: Inputs  # `Fused` replaces their tensors by those of autograd
    products: torch.dtype  # precision of the matrix products
    link: Link
    order: Order | None
    memory_budget: int | None

    def run(self) -> Tensor:
        """Return the result, differentiable where gradients are enabled."""
        tensors = self.inputs.tensors()
        if torch.is_grad_enabled():
            return Fused.apply(self, tuple(tensors), *tensors.values())
        # Under no_grad and inference_mode, parameters still require gradients that are never read: do not compute them.
        return self.result(tensors)

    def evaluation(self, tensors: dict[str, Tensor], needed: frozenset[str] = frozenset()) -> Evaluation:
        """Return an evaluation of these inputs that computes the gradients named by `needed`."""
        plan = plan_for(self.inputs, self.link, self.order, self.memory_budget)
        return Evaluation(self.inputs.with_tensors(tensors), plan, self.products, needed)

    def plain_precision(self) -> AbstractContextManager[Any]:
        """Return a context without autocast: the job has chosen the precision of its products."""
        return without_autocast(self.inputs.temperature.device)

    def result(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the result for these tensors, without gradients."""
        with self.plain_precision():
            return self.forward(self.evaluation(tensors))

    @abstractmethod
    def forward(self, evaluation: Evaluation) -> Tensor:
        """Compute the result of an evaluation, and sum its gradients if it needs any."""

    @abstractmethod
    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Sum the gradients of an evaluation, given the gradient of its output."""

    @abstractmethod
    def plain(self, inputs: Inputs) -> Tensor:
        """Compute the same result with the reference evaluation."""

    def constants(self) -> dict[str, Tensor]:
        """Return the tensors other than the inputs, by the names that `operators` uses."""
        return {}

    kind: ClassVar[str]
    scalar = False
    """Whether the result is one number, whose gradients `forward` can form at once."""


@dataclass(frozen=True)
class NllJob(Job):
    """The losses [B] of a batch, or their weighted sum."""

    targets: Targets  # of the flattened batch
    factor: Tensor  # [B], weights of the examples
    weights: Weights  # of the classes (sigmoid)
    scalar: bool  # whether the result is Σ factor · loss, rather than each factor · loss

    kind = "nll"

    def constants(self) -> dict[str, Tensor]:
        """Return the targets and weights."""
        lists = self.targets.lists
        tensors = {"ids": self.targets.ids, "dense": self.targets.dense, "class_weight": self.weights.classes}
        if lists is not None:
            tensors |= {"examples": lists.examples, "classes": lists.classes, "values": lists.values}
        return {name: value for name, value in tensors.items() if value is not None} | {"factor": self.factor}

    def forward(self, evaluation: Evaluation) -> Tensor:
        """Return the weighted losses."""
        return self._weighed(self._losses(evaluation, self.factor))

    def _weighed(self, losses: Tensor) -> Tensor:
        weighed = torch.where(self.factor == 0, 0.0, losses * self.factor)
        return weighed.sum() if self.scalar else weighed

    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Process the blocks again, with the gradient as weight of each example."""
        self._losses(evaluation, (self.factor * gradient).detach())

    def _losses(self, evaluation: Evaluation, factor: Tensor) -> Tensor:
        if self.link == "softmax":
            assert self.targets.ids is not None
            return evaluation.softmax_nll(known_ids(self.targets.ids).flatten(), factor)
        labels = LabelBlocks(self.targets, evaluation.like)
        losses = evaluation.like.new_zeros(evaluation.inputs.batch)
        class_weights = self.weights.classes

        def visit(examples: slice, classes: slice, means: MeanSigmoid) -> Tensor | None:
            label = labels.block(examples, classes)  # [k, n]
            parts = label * means.log_p + (1 - label) * means.log_not_p
            by_class = None if class_weights is None else class_weights[classes, None].to(parts.dtype)
            losses[examples] -= (parts if by_class is None else parts * by_class).sum(0)
            if not evaluation.backward:
                return None
            of_logits = ((1 - label) * means.per_not_p - label * means.per_p) * factor[examples]
            return of_logits if by_class is None else of_logits * by_class

        evaluation.sigmoid(visit)
        return losses

    def plain(self, inputs: Inputs) -> Tensor:
        """Return the loss of the reference."""
        weights = Weights(classes=self.weights.classes) if self.link == "sigmoid" else Weights()
        options = {"temperature": inputs.temperature, "link": self.link, "reduction": "none", "weights": weights}
        return self._weighed(reference.mc_nll(*inputs.distribution_and_normals(), self.targets, **options))


@dataclass(frozen=True)
class LogProbsJob(Job):
    """Averaged log-probabilities log p̄ [B, K]; for the sigmoid link log p̄ and log(1 − p̄), [2, B, K]."""

    kind = "log_probs"

    def forward(self, evaluation: Evaluation) -> Tensor:
        """Return log p̄, for the sigmoid link with log(1 − p̄)."""
        if self.link == "softmax":
            return evaluation.softmax_log_probs()[0]
        out = evaluation.like.new_empty(2, evaluation.inputs.batch, evaluation.inputs.num_classes)

        def visit(examples: slice, classes: slice, means: MeanSigmoid) -> None:
            out[0, examples, classes] = means.log_p.T
            out[1, examples, classes] = means.log_not_p.T

        evaluation.sigmoid(visit)
        return out

    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Process the blocks again."""
        if self.link == "softmax":
            evaluation.softmax_log_probs_backward(output, gradient)
            return

        def visit(examples: slice, classes: slice, means: MeanSigmoid) -> Tensor:
            of_p, of_not_p = gradient[0, examples, classes].T, gradient[1, examples, classes].T
            return of_p * means.per_p - of_not_p * means.per_not_p

        evaluation.sigmoid(visit)

    def plain(self, inputs: Inputs) -> Tensor:
        """Return the log-probabilities of the reference."""
        distribution, z = inputs.distribution_and_normals()
        logits = distribution.sample(z) / inputs.temperature
        return mean_softmax(logits) if self.link == "softmax" else torch.stack(mean_sigmoid(logits))


@dataclass(frozen=True)
class NormaliserJob(Job):
    """log Σ_k exp(u_k) of every sample, [B, S]."""

    excluded: Tensor | None  # [B], a class of each example to exclude, or −1

    kind = "normalisers"

    def constants(self) -> dict[str, Tensor]:
        """Return the excluded classes."""
        return {} if self.excluded is None else {"excluded": self.excluded}

    def forward(self, evaluation: Evaluation) -> Tensor:
        """Return the normalisers."""
        return evaluation.log_normalisers(self.excluded)

    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Process the blocks again."""
        evaluation.log_normalisers_backward(output, gradient, self.excluded)

    def plain(self, inputs: Inputs) -> Tensor:
        """Return the normalisers of the reference."""
        return reference.mc_log_normalisers(
            *inputs.distribution_and_normals(), temperature=inputs.temperature, excluded=self.excluded
        )


class Fused(torch.autograd.Function):
    """A job as a function of its tensors."""

    @staticmethod
    def forward(ctx: Any, job: Job, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        """Return the job's result for tensors of these names."""
        needed = frozenset(name for name, need in zip(names, ctx.needs_input_grad[2:], strict=True) if need)
        ctx.job, ctx.names, ctx.needed, ctx.gradients = job, names, needed, None
        detached = {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}
        if job.scalar and needed:
            with job.plain_precision():
                evaluation = job.evaluation(detached, needed)
                output = job.forward(evaluation)
            ctx.gradients = evaluation.gradients
        else:
            output = job.result(detached)
        ctx.save_for_backward(*tensors, None if job.scalar else output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the tensors."""
        (gradient,) = gradients
        *saved, output = ctx.saved_tensors
        job: Job = ctx.job
        tensors = dict(zip(ctx.names, saved, strict=True))
        if torch.is_grad_enabled():  # create_graph=True: the result will be differentiated again
            # The reference in wide precision, since under autocast the features are narrower than the parameters.
            with job.plain_precision():
                output = job.plain(job.inputs.with_tensors(tensors).widened())
            needs = ctx.needs_input_grad[2:]
            needed = [tensor for tensor, need in zip(saved, needs, strict=True) if need]
            parts = iter(torch.autograd.grad(output, needed, gradient, create_graph=True, allow_unused=True))
            return None, None, *(next(parts) if need else None for need in needs)
        formed = ctx.gradients
        if formed is not None:
            ctx.gradients = None  # they were scaled in place, so they are valid only once
            return None, None, *formed.finished(gradient)
        with job.plain_precision():
            evaluation = job.evaluation({name: tensor.detach() for name, tensor in tensors.items()}, ctx.needed)
            # The forward pass computed no gradients, or with retain_graph=True they are no longer valid.
            job.backward(evaluation, gradient if job.scalar else output, gradient)
        return None, None, *evaluation.gradients.finished()
