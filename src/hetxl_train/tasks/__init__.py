"""Tasks: what a run trains. A task owns its model, the loss of a batch, its validation and its result; the loop, the
checkpoints and the run directory know no more of it than `Task`."""

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
    """The loss of a part of a batch, over the examples that could be read."""

    value: Tensor  # a sum over examples, or a mean over the batch of all processes (`Task.examples` is None)
    examples: int


Data = TypeVar("Data", Dataset, Pairs)
Network = TypeVar("Network", bound=nn.Module)


class Task(ABC, Generic[Config, Data, Network]):
    """A kind of run, ready to train: the loop calls the methods from `loss` to `after_step` in their order."""

    model: Network  # what is trained, on its device
    whole: Network  # what is saved: the model, with its frozen backbone where features are read from a file
    split: Split  # rows to train on
    order: Order
    steps: int
    examples: int | None = None  # that the summed losses of a step are divided by; None where the loss is a mean
    evaluations: ClassVar[int] = 10  # per run, if the configuration does not say
    monitor: ClassVar[str | None] = None  # metric of `validate` whose lowest value marks the best checkpoint
    command: ClassVar[str] = ""  # of the command line that it belongs to, before `report`

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
        """Take what the loop has built, before its first step."""

    def prepared(self, feed: Feed, step: int) -> Feed:
        """Return the parts of a step's batch, as the loss takes them one after the other."""
        return feed

    @abstractmethod
    def loss(self, called: nn.Module, fetched: Fetched, targets: Any, step: int, part: int) -> Loss:
        """Return the loss of a part of a batch, with all randomness seeded by the step, from 0, and the part.

        Args:
            called: the model, or what wraps it over several processes.
            part: its number within the step, over all processes.
        """

    def after_backward(self) -> None:
        """Look at the part of the batch whose gradients were just added."""

    def before_step(self, step: int, examples: int) -> None:
        """Change gradients, which are means, before they are clipped; `examples` is the count of this process."""

    def clipped(self, norm: Tensor) -> None:
        """Note the norm of the gradients before they were clipped."""

    def after_step(self, step: int) -> None:
        """Act on the weights after a step of the optimiser."""

    @abstractmethod
    def status(self) -> dict[str, float]:
        """Return what every line of the log has beside the loss."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Return metrics of the model as it is, the same in all processes, which all call this; in evaluation mode."""

    @abstractmethod
    def estimate(self, parts: Parts) -> Estimate | None:
        """Measure a step in the main process alone; return time and memory of the run, None if no row could be read."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the content of model.json: what is needed to build the model again without its data."""

    def write_data(self, directory: Path) -> None:
        """Write what the configuration changed in the data."""

    def choose_weights(self) -> None:
        """Change the trained weights for better ones, before they are saved; called in all processes."""

    @abstractmethod
    def result(self, directory: Path, *, stopped: bool, validate: bool) -> dict[str, Any]:
        """Evaluate the trained model, write what a report shows, and return the task's part of result.json.

        All processes call this, and the main process writes. Validate again if the weights are others than those of the
        last validation.
        """

    @staticmethod
    @abstractmethod
    def summary(result: dict[str, Any]) -> str:
        """Return a result in one line."""
