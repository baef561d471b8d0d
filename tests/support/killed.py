"""A run that is killed again and again, in processes of its own.

The process imports everything, computes nothing, and forks: the children train until one of them is killed at a random
moment, and the next take up what they left. Forking is safe because the parent has started no thread, and fast because
nothing is imported twice.

    python killed.py DIRECTORY KILLS SEED KIND [PROCESSES]

The kind is one of `KINDS`; images are read from the tar shards DIRECTORY/../tars. Printed are the number of kills, the
last checkpoint at each, and the memory and open files of the main process while it was not killed, all as JSON.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.training import train
from support.pairs import small_pairs

OPTIONS: dict[str, Any] = {
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
HEAD_ALONE = {"backbone": "none"} | dict.fromkeys(("width", "features")) | {"dropout": 0.0}
IMAGES = {"backbone": "cnn", "width": 8, "depth": 1, "dropout": 0.0, "image_size": 16, "workers": 0}
LONG = {"steps": 20_000, "log_every": 100, "evaluate_every": 500, "checkpoint_every": 100}
KINDS = {
    "mlp": lambda out: TrainConfig(**OPTIONS, out=str(out)),
    "none": lambda out: TrainConfig(**OPTIONS | HEAD_ALONE, out=str(out)),  # first without its noise
    "frozen": lambda out: TrainConfig(**OPTIONS | IMAGES | {"data": _shards(out), "frozen": True}, out=str(out)),
    "shards": lambda out: TrainConfig(**OPTIONS | IMAGES | {"data": _shards(out), "steps": 60}, out=str(out)),
    "pairs": lambda out: small_pairs(
        _shards(out), out, steps=60, evaluate_every=20, checkpoint_every=2, evaluation_pairs=0
    ),
    "soak": lambda out: TrainConfig(**OPTIONS | LONG, out=str(out)),
}


def _shards(out: Path) -> str:
    return str(out.parent / "tars" / "*.tar")


def begin(config: Any, rank: int, processes: int, port: int) -> int:
    """Train to the end in a new process; return its number."""
    child = os.fork()
    if child:
        return child
    if processes > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"})
    try:
        train(config, console=Console(quiet=True))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def usage(process: int) -> tuple[int, int]:
    """The memory of a process in bytes, and its open files."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{process}/fd"))


def main(directory: Path, kills: int, seed: int, kind: str, processes: int = 1) -> None:
    """Kill the run this often, at moments before, between and after its steps, then let it end."""
    draw, config, checkpoints = random.Random(seed), KINDS[kind](directory), Checkpoints(directory / "checkpoints")
    targets = sorted(draw.randint(-config.steps // 5, config.steps) for _ in range(kills))
    at: list[int] = []
    samples: list[tuple[int, int, int]] = []
    while True:
        port = free_port()
        children = [begin(config, rank, processes, port) for rank in range(processes)]
        while not (ended := os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            step = max(checkpoints.steps(), default=0)
            if len(at) < kills and step >= targets[len(at)]:
                time.sleep(draw.uniform(0, 0.9 if targets[len(at)] < 0 else 0.1))
                break
            if len(at) == kills:
                samples.append((step, *usage(children[0])))
            time.sleep(0.01 if len(at) < kills else 0.2)
        if ended is None and len(at) < kills:
            draw.shuffle(children)
            for child in children:  # one is killed, and the others are at most a moment behind
                os.kill(child, signal.SIGKILL)
                time.sleep(draw.uniform(0, 0.1))
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(map(os.WIFSIGNALED, statuses)):
            at.append(max(checkpoints.steps(), default=0))
        elif any(statuses):
            sys.exit(1)
        elif len(at) == kills:
            break
        else:  # it ended before enough kills: take the result away, and the last checkpoints, to resume earlier
            (directory / "result.json").unlink()
            for step in checkpoints.steps()[1:]:
                shutil.rmtree(directory / "checkpoints" / f"step-{step:08d}")
    print(json.dumps({"killed": len(at), "checkpoints": at, "samples": samples}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
