"""The interface of tasks. A task defines the model, the loss of a batch, the validation and the result of a run; the
loop, the checkpoints and the run directory use only `Task`."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn, optim

from hetxl_train.config import Config
from hetxl_train.data.dataset import Dataset, Fetched, Split
from hetxl_train.data.pairs import Pairs
from hetxl_train.distributed import World
from hetxl_train.estimate import Estimate
from hetxl_train.loaders import Feed, Order, Parts


class Loss(NamedTuple):
    """The loss over the readable examples of a part of a batch."""

    value: Tensor  # a sum over examples, or if `Task.examples` is None a mean over the batch of all processes
    examples: int


Data = TypeVar("Data", Dataset, Pairs)
Network = TypeVar("Network", bound=nn.Module)


class Task(ABC, Generic[Config, Data, Network]):
    """The task of a run; the loop calls the methods from `loss` to `after_step` in this order."""

    model: Network  # the trained model, on its device
    whole: Network  # the saved model, including a frozen backbone whose features are cached in a file
    split: Split  # rows to train on
    order: Order
    steps: int
    examples: int | None = None  # divisor of the summed losses of a step; None if the loss is a mean
    evaluations: ClassVar[int] = 10  # default number per run
    monitor: ClassVar[str | None] = None  # metric of `validate` that is lowest at the best checkpoint
    command: ClassVar[str] = ""  # prefix of `report` on the command line

    def __init__(self, config: Config, dataset: Data, world: World):
        if "train" not in dataset.splits:
            raise ValueError(f"data {config.data!r} has no training split")
        self.config, self.dataset, self.world, self.device = config, dataset, world, world.device
        self.noise = torch.Generator(device=world.device)
        self.validation = "validation" if "validation" in dataset.splits else "train"

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return groups for an optimiser, each with "scale" (its multiple of the learning rate) and "names"."""

    def start(self, optimizer: optim.Optimizer, parts: Parts) -> None:
        """Receive the loop's objects before the first step."""

    def prepared(self, feed: Feed, step: int) -> Feed:
        """Return the parts of a step's batch for successive calls of the loss."""
        return feed

    @abstractmethod
    def loss(self, called: nn.Module, fetched: Fetched, targets: Any, step: int, part: int) -> Loss:
        """Return the loss of a part of a batch; the step, from 0, and the part seed all randomness.

        Args:
            called: the model, or its wrapper for several processes.
            part: index of the part within the step, over all processes.
        """

    def after_backward(self) -> None:
        """Process the part of the batch whose gradients were added last."""

    def before_step(self, step: int, examples: int) -> None:
        """Change the mean gradients before clipping; `examples` is the count of this process."""

    def clipped(self, norm: Tensor) -> None:
        """Receive the norm of the gradients before clipping."""

    def after_step(self, step: int) -> None:
        """Change the weights after an optimiser step."""

    @abstractmethod
    def status(self) -> dict[str, float]:
        """Return the values that every line of the log has besides the loss."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Return validation metrics of the current model; all processes call this and get the same metrics."""

    @abstractmethod
    def estimate(self, parts: Parts) -> Estimate | None:
        """Estimate time and memory of the run from one step in the main process; None if no row could be read."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the content of model.json, which describes the model without its data."""

    def write_data(self, directory: Path) -> None:
        """Write which labels or pairs the configuration has changed."""

    def choose_weights(self) -> None:
        """Replace the trained weights by better ones before they are saved; all processes call this."""

    @abstractmethod
    def result(self, directory: Path, *, stopped: bool, validate: bool) -> dict[str, Any]:
        """Evaluate the trained model, write the data of the report, and return the task's part of result.json.

        All processes call this, and the main process writes. `validate` requests a new validation, because the weights
        may differ from those of the last one.
        """

    @staticmethod
    @abstractmethod
    def summary(result: dict[str, Any]) -> str:
        """Describe a result in one line."""
