"""Alternatives to learning τ by the training loss alone.

The loop can freeze τ in the first steps and add a prior. A `TemperatureRule` instead updates τ by the gradient of a
validation loss, directly or through the last step; the loop calls it before and after its own step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from hetxl._seeds import derive_seed
from hetxl.functional import LabelLists
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import Fetched, Split
from hetxl_train.distributed import World
from hetxl_train.loaders import Order, Parts, to_device
from hetxl_train.model import Model
from hetxl_train.temperature import hypergradient
from hetxl_train.temperature.hypergradient import Batch


def is_frozen(step: int, steps: int, config: TrainConfig) -> bool:
    """Return whether τ is still frozen at its initial value in a step, counted from 0."""
    return step < round(config.temperature_hold * steps)


def freeze(temperature: nn.Module) -> None:
    """Zero the gradient of τ before clipping, so that it affects neither the norm of the gradients nor the step."""
    for parameter in temperature.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def reset_state(temperature: nn.Module, optimizer: optim.Optimizer) -> None:
    """Zero the optimiser's state of τ after a frozen step, so that τ starts without momentum once it is learned."""
    for parameter in temperature.parameters():
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                value.zero_()


def add_temperature_prior(temperature: nn.Module, weight: float) -> None:
    """Add the gradient of weight · (log τ)² to that of τ's parameters; do nothing if τ is not learned.

    The gradients must be those of the mean loss, without loss scaling. The reported loss does not include the prior.
    """
    parameters = [parameter for parameter in temperature.parameters() if parameter.requires_grad]
    if not parameters or not weight:
        return
    with torch.enable_grad():
        penalty = weight * torch.log(temperature()).square()
    for parameter, gradient in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def held_out_examples(config: TrainConfig, parts: int) -> int:
    """Return the number of held-out examples of each part of a batch."""
    if config.temperature_method == "train" or not config.temperature_held_out:
        return 0
    part = config.batch_size // parts
    count = round(config.temperature_held_out * part)
    if not 0 < count < part:
        raise ValueError(
            f"temperature_held_out = {config.temperature_held_out:g} takes {count} of the {part} examples of a part; "
            "raise batch_size, or choose another share"
        )
    return count


class Validation:
    """The validation examples of a rule: those of `split`, or if it is None, examples held out of each training batch.

    They are divided like the training batches, into `parts` over all processes.
    """

    def __init__(self, config: TrainConfig, split: Split | None, parts: Parts, device: torch.device):
        self.split, self.parts, self.device = split, parts, device
        self.count = held_out_examples(config, parts.count)
        self.order = None if split is None else Order(len(split), derive_seed(config.seed, 16))
        self.held_out: list[Batch] = []

    def divide(self, fetched: Fetched, split: Split) -> tuple[Tensor, Tensor | LabelLists]:
        """Hold out the last rows of a part of a batch; return the other rows, to train on."""
        rows = fetched.rows
        # With unreadable rows, there may be fewer than are to be held out: at least one row remains to train on.
        count = max(len(rows) - self.count, min(1, len(rows)))
        if count < len(rows):
            targets = to_device(split.labels.take(rows[count:]), self.device)
            self.held_out.append(Batch(fetched.inputs[count:].to(self.device), targets))
        return fetched.inputs[:count], split.labels.take(rows[:count])

    def batches(self, step: int) -> list[Batch]:
        """Return this process's validation examples of a step."""
        if self.split is None:
            held_out, self.held_out = self.held_out, []
            return held_out
        assert self.order is not None
        batches = []
        for accumulated in range(self.parts.accumulate):
            fetched = self.split.fetch(self.order.of(*self.parts.places(step, accumulated))[0])
            if len(fetched.rows):
                targets = to_device(self.split.labels.take(fetched.rows), self.device)
                batches.append(Batch(fetched.inputs.to(self.device), targets))
        return batches


class TemperatureRule(ABC):
    """Update a learned τ by a validation loss; the optimiser has all parameters of the model.

    Sums over examples include all processes, so that τ is the same in each.
    """

    def __init__(
        self, config: TrainConfig, model: Model, optimizer: optim.Optimizer, validation: Validation, world: World
    ):
        self.config, self.model, self.optimizer, self.validation = config, model, optimizer, validation
        self.world = world
        [self.raw] = model.head.temperature.parameters()
        self.noise = torch.Generator(device=validation.device)

    def see(self, batch: Batch, seed: Callable[[], torch.Generator]) -> None:  # noqa: B027, not every rule needs it
        """Process a part of the batch after its backward pass.

        `seed` resets all random states to those before the loss, and returns the generator of its noise.
        """

    @abstractmethod
    def before_step(self, step: int, examples: int) -> None:
        """Set the gradient of τ after the backward passes; `examples` is the number of examples of this process."""

    def clipped(self, norm: Tensor) -> None:  # noqa: B027
        """Receive the norm of the gradients before clipping, after they were clipped."""

    def after_step(self, step: int, moves: bool) -> None:  # noqa: B027
        """Update τ after the step, counted from 0, unless it is frozen (`moves` is False)."""

    def gradients(self, step: int, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return gradients of the mean validation loss, with the backbone in evaluation mode and S as in training."""
        training, batches = self.model.backbone.training, self.validation.batches(step)
        self.model.backbone.eval()
        sums, count = [torch.zeros_like(parameter) for parameter in parameters], 0
        try:
            for number, batch in enumerate(batches):
                self.noise.manual_seed(derive_seed(self.config.seed, step, self.validation.parts.part(number), 17))
                _, values = hypergradient.loss_gradients(self.model, batch, parameters, generator=self.noise)
                for total, value in zip(sums, values, strict=True):
                    total += value
                count += len(batch)
        finally:
            self.model.backbone.train(training)
        return self._mean(sums, count)

    def _mean(self, sums: list[Tensor], examples: int) -> list[Tensor]:
        """Return the mean over the examples of all processes, from the sums over those of this process."""
        total = self.world.sum(torch.full((), float(examples), device=self.validation.device)).clamp_(min=1)
        return [self.world.sum(value.contiguous()) / total.to(value.dtype) for value in sums]


class DirectRule(TemperatureRule):
    """Update τ by the paper's "simple gradient": that of the validation loss as if no weight depended on τ."""

    def before_step(self, step: int, examples: int) -> None:
        """Set the gradient of τ to that of the validation loss; the optimiser step updates τ with the weights."""
        [self.raw.grad] = self.gradients(step, [self.raw])
        add_temperature_prior(self.model.head.temperature, self.config.temperature_prior)


class BilevelRule(TemperatureRule):
    """Update τ by the validation loss after the step, including the effect of τ on that step (Luketina et al.)."""

    def __init__(
        self, config: TrainConfig, model: Model, optimizer: optim.Optimizer, validation: Validation, world: World
    ):
        super().__init__(config, model, optimizer, validation, world)
        self.parameters = [parameter for _, parameter in self._in_groups()]
        self.mixed: list[Tensor] = []
        self.before: list[Tensor] = []

    def _in_groups(self) -> list[tuple[dict[str, Any], nn.Parameter]]:
        """Return all parameters but τ with their current groups; loading a checkpoint replaces the groups."""
        pairs = [(group, parameter) for group in self.optimizer.param_groups for parameter in group["params"]]
        return [(group, parameter) for group, parameter in pairs if parameter is not self.raw]

    def see(self, batch: Batch, seed: Callable[[], torch.Generator]) -> None:
        """Add the derivative of this part's gradients with respect to t."""
        buffers = {name: value.clone() for name, value in self.model.backbone.named_buffers()}
        options = {"generator": seed(), "label_smoothing": self.config.label_smoothing}
        values = hypergradient.mixed_derivative(self.model.backbone, self.model.head, batch, self.parameters, **options)
        for name, value in self.model.backbone.named_buffers():  # running averages already include this part
            value.copy_(buffers[name])
        self.mixed = [total + value for total, value in zip(self.mixed, values, strict=True)] if self.mixed else values

    def before_step(self, step: int, examples: int) -> None:
        """Leave τ out of the optimiser step."""
        self.raw.grad = None
        self.mixed = self._mean(self.mixed, examples)
        if self.config.clip:
            self.before = [gradient_of(parameter).clone() for parameter in self.parameters]

    def clipped(self, norm: Tensor) -> None:
        """Differentiate through the clipping, which is part of the step."""
        self.mixed = hypergradient.clipped_tangents(self.before, self.mixed, norm, self.config.clip)
        self.before = []

    def after_step(self, step: int, moves: bool) -> None:
        """Take an optimiser step of τ alone; while τ is frozen, with gradient 0, so that its state exists."""
        gradient = self.hypergradient(step)
        self.raw.grad = gradient if moves else torch.zeros_like(gradient)
        if moves:
            add_temperature_prior(self.model.head.temperature, self.config.temperature_prior)
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.step()
        self.mixed = []

    def hypergradient(self, step: int) -> Tensor:
        """Return d F_val / dt after the step, in the shape of t."""
        direct, *slopes = self.gradients(step, [self.raw, *self.parameters])
        along = torch.zeros((), dtype=direct.dtype, device=direct.device)
        for (group, parameter), tangent, slope in zip(self._in_groups(), self.mixed, slopes, strict=True):
            moved = hypergradient.step_tangent(self.optimizer, group, parameter, gradient_of(parameter), tangent)
            along += (moved * slope).sum()
        return direct + along


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, 0 if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


RULES: dict[str, type[TemperatureRule]] = {"gradient": DirectRule, "bilevel": BilevelRule}
"""The rules of the methods in `hetxl_train.temperature_methods` that use a validation loss."""


def build_rule(
    config: TrainConfig, model: Model, optimizer: optim.Optimizer, validation: Split | None, parts: Parts, world: World
) -> TemperatureRule | None:
    """Return the rule of a configuration; None if τ is fixed or learned by the training loss."""
    if config.temperature_method == "train":
        return None
    split = None if config.temperature_held_out else validation
    if not config.temperature_held_out and validation is None:
        raise ValueError(
            f"temperature_method = {config.temperature_method} needs a validation split, which the data does not have; "
            "give --validation, or --temperature-held-out 0.125"
        )
    examples = Validation(config, split, parts, world.device)
    return RULES[config.temperature_method](config, model, optimizer, examples, world)
