"""What a training step of a head costs, as a multiple of DET's: measured in turns, in one process.

Seconds of whole trainings are no measure of it where something else runs on the machine now and then. Steps that take
turns have the same neighbours.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import Dataset
from hetxl.training.checkpoint import Checkpoints
from hetxl.training.config import TrainConfig
from hetxl.training.distributed import World
from hetxl.training.files import read_json, write_json
from hetxl.training.loop import Trainer
from hetxl.training.model import build_model, link_of
from hetxl.training.progress import Narrator

HEADS = ("det", "het", "het-h", "het-xl")
ROUNDS = 15
"""Steps of each head that count."""
WARM_UP = 2
"""Steps of each before them."""


def pace(
    config: TrainConfig,
    dataset: Dataset,
    path: Path,
    *,
    heads: Sequence[str] = HEADS,
    rounds: int = ROUNDS,
    narrator: Narrator | None = None,
) -> dict[str, float]:
    """The time of a training step of each head over that of DET, the median over rounds of one step each.

    Args:
        config: of the trainings; its head is replaced.
        dataset: that they are on.
        path: of a JSON file that keeps what was measured: a study that goes on takes it from there.
        heads: that are measured, DET among them.
        rounds: that count.
        narrator: tells how far it is.
    """
    if path.exists():
        return read_json(path)
    narrator = narrator or Narrator(quiet=True)
    trainers = {head: _trainer(dataclasses.replace(config, head=head), dataset, path, rounds) for head in heads}
    feeds = {head: trainer.feed() for head, trainer in trainers.items()}
    times: dict[str, list[float]] = {head: [] for head in heads}
    with torch.random.fork_rng(devices=[]), narrator.bar("time of a step", WARM_UP + rounds) as bar:
        for step in range(WARM_UP + rounds):
            for head, trainer in trainers.items():
                begin = time.perf_counter()
                trainer.take_step(step, feeds[head])
                times[head].append(time.perf_counter() - begin)
            bar.to(step + 1)
    found = {
        head: statistics.median(
            mine / det for mine, det in zip(times[head][WARM_UP:], times["det"][WARM_UP:], strict=True)
        )
        for head in heads
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def _trainer(config: TrainConfig, dataset: Dataset, path: Path, rounds: int) -> Trainer:
    """One that takes steps and keeps nothing."""
    # τ is fixed: whether it is learned is nothing next to a step.
    config = dataclasses.replace(config, temperature="1.0", workers=0)
    model = build_model(config, dataset.input, dataset.num_classes, link_of(config, dataset))
    model.train()
    checkpoints, world = Checkpoints(path.parent / "none"), World(torch.device("cpu"))
    steps, quiet = WARM_UP + rounds, Narrator(quiet=True)
    return Trainer(config, model, dataset.splits["train"], steps, checkpoints, world, quiet, BrokenLimit())
