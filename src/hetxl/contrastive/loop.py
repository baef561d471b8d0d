"""The training loop of two towers. As in `hetxl.training.loop`, its state after a step is a function of the
configuration, the data and the state before it: all randomness is seeded by the step, so a run that was killed and
resumed is the run that was never killed, bit for bit."""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from hetxl.contrastive.config import LABELS, ContrastiveConfig
from hetxl.contrastive.model import TwoTowers, choose_templates
from hetxl.contrastive.texts import TextTable
from hetxl.data.broken import BrokenLimit
from hetxl.data.pairs import PairSplit
from hetxl.training.checkpoint import Checkpoint, Checkpoints
from hetxl.training.distributed import World
from hetxl.training.loader import Parts, batches
from hetxl.training.log import Log
from hetxl.training.order import Order, derive
from hetxl.training.progress import Narrator
from hetxl.training.schedule import learning_rate_at, set_learning_rate
from hetxl.training.state import Progress, finite, load_moments, load_weights, restoring, tensors_of


def parameter_groups(model: nn.Module, config: ContrastiveConfig) -> list[dict[str, Any]]:
    """Groups for an optimiser, each with "scale" (its multiple of the learning rate) and "names".

    Weight decay is off for the scale and bias of the logits, for biases and the gains of norms.

    Args:
        model: two towers with a loss.
        config: of the run.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if parameter.dim() > 1 else 0.0
            scale = 1.0
            if name.startswith(("loss.image_noise.", "loss.text_noise.")):
                scale = config.noise_learning_rate
            elif name.startswith("loss."):
                scale = config.scale_learning_rate
            group = groups.setdefault(
                (decay, scale), {"weight_decay": decay, "scale": scale, "params": [], "names": []}
            )
            group["params"].append(parameter)
            group["names"].append(name)
    return list(groups.values())


class ContrastiveTrainer:
    """Trains two towers.

    Args:
        config: of the run.
        model: on its device.
        split: the training pairs.
        table: of their texts.
        steps: in all.
        checkpoints: where they are kept.
        world: the processes.
        narrator: tells how far it is.
        broken: counts pictures that cannot be read.
    """

    def __init__(
        self,
        config: ContrastiveConfig,
        model: TwoTowers,
        split: PairSplit,
        table: TextTable,
        steps: int,
        checkpoints: Checkpoints,
        world: World,
        narrator: Narrator,
        broken: BrokenLimit,
    ):
        self.config, self.model, self.split, self.table, self.steps = config, model, split, table, steps
        self.checkpoints, self.world, self.narrator, self.broken = checkpoints, world, narrator, broken
        self.progress = Progress()
        self.noise = torch.Generator(device=world.device)
        self.parts = Parts(config.batch_size, 1, world.rank, world.processes)
        self.order = Order(len(split), derive(config.seed, 23))
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = optim.AdamW(
            parameter_groups(model, config),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            fused=world.device.type in ("cpu", "cuda"),
        )
        self.called: nn.Module = DistributedDataParallel(model) if world.processes > 1 else model

    def train(self, log: Log | None, evaluate: Callable[[], dict[str, Any]]) -> Progress:
        """Go on to the last step.

        Args:
            log: where lines go; None in processes that do not lead.
            evaluate: gives validation metrics; called in the leading process.
        """
        config, progress = self.config, self.progress
        evaluate_every = config.evaluate_every or max(1, -(-self.steps // 5))
        checkpoint_every = config.checkpoint_every or evaluate_every
        feed = batches(self.split.images, self.order, self.parts, progress.step, self.steps, config.workers)
        loss_sum = torch.tensor(progress.loss_sum, dtype=torch.float64)
        bar = self.narrator.bar(LABELS[config.head], self.steps, progress.step)
        with bar, torch.random.fork_rng(devices=[]):
            self.model.train()
            while progress.step < self.steps:
                begin, loss = time.perf_counter(), math.nan
                fetched, _ = next(feed)
                loss_sum += self._step(progress.step, fetched)
                progress.step += 1
                progress.loss_count += 1
                last = progress.step == self.steps
                logged = progress.step % config.log_every == 0 or last
                if logged:
                    total = self.world.sum(loss_sum.clone()).item() / self.world.processes
                    loss = finite(total / progress.loss_count, progress.step, self.checkpoints, config)
                    loss_sum.zero_()
                    progress.loss_count = 0
                progress.seconds += time.perf_counter() - begin
                if logged:
                    self._log(log, loss)
                    speed = progress.step * config.batch_size / max(progress.seconds, 1e-9)
                    bar.to(progress.step, f"loss {loss:.3f}  scale {self.scale():.1f}  {speed:,.0f} pairs/s")
                evaluated = progress.step % evaluate_every == 0 or last
                if evaluated:
                    self._evaluate(log, evaluate)
                if evaluated or progress.step % checkpoint_every == 0:
                    progress.loss_sum = loss_sum.item()
                    self._save()
        return progress

    def scale(self) -> float:
        """The learned scale of the logits."""
        with torch.no_grad():
            return float(self.model.loss.scale())

    def loss_of(self, step: int, fetched: Any) -> Tensor:
        """The loss of this process's part of a step's batch.

        Args:
            step: counted from 0; it seeds the noise.
            fetched: the pictures.
        """
        config = self.config
        rows, seeds = self.order.of(*self.parts.places(step, 0))
        if len(fetched.rows) < len(rows):  # the loss takes parts of any size
            if not len(fetched.rows):
                raise ValueError(
                    f"none of {len(rows)} pictures of a batch could be read, first {fetched.broken[0].path}"
                )
            read = np.isin(rows, fetched.rows)
            rows, seeds = rows[read], seeds[read]
        templates = choose_templates(seeds, self.table.templates)
        texts = self.table.take(self.split.sources[rows], templates).to(self.world.device)
        # The same in all processes: each takes its rows of the whole batch's draws, as one process alone would.
        self.noise.manual_seed(derive(config.seed, step, 24))
        torch.manual_seed(derive(config.seed, step, self.world.rank, 25))  # dropout and the like
        half = config.precision == "bfloat16"
        with torch.autocast(self.world.device.type, torch.bfloat16) if half else contextlib.nullcontext():
            return self.called(fetched.inputs.to(self.world.device, non_blocking=True), texts, generator=self.noise)

    def _step(self, step: int, fetched: Any) -> Tensor:
        """One step of the optimiser; gives this process's loss."""
        config = self.config
        self.broken.add(fetched)
        set_learning_rate(self.optimizer, learning_rate_at(step, self.steps, cast(Any, config)))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(step, fetched)
        loss.backward()
        if config.clip:
            nn.utils.clip_grad_norm_(self.trained, config.clip)
        self.optimizer.step()
        return loss.detach().double().cpu()

    def _log(self, log: Log | None, loss: float) -> None:
        if log is not None:
            progress = self.progress
            log.write(
                "step",
                step=progress.step,
                seconds=round(progress.seconds, 3),
                examples=progress.step * self.config.batch_size,
                loss=loss,
                scale=self.scale(),
                learning_rate=learning_rate_at(progress.step - 1, self.steps, cast(Any, self.config)),
            )

    def _evaluate(self, log: Log | None, evaluate: Callable[[], dict[str, Any]]) -> None:
        if self.world.leads:
            self.model.eval()
            found = evaluate()
            self.model.train()
            if log is not None:
                log.write("evaluation", step=self.progress.step, seconds=round(self.progress.seconds, 3), **found)
        self.world.wait()

    def _save(self) -> None:
        if self.world.leads:
            # The generators are seeded by the step: the step is their state.
            state = {"progress": vars(self.progress).copy(), "seed": self.config.seed}
            self.checkpoints.save(Checkpoint(self.progress.step, tensors_of(self.model, self.optimizer), state))
        self.world.wait()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up the state of a checkpoint."""
        with restoring(checkpoint):
            load_weights(self.model, checkpoint)
            load_moments(self.optimizer, checkpoint)
            self.progress = Progress(**checkpoint.state["progress"])
