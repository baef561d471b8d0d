"""A run that is killed again and again, in a process of its own.

The process imports everything, computes nothing, and forks: each child trains and is killed at a random moment, and the
next takes up what it left. Forking is safe because the parent has started no thread, and fast because nothing is
imported twice.

    python killed.py DIRECTORY KILLS SEED BACKBONE
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.training import train

OPTIONS = {
    "data": "synthetic:rows=1500,classes=12,features=6",
    "head": "het-xl",
    "backbone": "mlp",
    "width": 16,
    "features": 8,
    "dropout": 0.2,
    "rank": 3,
    "train_samples": 2,
    "eval_samples": 8,
    "steps": 150,
    "batch_size": 16,
    "ema": 0.9,
    "learning_rate": 0.01,
    "log_every": 4,
    "evaluate_every": 25,
    "checkpoint_every": 2,
    "evaluation_examples": 60,
    "test_examples": 60,
    "device": "cpu",
}


SIZES = ("width", "features", "dropout")


def run(directory: Path, backbone: str) -> None:
    """Train to the end; without a backbone, the head alone, first without its noise."""
    options = OPTIONS | {"backbone": backbone}
    if backbone == "none":
        options = {name: value for name, value in options.items() if name not in SIZES}
    train(TrainConfig(**options, out=str(directory)), console=Console(quiet=True))


def main(directory: Path, kills: int, seed: int, backbone: str) -> None:
    """Kill the run this often, then let it end."""
    draw = random.Random(seed)
    killed, where = 0, []
    while True:
        child = os.fork()
        if not child:
            try:
                run(directory, backbone)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if killed < kills:
            time.sleep(draw.uniform(0.02, 0.9))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            where.append(len(list(directory.glob("checkpoints/step-*"))))
        elif os.WEXITSTATUS(status):
            sys.exit(1)
        elif killed >= kills:
            break
        else:  # it ended before enough kills: take the result away, and the last checkpoints, to resume earlier
            (directory / "result.json").unlink()
            for checkpoint in sorted(directory.glob("checkpoints/step-*"))[1:]:
                for file in checkpoint.iterdir():
                    file.unlink()
                checkpoint.rmdir()
    print(json.dumps({"killed": killed, "checkpoints": where}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
