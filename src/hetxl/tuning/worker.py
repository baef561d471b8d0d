"""A process that runs trials, one after the other: `python -m hetxl.tuning.worker`.

It reads one JSON object a line, {"trial", "log", "threads", "measure"}, and answers each by one line, {"error"} or
{"bytes"}. Each trial runs in a child that is forked from it, so that nothing is imported twice, what a trial takes is
given back, and one that is killed ends alone. When whoever asks is gone, the trial under way ends: it would otherwise
write into the directory of the one that takes it up again.
"""

import json
import os
import sys
import threading
import traceback
from typing import Any

import torch

from hetxl.training.config import TrainConfig
from hetxl.training.memory import needed_memory
from hetxl.training.train import open_data
from hetxl.tuning.trial import Trial, run_trial


def as_request(trial: Trial, log: str, threads: int, measure: bool = False) -> dict[str, Any]:
    """What a worker is asked.

    Args:
        trial: to run.
        log: file that its process prints into.
        threads: of its computations.
        measure: whether only to find how much memory it needs.
    """
    described = {"name": trial.name, "config": trial.config.to_dict(), "data": trial.data, "posthoc": trial.posthoc}
    return {"trial": described, "log": log, "threads": threads, "measure": measure}


def trial_of(described: dict[str, Any]) -> Trial:
    """The trial of a request."""
    return Trial(described["name"], TrainConfig.from_dict(described["config"]), described["data"], described["posthoc"])


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the trial of a request in this process."""
    torch.set_num_threads(request["threads"])
    try:
        trial = trial_of(request["trial"])
        if request["measure"]:
            return {"bytes": needed_memory(trial.config, open_data(trial.config))}
        run_trial(trial)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    return {"error": None}


def forked(request: dict[str, Any], answers: int | None = None) -> dict[str, Any]:
    """The answer of a child of this process, or how it ended.

    Args:
        request: as `as_request` makes it.
        answers: the file that answers go to, which the child has no business with.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        if answers is not None:
            os.close(answers)
        threading.Thread(target=_end_with_asker, daemon=True).start()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.write(writing, json.dumps(answer(request)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if told:
        return json.loads(told)
    if os.WIFSIGNALED(status):
        return {"error": f"its process was ended by signal {os.WTERMSIG(status)}"}
    return {"error": f"its process ended with code {os.WEXITSTATUS(status)}"}


def _end_with_asker() -> None:
    """Nothing more is asked while a trial runs: the input only ever closes."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Answer until the input closes."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints does not get among the answers
    # The first optimiser of a process makes torch import for seconds: once here, and not in every child.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    while line := _line():
        request = json.loads(line)
        found = forked(request, out.fileno()) if hasattr(os, "fork") else answer(request)
        print(json.dumps(found), file=out, flush=True)


def _line() -> bytes:
    """The next line of the input, read by the byte: nothing may be left in a buffer that a child would share."""
    found = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        found += byte
    return bytes(found)


if __name__ == "__main__":
    sys.exit(main())
