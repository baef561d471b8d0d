"""The training loop of every task.

The state after a step depends only on the configuration, the data and the state before the step: the step seeds all
randomness. An interrupted run therefore resumes bit-exactly.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hetxl.optim import learning_rate_at, optimizer_over, set_learning_rate
from hetxl_train.checkpoint import Checkpoint, CheckpointError, Checkpoints, load_moments, load_weights, tensors_of
from hetxl_train.console import Console
from hetxl_train.data.dataset import UnreadableExamples
from hetxl_train.loaders import Feed, Parts, batches
from hetxl_train.log import Log
from hetxl_train.parallel import Alone, autocast, divided_parameters, local, strategy
from hetxl_train.tasks import Task


@dataclass
class Progress:
    """The state of a run, apart from its weights."""

    step: int = 0  # number of steps done
    seconds: float = 0.0  # time spent in these steps
    validation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    loss_sum: float = 0.0  # sum over the steps since the last line of the log
    loss_count: int = 0  # number of these steps
    evaluated: int = 0  # step of the last evaluation
    best_nll: float | None = None  # lowest validation loss; None before the first evaluation
    since_best: int = 0  # number of evaluations since the best one
    stopped: bool = False  # whether the run stopped early


class Trainer:
    """Train the model of a task; `unreadable` counts the examples that cannot be read."""

    def __init__(
        self, task: Task, checkpoints: Checkpoints, console: Console, unreadable: UnreadableExamples,
        parallel: Alone | None = None,
    ):  # fmt: skip
        self.task, self.config, self.model, self.world = task, task.config, task.model, task.world
        self.checkpoints, self.console, self.unreadable = checkpoints, console, unreadable
        self.progress = Progress()
        config, world = self.config, self.world
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "float16")
        self.data = world.replicas  # the processes that divide the rows of a batch
        self.parts = Parts(config.batch_size, config.accumulate, self.data.rank, self.data.processes)
        self.parallel = strategy(config.data_parallel, world) if parallel is None else parallel
        self.parallel.divide(self.model)
        checkpoints.divided = divided_parameters(self.model)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not self.trained:
            raise ValueError("nothing to train: every parameter of the model is frozen")
        self.optimizer = optimizer_over(task.parameter_groups(), config.optim)
        self.average = moving_average(self.model, config.ema) if config.ema else None
        task.start(self.optimizer, self.parts)
        # The divisor turns summed losses into the mean over the batch. Processes average gradients; parts add them.
        self.divisor = task.examples or self.data.processes
        self.called = self.parallel.wrap(self.model)

    def train(self, log: Log | None, validate: Callable[[], dict[str, Any]]) -> Progress:
        """Train to the last step.

        Only the main process has a log. All processes call `validate`, with the averaged weights if there are any; it
        returns the same metrics in each process.
        """
        config, progress, steps = self.config, self.progress, self.task.steps
        evaluate_every = config.evaluate_every or max(1, -(-steps // self.task.evaluations))
        checkpoint_every = config.checkpoint_every or evaluate_every
        feed = self.feed()
        bar = self.console.bar(config.head.upper(), steps, progress.step)
        # The sum of the losses stays on the device: reading it at every step would block on the device.
        loss_sum = self._double(progress.loss_sum)
        with bar, torch.random.fork_rng(devices=[]):
            self.model.train()
            if progress.step > progress.evaluated and (progress.step == steps or progress.step % evaluate_every == 0):
                self._evaluate(log, validate)  # the run was interrupted between a checkpoint and its evaluation
            while progress.step < steps and not progress.stopped:
                begin, loss = time.perf_counter(), math.nan
                loss_sum += self.take_step(progress.step, feed)
                progress.step += 1
                progress.loss_count += 1
                last = progress.step == steps
                logged = progress.step % config.log_every == 0 or last
                evaluated = progress.step % evaluate_every == 0 or last
                if logged or evaluated:
                    loss = self._finite(self.data.sum(loss_sum.clone()).item() / progress.loss_count)
                progress.seconds += time.perf_counter() - begin
                if logged:
                    bar.to(progress.step, self._log(log, loss))
                    loss_sum.zero_()
                    progress.loss_count = 0
                if evaluated or progress.step % checkpoint_every == 0:
                    self._save(loss_sum)  # before the evaluation, which is slow and may be interrupted
                if evaluated:
                    self._evaluate(log, validate)
        return progress

    def _double(self, value: float) -> Tensor:
        """Return a scalar tensor on the device, in double precision if the device supports it."""
        dtype = torch.float32 if self.world.device.type == "mps" else torch.float64
        return torch.full((), value, dtype=dtype, device=self.world.device)

    def feed(self) -> Feed:
        """Return the batches of the remaining steps, with their labels."""
        task = self.task
        pin = self.config.pin_memory and self.world.device.type == "cuda"
        return batches(task.split, task.order, self.parts, self.progress.step, task.steps, self.config.workers, pin)

    def take_step(self, step: int, feed: Feed) -> Tensor:
        """Take one optimiser step; return this process's share of the mean loss."""
        config, task, processes = self.config, self.task, self.data.processes
        set_learning_rate(self.optimizer, learning_rate_at(step, task.steps, config.optim))
        self.optimizer.zero_grad(set_to_none=True)
        total, read = self._double(0.0), 0
        prepared = task.prepared(feed, step)
        for accumulated in range(config.accumulate):
            fetched, targets = next(prepared)
            self.unreadable.add(fetched)
            waits = accumulated + 1 < config.accumulate
            with self.parallel.accumulating(self.called) if waits else contextlib.nullcontext():
                with autocast(self.world.device, config.precision):
                    loss, examples = task.loss(self.called, fetched, targets, step, self.parts.part(accumulated))
                self.scaler.scale(loss * (processes / self.divisor)).backward()
            total += loss.detach()
            read += examples
            task.after_backward()
        self.parallel.reduce(self.trained)
        if task.examples is not None and (read != task.examples // processes or processes > 1):
            self._correct_for_missing(read, task.examples)
        self.scaler.unscale_(self.optimizer)
        task.before_step(step, read)
        if config.clip:
            task.clipped(self.parallel.clip(self.trained, config.clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        task.after_step(step)
        if self.average is not None:
            self.average.update_parameters(self.model)
        return total / self.divisor

    def _correct_for_missing(self, read: int, examples: int) -> None:
        """Rescale the gradients to the mean over the examples that could be read."""
        total = self.data.sum(torch.full((), float(read), device=self.world.device)).clamp_(min=1)
        # The factor is nearly always exactly 1. It stays on the device: reading it would block until the step is done.
        for parameter in self.trained:
            if parameter.grad is not None:
                local(parameter.grad).mul_((examples / total).to(parameter.grad.dtype))

    def _finite(self, loss: float) -> float:
        """Return the loss if it is finite; otherwise raise an error that says what to change."""
        if math.isfinite(loss):
            return loss
        config, steps = self.config, self.checkpoints.steps()
        where = f"; the last checkpoint is of step {steps[-1]}" if steps else ""
        raise FloatingPointError(
            f"the loss is {loss} after step {self.progress.step}{where}. Lower --learning-rate (now "
            f"{config.optim.learning_rate:g}), raise --warmup, or set --clip below {config.clip or 1:g}"
        )

    def _log(self, log: Log | None, loss: float) -> str:
        """Write a line to the log; return the text beside the progress bar."""
        progress, status = self.progress, self.task.status()
        examples = progress.step * self.config.batch_size
        speed = examples / max(progress.seconds, 1e-9)
        if log is not None:
            log.write(
                "step",
                step=progress.step,
                seconds=round(progress.seconds, 3),
                examples=examples,
                loss=loss,
                **status,
                learning_rate=learning_rate_at(progress.step - 1, self.task.steps, self.config.optim),
                examples_per_second=round(speed, 1),
            )
        values = [f"{name} {value:.3f}" for name, value in {"loss": loss, **status}.items()]
        return "  ".join([*values, f"{speed:,.0f} examples/s"])

    def _evaluate(self, log: Log | None, validate: Callable[[], dict[str, Any]]) -> None:
        """Evaluate, record the outcome in the step's checkpoint, and set `stopped` when the patience is exhausted."""
        progress, monitor, begin = self.progress, self.task.monitor, time.perf_counter()
        self.model.eval()
        with self.averaged(), self.parallel.gathered(self.model):
            metrics = validate()
        self.model.train()
        improved = False
        if monitor is not None:
            if self.world.is_main and not math.isfinite(metrics[monitor]):
                self.checkpoints.discard_after(progress.step - 1)  # weights that predict NaN
            loss = self._finite(metrics[monitor])
            improved = progress.best_nll is None or loss < progress.best_nll
            progress.best_nll = loss if improved else progress.best_nll
            progress.since_best = 0 if improved else progress.since_best + 1
            progress.stopped = bool(self.config.patience) and progress.since_best >= self.config.patience
        progress.evaluated = progress.step
        progress.validation_seconds += time.perf_counter() - begin
        if log is not None:
            log.write("evaluation", step=progress.step, seconds=round(progress.seconds, 3), **metrics)
        if self.world.is_main:
            self.checkpoints.update(progress.step, {"progress": vars(progress).copy()}, improved)
        self.world.wait()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap in the averaged weights, if there are any, within the context."""
        if self.average is None:
            yield
            return
        stored = [value.detach().clone() for value in self.model.parameters()]
        try:
            _copy_parameters(self.model, list(self.average.module.parameters()))
            yield
        finally:
            _copy_parameters(self.model, stored)

    def _save(self, loss_sum: Tensor) -> None:
        begin, progress = time.perf_counter(), self.progress
        sums = self.data.values(loss_sum)
        progress.loss_sum = sums[0]
        tensors = tensors_of(self.model, self.optimizer) | {
            f"average.{name}": value for name, value in self._averages()
        }
        # The step seeds the generators, so their state need not be saved.
        state: dict[str, Any] = {"progress": vars(progress).copy(), "seed": self.config.seed}
        state |= {"parts": [self.parts.processes, self.parts.accumulate], "loss_sums": sums}
        state |= {"class_shards": self.world.class_shards}
        state |= {"scaler": self.scaler.state_dict(), "unreadable": self.unreadable.state()}
        self.checkpoints.save(Checkpoint(progress.step, tensors, state), self.world)
        progress.checkpoint_seconds += time.perf_counter() - begin

    def _averages(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the averages of trained weights."""
        if self.average is not None:
            averages = self.average.module.named_parameters()
            yield from ((name, value) for name, value in averages if value.requires_grad)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        try:
            load_weights(self.model, checkpoint)
            load_moments(self.optimizer, checkpoint)
            if self.average is not None:
                _copy_parameters(self.average.module, list(self.model.parameters()))  # for the frozen parameters
                for name, value in self._averages():
                    value.detach().copy_(checkpoint.tensors[f"average.{name}"])
                self.average.n_averaged.fill_(checkpoint.step + 1)
            # Checkpoints without "evaluated" were written after their evaluation.
            self.progress = Progress(**{"evaluated": checkpoint.step, **checkpoint.state["progress"]})
            if self.progress.step != checkpoint.step:
                raise TypeError(f"its progress says step {self.progress.step}")
            sums = checkpoint.state.get("loss_sums", [self.progress.loss_sum])
            numbers = (*vars(self.progress).values(), *sums, *checkpoint.state.get("parts", (1, 1)))
            if not all(value is None or isinstance(value, int | float) for value in numbers):
                raise TypeError("its progress is not in numbers")
            self.scaler.load_state_dict(checkpoint.state["scaler"])
            if self.world.is_main and "unreadable" in checkpoint.state:  # the limit applies to the whole run
                self.unreadable.restore(checkpoint.state["unreadable"])
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"checkpoint of step {checkpoint.step} is damaged, or of another model or version: {reason}; start in "
                "another directory (--out)"
            ) from None
        rank, same = self.data.rank, len(sums) == self.data.processes
        self.progress.loss_sum = sums[rank] if same else sum(sums) * (rank == 0)


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """Return an average of weights: average ← decay · average + (1 − decay) · weights after every step.

    In the first steps t the decay is at most (1 + t) / (10 + t), so that the initial weights lose their influence.
    """

    def update(averages: list[Tensor], weights: list[Tensor], count: Tensor | int) -> None:
        # torch passes a copy of the count on the device, and reading that would block; `n_averaged` is on the CPU.
        step = int(average.n_averaged) - 1
        share = 1 - min(decay, (1 + step) / (10 + step))
        for own, weight in zip(averages, weights, strict=True):
            own.lerp_(weight, share)

    average = AveragedModel(model, multi_avg_fn=update)  # pyright: ignore[reportArgumentType]
    average.n_averaged.fill_(1)  # include the initial weights; at 0, torch would copy the weights of the first step
    return average


@torch.no_grad()
def _copy_parameters(model: nn.Module, values: list[nn.Parameter] | list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
