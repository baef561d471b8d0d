"""Ways in which a learned τ is moved by another loss than that of training: on validation examples, directly or through
the last step. The loop calls a rule where it does its own step."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from hetxl.data.dataset import Fetched, Split
from hetxl.functional import LabelLists
from hetxl.training.config import TrainConfig
from hetxl.training.hypergradient import Batch, clipped_tangents, loss_gradients, mixed_derivative, step_tangent
from hetxl.training.loader import to_device
from hetxl.training.model import Model
from hetxl.training.order import Order, derive
from hetxl.training.temperature import add_prior


def held_out_examples(config: TrainConfig) -> int:
    """How many examples of each part of a batch are held out."""
    if config.temperature_method == "train" or not config.temperature_held_out:
        return 0
    part = config.batch_size // config.accumulate
    found = round(config.temperature_held_out * part)
    if not 0 < found < part:
        raise ValueError(
            f"temperature_held_out = {config.temperature_held_out:g} takes {found} of the {part} examples of a part; "
            "raise batch_size, or choose another share"
        )
    return found


class Validation:
    """Where the examples of a rule come from: a split of their own, or what is held out of each batch.

    Args:
        config: of the run.
        split: the validation data; None to hold out a share of each batch.
        device: where the model is.
    """

    def __init__(self, config: TrainConfig, split: Split | None, device: torch.device):
        self.config, self.split, self.device = config, split, device
        self.held = held_out_examples(config)
        self.order = None if split is None else Order(len(split), derive(config.seed, 16))
        self.parts: list[Batch] = []

    def divide(self, fetched: Fetched, split: Split) -> tuple[Tensor, Tensor | LabelLists]:
        """What is left of a part of a batch to train on; the last rows of it are held out."""
        rows = fetched.rows
        # Where rows could not be read there may be fewer than are held out: one is always trained on.
        count = max(len(rows) - self.held, min(1, len(rows)))
        if count < len(rows):
            targets = to_device(split.labels.take(rows[count:]), self.device)
            self.parts.append(Batch(fetched.inputs[count:].to(self.device), targets))
        return fetched.inputs[:count], split.labels.take(rows[:count])

    def batches(self, step: int) -> list[Batch]:
        """The examples of a step."""
        if self.split is None:
            found, self.parts = self.parts, []
            return found
        assert self.order is not None
        size = self.config.batch_size // self.config.accumulate
        found = []
        for part in range(self.config.accumulate):
            start = step * self.config.batch_size + part * size
            fetched = self.split.fetch(self.order.of(start, start + size)[0])
            if len(fetched.rows):
                targets = to_device(self.split.labels.take(fetched.rows), self.device)
                found.append(Batch(fetched.inputs.to(self.device), targets))
        return found


class TemperatureRule(ABC):
    """Moves τ in the place of the training loss.

    Args:
        config: of the run.
        model: on its device, with a learned τ.
        optimizer: of all its parameters.
        validation: its examples.
    """

    def __init__(self, config: TrainConfig, model: Model, optimizer: optim.Optimizer, validation: Validation):
        self.config, self.model, self.optimizer, self.validation = config, model, optimizer, validation
        [self.raw] = model.head.temperature.parameters()
        self.noise = torch.Generator(device=validation.device)

    def see(self, batch: Batch, seed: Callable[[], torch.Generator]) -> None:  # noqa: B027, most need not look
        """A part of the batch, after its loss.

        Args:
            batch: what was trained on.
            seed: brings all draws back to where the loss found them, and gives their generator.
        """

    @abstractmethod
    def before_step(self, step: int, examples: int) -> None:
        """When the gradients are there: say what becomes of that of τ.

        Args:
            step: counted from 0.
            examples: that the gradients are the mean of.
        """

    def clipped(self, norm: Tensor) -> None:  # noqa: B027
        """When gradients were clipped, with their norm before that."""

    def after_step(self, step: int, moves: bool) -> None:  # noqa: B027
        """When the step was done.

        Args:
            step: counted from 0.
            moves: whether τ may move yet.
        """

    def gradients(self, step: int, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Of the mean validation loss; the backbone as in evaluation, S as in training."""
        training, batches = self.model.backbone.training, self.validation.batches(step)
        self.model.backbone.eval()
        sums, count = [torch.zeros_like(parameter) for parameter in parameters], 0
        try:
            for number, batch in enumerate(batches):
                self.noise.manual_seed(derive(self.config.seed, step, number, 17))
                _, found = loss_gradients(self.model, batch, parameters, generator=self.noise)
                for total, value in zip(sums, found, strict=True):
                    total += value
                count += len(batch)
        finally:
            self.model.backbone.train(training)
        return [total / max(count, 1) for total in sums]


class DirectRule(TemperatureRule):
    """The paper's "simple gradient": τ follows the validation loss as if no weight depended on it."""

    def before_step(self, step: int, examples: int) -> None:
        """τ takes part in the step with its gradient of the validation loss."""
        [self.raw.grad] = self.gradients(step, [self.raw])
        add_prior(self.model.head.temperature, self.config.temperature_prior)


class BilevelRule(TemperatureRule):
    """Luketina et al.: τ follows the validation loss after the step, also through what τ did to that step."""

    def __init__(self, config: TrainConfig, model: Model, optimizer: optim.Optimizer, validation: Validation):
        super().__init__(config, model, optimizer, validation)
        self.groups = [
            (group, parameter) for group in optimizer.param_groups for parameter in group["params"]
            if parameter is not self.raw
        ]  # fmt: skip
        self.parameters = [parameter for _, parameter in self.groups]
        self.mixed: list[Tensor] = []
        self.before: list[Tensor] = []

    def see(self, batch: Batch, seed: Callable[[], torch.Generator]) -> None:
        """Add the derivative of this part's gradients with respect to t."""
        buffers = {name: value.clone() for name, value in self.model.backbone.named_buffers()}
        found = mixed_derivative(
            self.model.backbone,
            self.model.head,
            batch,
            self.parameters,
            generator=seed(),
            label_smoothing=self.config.label_smoothing,
        )
        for name, value in self.model.backbone.named_buffers():  # running averages have seen this part already
            value.copy_(buffers[name])
        self.mixed = [one + other for one, other in zip(self.mixed, found, strict=True)] if self.mixed else found

    def before_step(self, step: int, examples: int) -> None:
        """τ has no part in the step."""
        self.raw.grad = None
        self.mixed = [value / max(examples, 1) for value in self.mixed]
        if self.config.clip:
            self.before = [gradient_of(parameter).clone() for parameter in self.parameters]

    def clipped(self, norm: Tensor) -> None:
        """Clipping is a part of the step."""
        self.mixed = clipped_tangents(self.before, self.mixed, float(norm), self.config.clip)
        self.before = []

    def after_step(self, step: int, moves: bool) -> None:
        """A step of τ alone; by nothing where it may not move, so that the optimiser has a state to store."""
        found = self.hypergradient(step)
        self.raw.grad = found if moves else torch.zeros_like(found)
        if moves:
            add_prior(self.model.head.temperature, self.config.temperature_prior)
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.step()
        self.mixed = []

    def hypergradient(self, step: int) -> Tensor:
        """d F_val / dt after the step, like t."""
        direct, *slopes = self.gradients(step, [self.raw, *self.parameters])
        along = torch.zeros((), dtype=direct.dtype, device=direct.device)
        for (group, parameter), tangent, slope in zip(self.groups, self.mixed, slopes, strict=True):
            moved = step_tangent(self.optimizer, group, parameter, gradient_of(parameter), tangent)
            along += (moved * slope).sum()
        return direct + along


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Its gradient, 0 where it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def build_rule(
    config: TrainConfig, model: Model, optimizer: optim.Optimizer, validation: Split | None, device: torch.device
) -> TemperatureRule | None:
    """The rule of a configuration; None where τ follows the training loss, or nothing.

    Args:
        config: of the run.
        model: on its device.
        optimizer: of all its parameters.
        validation: the validation split, if the data has one.
        device: where the model is.
    """
    if config.temperature_method == "train":
        return None
    split = None if config.temperature_held_out else validation
    if not config.temperature_held_out and validation is None:
        raise ValueError(
            f"temperature_method = {config.temperature_method} needs a validation split, which the data does not have; "
            "give --validation, or --temperature-held-out 0.125"
        )
    kind = DirectRule if config.temperature_method == "gradient" else BilevelRule
    return kind(config, model, optimizer, Validation(config, split, device))
