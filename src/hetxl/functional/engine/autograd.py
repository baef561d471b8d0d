"""The fused evaluations as differentiable functions.

A loss that ends in one number forms its gradients in the forward pass, block by block, and only scales them in the
backward pass. Losses of single examples, and log-probabilities, go through the blocks again in the backward pass. Asked
for gradients of gradients, all of them hand over to the plain evaluation, which autograd can differentiate again.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetxl.functional import reference
from hetxl.functional.engine.evaluate import Evaluation
from hetxl.functional.engine.inputs import GRADIENTS, Inputs
from hetxl.functional.engine.labels import LabelBlocks
from hetxl.functional.engine.plan import Plan
from hetxl.functional.engine.sigmoid import MeanSigmoid
from hetxl.functional.links import Link
from hetxl.functional.precision import without_autocast
from hetxl.functional.targets import Targets
from hetxl.functional.weighting import Weights, known_ids


@dataclass(frozen=True)
class Job(ABC):
    """What is evaluated, beside the tensors that autograd sees.

    Attributes:
        inputs: the tensors; those that autograd sees are put in anew for every run.
        plan: the blocks.
        products: precision of the matrix products.
        link: "softmax" or "sigmoid"
    """

    inputs: Inputs
    plan: Plan
    products: torch.dtype
    link: Link

    def evaluation(self, tensors: tuple[Tensor | None, ...], needed: frozenset[str] = frozenset()) -> Evaluation:
        """An evaluation of these tensors, with gradients for the needed ones."""
        return Evaluation(self.inputs.with_tensors(tensors), self.plan, self.products, needed)

    def result(self, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """The result for these tensors, without gradients."""
        with _plain_precision(self):
            return self.forward(self.evaluation(tensors))

    @abstractmethod
    def forward(self, evaluation: Evaluation) -> Tensor:
        """The result of an evaluation; if that wants gradients, their sums as well."""

    @abstractmethod
    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Sum the gradients of an evaluation from that of the output."""

    @abstractmethod
    def plain(self, inputs: Inputs) -> Tensor:
        """The same result from the reference evaluation."""

    eager = False
    """Whether `forward` can form the gradients at once, being the gradients of one number."""


@dataclass(frozen=True)
class NllJob(Job):
    """Losses [B], or their weighted sum.

    Attributes:
        targets: of the flattened batch.
        factor: [B], weights of the examples.
        weights: of the classes (sigmoid).
        scalar: whether the result is Σ factor · loss, rather than each factor · loss.
    """

    targets: Targets
    factor: Tensor
    weights: Weights
    scalar: bool

    @property
    def eager(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A sum forms its gradients at once."""
        return self.scalar

    def forward(self, evaluation: Evaluation) -> Tensor:
        """The losses, weighed."""
        losses = self._losses(evaluation, self.factor)
        weighed = torch.where(self.factor == 0, 0.0, losses * self.factor)
        return weighed.sum() if self.scalar else weighed

    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Go through the blocks with the examples weighed by the gradient."""
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
            found = ((1 - label) * means.per_not_p - label * means.per_p) * factor[examples]
            return found if by_class is None else found * by_class

        evaluation.sigmoid(visit)
        return losses

    def plain(self, inputs: Inputs) -> Tensor:
        """The reference loss."""
        weights = Weights(classes=self.weights.classes) if self.link == "sigmoid" else Weights()
        losses = reference.mc_nll(
            inputs.distribution(),
            inputs.z,
            self.targets,
            temperature=inputs.temperature,
            link=self.link,
            reduction="none",
            weights=weights,
        )
        weighed = torch.where(self.factor == 0, 0.0, losses * self.factor)
        return weighed.sum() if self.scalar else weighed


@dataclass(frozen=True)
class LogProbsJob(Job):
    """Averaged log-probabilities [B, K]; for the sigmoid link log p̄ and log(1 − p̄), [2, B, K]."""

    def forward(self, evaluation: Evaluation) -> Tensor:
        """log p̄, and log(1 − p̄)."""
        if self.link == "softmax":
            return evaluation.softmax_log_probs()[0]
        out = evaluation.like.new_empty(2, evaluation.inputs.batch, evaluation.inputs.num_classes)

        def visit(examples: slice, classes: slice, means: MeanSigmoid) -> None:
            out[0, examples, classes] = means.log_p.T
            out[1, examples, classes] = means.log_not_p.T

        evaluation.sigmoid(visit)
        return out

    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Go through the blocks again."""
        if self.link == "softmax":
            evaluation.softmax_log_probs_backward(output, gradient)
            return

        def visit(examples: slice, classes: slice, means: MeanSigmoid) -> Tensor:
            of_p, of_not_p = gradient[0, examples, classes].T, gradient[1, examples, classes].T
            return of_p * means.per_p - of_not_p * means.per_not_p

        evaluation.sigmoid(visit)

    def plain(self, inputs: Inputs) -> Tensor:
        """The reference log-probabilities."""
        logits = inputs.distribution().sample(inputs.z) / inputs.temperature
        if self.link == "softmax":
            return reference.mean_softmax(logits)
        return torch.stack(reference.mean_sigmoid(logits))


@dataclass(frozen=True)
class NormaliserJob(Job):
    """log Σ_k exp(u_k) of every sample, [B, S].

    Attributes:
        left_out: [B], a class of each example that does not count, or −1; None for all classes.
    """

    left_out: Tensor | None

    def forward(self, evaluation: Evaluation) -> Tensor:
        """The normalisers."""
        return evaluation.log_normalisers(self.left_out)

    def backward(self, evaluation: Evaluation, output: Tensor, gradient: Tensor) -> None:
        """Go through the blocks again."""
        evaluation.log_normalisers_backward(output, gradient, self.left_out)

    def plain(self, inputs: Inputs) -> Tensor:
        """The reference normalisers."""
        return reference.mc_log_normalisers(
            inputs.distribution(), inputs.z, temperature=inputs.temperature, left_out=self.left_out
        )


class Fused(torch.autograd.Function):
    """A job as a function of its tensors, in the order of `GRADIENTS`."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor | None) -> Tensor:
        """The job's result."""
        needed = frozenset(name for name, need in zip(GRADIENTS, ctx.needs_input_grad[1:], strict=True) if need)
        ctx.job, ctx.needed, ctx.gradients = job, needed, None
        detached = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
        if job.eager and needed:
            with _plain_precision(job):
                evaluation = job.evaluation(detached, needed)
                output = job.forward(evaluation)
            ctx.gradients = evaluation.gradients
        else:
            output = job.result(detached)
        ctx.save_for_backward(*tensors, None if job.eager else output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors."""
        (gradient,) = gradients
        *tensors, output = ctx.saved_tensors
        job: Job = ctx.job
        if torch.is_grad_enabled():  # create_graph=True: somebody will differentiate this again
            return None, *_differentiable_gradients(job, tuple(tensors), gradient, ctx.needs_input_grad[1:])
        formed = ctx.gradients
        if formed is not None:
            ctx.gradients = None  # scaled in place, so good for one time
            return None, *formed.finished(gradient)
        detached = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
        with _plain_precision(job):
            evaluation = job.evaluation(detached, ctx.needed)
            if job.eager:  # a second time through the same graph
                job.backward(evaluation, gradient, gradient)
            else:
                job.backward(evaluation, output, gradient)
        return None, *evaluation.gradients.finished()


def _plain_precision(job: Job) -> Any:
    """The job has chosen the precision of its products: autocast must not choose again."""
    return without_autocast(job.inputs.temperature.device)


def _differentiable_gradients(
    job: Job, tensors: tuple[Tensor | None, ...], gradient: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients by the reference evaluation, themselves differentiable; in wide precision, since under autocast the
    features are narrower than the parameters."""
    with _plain_precision(job):
        output = job.plain(job.inputs.with_tensors(tensors).widened())
    wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need and tensor is not None]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for need in needs)
