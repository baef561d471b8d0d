"""A run in several processes, one of which is killed again and again, to be started by torchrun with restarts.

    torchrun --max-restarts KILLS … killed_process.py DIRECTORY KILLS SEED KIND

The kind is one of `KINDS`; images and pairs are read from the tar shards DIRECTORY/../tars.

In every attempt but the last a random process is killed at a random moment: before a step, while a batch is evaluated,
while a checkpoint is written or updated, before work that others wait for, or while it waits for others. Every start
and kill is noted in DIRECTORY/../kills.jsonl.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from hetxl.metrics.records import RecordsBuilder
from hetxl_train import checkpoint, distributed
from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.distributed import World
from hetxl_train.loop import Trainer
from hetxl_train.training import train
from support.killed import IMAGES, OPTIONS
from support.pairs import small_pairs
from support.processes import train_in_double
from support.training import QUIET

STEPS = {"steps": 100, "evaluate_every": 4, "checkpoint_every": 2, "batch_size": 16}
TOWERS = {
    "image": "timm:test_resnet",
    "image_weights": "random",
    "image_lock": "mapped",
    "image_size": 32,
    "accumulate": 2,
    "dropout": 0.1,
    "ema": 0.9,
}
MOMENTS = (
    (Trainer, "take_step"),
    (RecordsBuilder, "add"),
    (checkpoint, "write_checked"),
    (Checkpoints, "_write_parts"),
    (distributed, "_outcome"),
    (World, "wait"),
)
KINDS = {
    "images": lambda out: TrainConfig(**OPTIONS | IMAGES | STEPS | {"data": _shards(out)}, out=str(out)),
    "sharded": lambda out: TrainConfig(**OPTIONS | STEPS, classifier="sharded", class_shards=2, out=str(out)),
    "towers": lambda out: small_pairs(_shards(out), out, **STEPS | TOWERS),
    "pairs": lambda out: small_pairs(_shards(out), out, **STEPS, evaluation_pairs=0),
}


def rounded(ranks: int) -> bool:
    """Return whether a resumed run differs by rounding: DDP sums gradients in another order in its first step."""
    return ranks > 2


def _shards(out: Path) -> str:
    return str(out.parent / "tars" / "*.tar")


class Killer:
    """Kills this process at one of its moments."""

    def __init__(self, notes: Path, directory: Path, moment: int | None):
        self.notes, self.directory, self.left = notes, directory, moment
        for owner, name in MOMENTS:
            setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if not self.left:
                    self.note(killed=name, checkpoints=Checkpoints(self.directory / "checkpoints").steps())
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    def note(self, **values: Any) -> None:
        """Add a line."""
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def main(directory: Path, kills: int, seed: int, kind: str) -> None:
    """Train; in the first attempts, be killed or see another process be."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    draw = random.Random(seed + attempt)
    victim, moment = draw.randrange(int(os.environ["WORLD_SIZE"])), draw.randrange(1, 25)
    killer = Killer(directory.parent / "kills.jsonl", directory, moment if attempt < kills and rank == victim else None)
    restore = Trainer.restore

    def restored(trainer: Trainer, stored: Any) -> None:
        restore(trainer, stored)
        if trainer.world.is_main:
            killer.note(resumed=trainer.progress.step)

    Trainer.restore = restored
    config = KINDS[kind](directory)
    if rounded(int(os.environ["WORLD_SIZE"])):
        train_in_double(config)
    else:
        train(config, console=QUIET)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
