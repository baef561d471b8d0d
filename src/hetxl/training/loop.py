"""The training loop. Its state after a step is a function of the configuration, the data and the state before it: all
randomness is seeded by the step, so a run that was killed and resumed is the run that was never killed, bit for bit."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import Fetched, Split
from hetxl.evaluation.builder import NotFiniteError
from hetxl.functional import LabelLists
from hetxl.training.average import MovingAverage
from hetxl.training.checkpoint import Checkpoint, Checkpoints
from hetxl.training.config import TrainConfig
from hetxl.training.distributed import World
from hetxl.training.hypergradient import Batch
from hetxl.training.loader import Parts, batches, to_device
from hetxl.training.log import Log
from hetxl.training.model import Model
from hetxl.training.order import Order, derive
from hetxl.training.progress import Narrator
from hetxl.training.schedule import build_optimizer, learning_rate_at, set_learning_rate
from hetxl.training.state import Progress, finite, load_moments, load_weights, restoring, tensors_of
from hetxl.training.temperature import add_prior, forget, hold, is_held
from hetxl.training.temperature_rules import build_rule

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TrainProgress(Progress):
    """What a run knows beside its weights.

    Attributes:
        best_nll: lowest validation loss so far; None before the first evaluation.
        since_best: evaluations since then.
        stopped: whether it ended early.
    """

    best_nll: float | None = None
    since_best: int = 0
    stopped: bool = False


class Trainer:
    """Trains a model.

    Args:
        config: of the run.
        model: on its device.
        split: the training data.
        steps: in all.
        checkpoints: where they are kept.
        world: the processes.
        narrator: tells how far it is.
        broken: counts examples that cannot be read.
        validation: the validation data, where τ follows its loss.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        split: Split,
        steps: int,
        checkpoints: Checkpoints,
        world: World,
        narrator: Narrator,
        broken: BrokenLimit,
        validation: Split | None = None,
    ):
        self.config, self.model, self.split, self.steps = config, model, split, steps
        self.checkpoints, self.world, self.narrator, self.broken = checkpoints, world, narrator, broken
        self.average = MovingAverage(model, config.ema) if config.ema else None
        self.progress = TrainProgress()
        self.noise = torch.Generator(device=world.device)
        dtype = PRECISIONS[config.precision]
        self.autocast = lambda: contextlib.nullcontext() if dtype is None else torch.autocast(world.device.type, dtype)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
        self.parts = Parts(config.batch_size, config.accumulate, world.rank, world.processes)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.trained:
            raise ValueError("nothing to train: every parameter of the model is frozen")
        self.optimizer = build_optimizer(model, config)
        self.rule = build_rule(config, model, self.optimizer, validation, world.device)
        if self.rule is not None and world.processes > 1:
            raise ValueError(
                f"temperature_method = {config.temperature_method} runs in one process, found {world.processes}"
            )
        held = 0 if self.rule is None else self.rule.validation.held * self.parts.accumulate
        self.examples = config.batch_size - held  # that a step trains on
        self.called: nn.Module = model
        if world.processes > 1:
            # The noise's modules are used in every step of every head: no parameter stays without a gradient.
            self.called = DistributedDataParallel(model)

    def train(self, log: Log | None, evaluate: Callable[[], dict[str, float]]) -> TrainProgress:
        """Go on to the last step.

        Args:
            log: where lines go; None in processes that do not lead.
            evaluate: gives validation metrics, "nll" among them; called in the leading process, with the averaged
                weights if there are any.
        """
        config, progress = self.config, self.progress
        evaluate_every = config.evaluate_every or max(1, -(-self.steps // 10))
        checkpoint_every = config.checkpoint_every or evaluate_every
        feed = self.feed()
        bar = self.narrator.bar(config.head.upper(), self.steps, progress.step)
        # The loss is summed where it is computed: reading it at every step would wait for the device.
        loss_sum = torch.tensor(progress.loss_sum, dtype=torch.float64)
        with bar, torch.random.fork_rng(devices=[]):
            self.model.train()
            while progress.step < self.steps and not progress.stopped:
                begin, loss = time.perf_counter(), math.nan
                loss_sum += self.take_step(progress.step, feed)
                progress.step += 1
                progress.loss_count += 1
                last = progress.step == self.steps
                logged = progress.step % config.log_every == 0 or last
                evaluated = progress.step % evaluate_every == 0 or last
                if logged or evaluated:
                    loss = self._finite(self.world.sum(loss_sum.clone()).item() / progress.loss_count)
                progress.seconds += time.perf_counter() - begin
                if logged:
                    self._log(log, loss)
                    bar.to(progress.step, self._status(loss))
                    loss_sum.zero_()
                    progress.loss_count = 0
                improved = self._evaluate(log, evaluate) if evaluated else False
                if evaluated or progress.step % checkpoint_every == 0:
                    progress.loss_sum = loss_sum.item()
                    self._save(best=improved)
        return progress

    def feed(self) -> Iterator[tuple[Fetched, Tensor | LabelLists]]:
        """The batches of the steps that are left, with their labels."""
        order = Order(len(self.split), derive(self.config.seed, 12))
        return batches(self.split, order, self.parts, self.progress.step, self.steps, self.config.workers)

    def take_step(self, step: int, feed: Iterator[tuple[Fetched, Tensor | LabelLists]]) -> Tensor:
        """One step of the optimiser; gives this process's share of the mean loss."""
        config = self.config
        rate = learning_rate_at(step, self.steps, config)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        total, read = torch.zeros((), dtype=torch.float64), 0
        smoothing = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
        for accumulated in range(config.accumulate):
            fetched, targets = next(feed)
            self.broken.add(fetched)
            part = self.parts.part(accumulated)
            inputs = fetched.inputs
            if self.rule is not None:
                inputs, targets = self.rule.validation.divide(fetched, self.split)
            inputs = inputs.to(self.world.device, non_blocking=True)
            targets = to_device(targets, self.world.device)
            self._seed(step, part)
            waits = accumulated + 1 < config.accumulate and isinstance(self.called, DistributedDataParallel)
            with self.called.no_sync() if waits else contextlib.nullcontext():  # pyright: ignore[reportCallIssue]
                with self.autocast():
                    loss = self.called(inputs, targets, reduction="sum", generator=self.noise, **smoothing)
                # The mean over the batch; processes average their gradients, parts add theirs.
                self.scaler.scale(loss * (self.world.processes / self.examples)).backward()
            total += loss.detach().double().cpu()
            read += len(inputs)
            if self.rule is not None:
                self.rule.see(Batch(inputs, targets), partial(self._seed, step, part))
        if read != self.examples // self.world.processes or self.world.processes > 1:
            self._correct_for_missing(read)
        temperature, held = self.model.head.temperature, is_held(step, self.steps, config)
        if config.clip or config.temperature_prior:
            self.scaler.unscale_(self.optimizer)
        if self.rule is not None:
            self.rule.before_step(step, read)
        elif config.temperature_prior:
            add_prior(temperature, config.temperature_prior)
        if held:
            hold(temperature)
        if config.clip:
            norm = nn.utils.clip_grad_norm_(self.trained, config.clip)
            if self.rule is not None:
                self.rule.clipped(norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.rule is not None:
            self.rule.after_step(step, moves=not held)
        if held:
            forget(temperature, self.optimizer)
        if self.average is not None:
            self.average.update(self.model, step)
        return total / self.examples

    def _seed(self, step: int, part: int) -> torch.Generator:
        """Bring all draws to where those of a part begin; gives the generator of the noise."""
        torch.manual_seed(derive(self.config.seed, step, part, 14))  # dropout and the like
        return self.noise.manual_seed(derive(self.config.seed, step, part, 13))

    def _correct_for_missing(self, read: int) -> None:
        """Make gradients those of the mean over the examples that could be read."""
        total = int(self.world.sum(torch.tensor([float(read)], device=self.world.device)).item())
        if total and total != self.examples:
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.examples / total)

    def _finite(self, loss: float) -> float:
        return finite(loss, self.progress.step, self.checkpoints, self.config)

    def _temperature(self) -> float:
        with torch.no_grad():
            return float(self.model.head.temperature())

    def _status(self, loss: float) -> str:
        speed = self._speed()
        return f"loss {loss:.3f}  τ {self._temperature():.3f}  {speed:,.0f} examples/s"

    def _speed(self) -> float:
        return self.progress.step * self.config.batch_size / max(self.progress.seconds, 1e-9)

    def _log(self, log: Log | None, loss: float) -> None:
        if log is not None:
            log.write(
                "step",
                step=self.progress.step,
                seconds=round(self.progress.seconds, 3),
                examples=self.progress.step * self.config.batch_size,
                loss=loss,
                temperature=self._temperature(),
                learning_rate=learning_rate_at(self.progress.step - 1, self.steps, self.config),
                examples_per_second=round(self._speed(), 1),
            )

    def _evaluate(self, log: Log | None, evaluate: Callable[[], dict[str, float]]) -> bool:
        """Whether this is the best so far; sets `stopped` when patience is at its end."""
        progress, improved = self.progress, False
        if self.world.leads:
            self.model.eval()
            try:
                with self.averaged():
                    found = evaluate()
            except NotFiniteError:
                found = {"nll": math.nan}
            self.model.train()
            self._finite(found["nll"])
            if log is not None:
                log.write("evaluation", step=progress.step, seconds=round(progress.seconds, 3), **found)
            improved = progress.best_nll is None or found["nll"] < progress.best_nll
            progress.best_nll = found["nll"] if improved else progress.best_nll
            progress.since_best = 0 if improved else progress.since_best + 1
            progress.stopped = bool(self.config.patience) and progress.since_best >= self.config.patience
        progress.stopped = self.world.agree(progress.stopped)
        return improved

    def averaged(self) -> contextlib.AbstractContextManager:
        """Inside, the model has its averaged weights, if there are any."""
        return contextlib.nullcontext() if self.average is None else self.average.applied(self.model)

    def _save(self, best: bool) -> None:
        if self.world.leads:
            self.checkpoints.save(Checkpoint(self.progress.step, self._tensors(), self._state()), best)
        self.world.wait()

    def _tensors(self) -> dict[str, Tensor]:
        found = tensors_of(self.model, self.optimizer)
        if self.average is not None:
            found |= {f"average.{name}": value for name, value in self.average.values.items()}
        return found

    def _state(self) -> dict[str, Any]:
        return {"progress": vars(self.progress).copy(), "scaler": self.scaler.state_dict(), "seed": self.config.seed}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up the state of a checkpoint."""
        with restoring(checkpoint):
            load_weights(self.model, checkpoint)
            load_moments(self.optimizer, checkpoint)
            if self.average is not None:
                self.average.load({name: checkpoint.tensors[f"average.{name}"] for name in self.average.values})
            self.progress = TrainProgress(**checkpoint.state["progress"])
        self.scaler.load_state_dict(checkpoint.state["scaler"])
