"""Trials in parallel processes, none of which stops the others when it fails."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from hetxl.training.progress import Narrator
from hetxl.tuning.trial import Outcome, Trial, outcome_of
from hetxl.tuning.worker import as_request


class Worker:
    """A process that runs trials one after the other; a new one is started where it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for the answer."""
        if self._process is None or self._process.poll() is not None:
            # A session of its own: what it forks is ended with it, and Ctrl-C is for the asker alone.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hetxl.tuning.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.end()
            return {"error": f"the process of the trials ended with code {process.returncode}"}
        return json.loads(line)

    def end(self) -> None:
        """End the process, and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        process.wait()


class Workers:
    """Several workers; use it as a context.

    Args:
        jobs: how many trials run at a time.
        logs: folder for what their processes print.
    """

    def __init__(self, jobs: int, logs: Path):
        self.logs = logs
        self._all: list[Worker] = []
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.grow(jobs)

    @property
    def jobs(self) -> int:
        """How many trials run at a time."""
        return len(self._all)

    def grow(self, jobs: int) -> None:
        """Have as many workers, if there are fewer; their processes start when they have something to do."""
        while len(self._all) < jobs:
            self._all.append(Worker())
            self._free.put(self._all[-1])

    def __enter__(self) -> "Workers":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.end()

    def measure(self, trial: Trial) -> int | None:
        """Bytes that a trial needs; None if that cannot be found, which the trial itself will explain."""
        found = self._ask(trial, measure=True).get("bytes")
        return None if found is None else int(found)

    def run(self, trials: Sequence[Trial], narrator: Narrator) -> list[Outcome]:
        """Run all trials, those that are finished excepted; gives what became of each, in their order.

        Args:
            trials: with different directories.
            narrator: tells how far it is.
        """
        found = {trial.name: outcome_of(trial) for trial in trials if trial.finished}
        waiting = [trial for trial in trials if not trial.finished]
        pool = ThreadPoolExecutor(self.jobs)
        with narrator.bar("trials", len(trials), len(found)) as bar:
            try:
                asked = {pool.submit(self._ask, trial): trial for trial in waiting}
                for future in as_completed(asked):
                    trial = asked[future]
                    outcome = outcome_of(trial, future.result().get("error"))
                    found[trial.name] = outcome
                    bar.to(len(found), trial.name)
                    _tell(outcome, narrator)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in self._all:
                    worker.end()
                raise
        pool.shutdown()
        return [found[trial.name] for trial in trials]

    def _ask(self, trial: Trial, measure: bool = False) -> dict[str, Any]:
        worker = self._free.get()
        try:
            log = (self.logs / f"{trial.name}.txt").resolve()
            threads = max(1, torch.get_num_threads() // self.jobs)
            return worker.ask(as_request(trial, str(log), threads, measure))
        finally:
            self._free.put(worker)


def _tell(outcome: Outcome, narrator: Narrator) -> None:
    if outcome.result is None:
        narrator.say(f"{outcome.trial.name} failed: {outcome.error}")
        return
    metrics = outcome.result["metrics"]
    split = "validation" if "validation" in metrics else next(iter(metrics))
    narrator.say(
        f"{outcome.trial.name}: τ {outcome.temperature:.3f}, {split} NLL {metrics[split]['nll']:.4f}, "
        f"{outcome.seconds:.0f} s"
    )
