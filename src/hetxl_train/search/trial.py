"""One run of a search, and many at a time: in whichever process it runs, its result is in its directory."""

import dataclasses
import os
import shutil
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hetxl._files import read_json
from hetxl.registry import HEAD_LABELS
from hetxl_train.console import Console
from hetxl_train.data import describe
from hetxl_train.data.dataset import Dataset, Fetched, Shown, Split
from hetxl_train.data.labels import Labels
from hetxl_train.data.open import open_data
from hetxl_train.distributed import accelerators
from hetxl_train.log import read_log
from hetxl_train.process_pool import Pool
from hetxl_train.rescale import rescale
from hetxl_train.runner import PlannedRun, needed_memory
from hetxl_train.training import train

DATA = ("blind", "whole", "joined")
"""The rows that a trial sees: all but the test split, all, or training and validation rows as one training split."""


@dataclass(frozen=True)
class Outcome:
    """The end of a trial."""

    trial: PlannedRun
    error: str | None = None  # why it failed
    result: dict[str, Any] | None = None  # content of result.json; None if it failed

    @property
    def temperature(self) -> float:
        """τ of the trained model."""
        assert self.result is not None
        return float(self.result["temperature"])

    @property
    def seconds(self) -> float:
        """Time in training steps; 0 for a trial that failed."""
        return 0.0 if self.result is None else float(self.result["train_seconds"] or 0.0)

    def nll(self, split: str) -> float:
        """Return the NLL of a split."""
        assert self.result is not None
        return float(self.result["metrics"][split]["nll"])

    def path(self) -> list[list[float]]:
        """Return the logged steps with τ after each."""
        log = read_log(self.trial.directory / "log.jsonl")
        return [[line["step"], line["temperature"]] for line in log if line.get("kind") == "step"]

    def __str__(self) -> str:
        if self.result is None:
            return f"{self.trial.name} failed: {self.error}"
        metrics = self.result["metrics"]
        split = "validation" if "validation" in metrics else next(iter(metrics))
        nll = metrics[split]["nll"]
        return f"{self.trial.name}: τ {self.temperature:.3f}, {split} NLL {nll:.4f}, {self.seconds:.0f} s"


def run_trial(trial: PlannedRun, console: Console | None = None) -> None:
    """Train, or resume, to the end, and remove the checkpoints; silently without a console."""
    if trial.finished:
        return
    console = console or Console(quiet=True)
    dataset = open_data(trial.config)
    if trial.data == "joined":
        dataset = with_validation_joined(dataset)
    elif trial.data == "blind":
        dataset = dataset.without("test")
    label = HEAD_LABELS[trial.config.head]
    run = train(trial.config, dataset=dataset, console=console, label=label, description=describe(dataset))
    if trial.scaled is not None:
        rescale(run, trial.scaled, dataset, console, f"{label}, τ fitted afterwards", noise=False)
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    shutil.rmtree(run.path / "features", ignore_errors=True)


def outcome_of(trial: PlannedRun, error: str | None = None) -> Outcome:
    """Return the result in the directory of a trial, or why there is none."""
    if trial.finished:
        return Outcome(trial, result=read_json(trial.directories[-1] / "result.json"))
    return Outcome(trial, error=error or "it did not end")


def drop_weights(outcome: Outcome) -> None:
    """Remove the weights of a trial that was not chosen; its numbers stay."""
    for directory in outcome.trial.directories:
        (directory / "model.safetensors").unlink(missing_ok=True)


class Request(NamedTuple):
    """A trial for another process: where it prints, its number of threads, and whether only to measure its memory."""

    trial: PlannedRun
    log: Path
    threads: int
    measure: bool = False


def answer(request: Request) -> int | str | None:
    """Run a trial in this process, and print into its log; return None, or why it failed, or the bytes requested."""
    torch.set_num_threads(request.threads)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    try:
        if request.measure:
            return needed_memory(request.trial.config, open_data(request.trial.config))
        run_trial(request.trial)
    except Exception as error:
        traceback.print_exc()
        return _described(error)
    return None


class TrialPool(Pool[Request, int | str | None]):
    """Processes that run trials, and print into a directory `logs`; use it as a context.

    None stops the others when it fails. The number of jobs may be raised later. Several accelerators are divided among
    the processes, unless the trials' `device` names one.
    """

    def __init__(self, logs: Path, jobs: int = 1, device: str = "cpu"):
        super().__init__(answer, jobs, accelerators(device))
        self.logs = logs

    def measure(self, trial: PlannedRun) -> int | None:
        """Return the bytes that a trial needs; None if measuring fails, which the trial itself will explain."""
        [(_, needed)] = self.map([self._request(trial, measure=True)])
        return needed if isinstance(needed, int) else None

    def run(self, trials: Sequence[PlannedRun], console: Console) -> list[Outcome]:
        """Run all trials that are not finished, with different names; return the outcome of each, in their order."""
        outcomes = {trial.name: outcome_of(trial) for trial in trials if trial.finished}
        requests = [self._request(trial) for trial in trials if not trial.finished]
        with console.bar("trials", len(trials), len(outcomes)) as bar:
            for request, result in self.map(requests):
                trial = request.trial
                error = _described(result) if isinstance(result, Exception) else result
                outcomes[trial.name] = outcome_of(trial, None if error is None else str(error))
                bar.to(len(outcomes), trial.name)
                console.say(str(outcomes[trial.name]))
        return [outcomes[trial.name] for trial in trials]

    def _request(self, trial: PlannedRun, measure: bool = False) -> Request:
        self.logs.mkdir(parents=True, exist_ok=True)
        threads = max(1, torch.get_num_threads() // self.jobs)
        return Request(trial, (self.logs / f"{trial.name}.txt").resolve(), threads, measure)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


class Joined(Split):
    """The rows of one split, then those of another of the same kind."""

    def __init__(self, first: Split, second: Split):
        if first.labels.multi != second.labels.multi:
            raise ValueError("first and second must both have one label per row, or both lists of labels")
        self.first, self.second = first, second
        self.workers = first.workers or second.workers
        ids = np.concatenate((np.asarray(first.labels.ids), np.asarray(second.labels.ids)))
        offsets, more = first.labels.offsets, second.labels.offsets
        joined = None if offsets is None or more is None else np.concatenate((offsets, more[1:] + offsets[-1]))
        self.labels = Labels(ids, joined)

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b] in their order, each from its split; rows that cannot be read are left out."""
        rows, count = np.asarray(rows), len(self.first)
        parts, positions = [], []
        for split, chosen, shift in ((self.first, rows < count, 0), (self.second, rows >= count, count)):
            indices = np.flatnonzero(chosen)
            if len(indices):
                own_seeds = None if seeds is None else np.asarray(seeds)[indices]
                parts.append((split.fetch(rows[indices] - shift, own_seeds), shift))
                positions.append(indices[np.isin(rows[indices], parts[-1][0].rows + shift)])
        inputs = torch.cat([part.inputs for part, _ in parts if len(part.rows)] or [parts[0][0].inputs])
        read = np.concatenate([part.rows + shift for part, shift in parts])
        unreadable = [item for part, _ in parts for item in part.unreadable]
        order = np.argsort(np.concatenate(positions))  # as requested
        return Fetched(inputs[torch.from_numpy(order)], read[order], unreadable)

    def show(self, row: int) -> Shown:
        """Show a row as its split does."""
        count = len(self.first)
        return self.first.show(row) if row < count else self.second.show(row - count)


def with_validation_joined(dataset: Dataset) -> Dataset:
    """Return the data with its validation rows among the training rows, and no validation split."""
    if "validation" not in dataset.splits:
        raise ValueError(f"data {dataset.name!r} has no validation split to train on as well")
    joined = Joined(dataset.splits["train"], dataset.splits["validation"])
    return dataclasses.replace(dataset, splits={**dataset.without("validation").splits, "train": joined})
