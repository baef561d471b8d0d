"""Train and evaluate a run from a configuration: `hetxl train` and `hetxl contrastive train`."""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch

from hetxl._files import read_json, write_checked
from hetxl.registry import HEAD_LABELS
from hetxl_train.checkpoint import Checkpoints, load_weights
from hetxl_train.config import Config, RunConfig, TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import Dataset, Description
from hetxl_train.data.dataset import UnreadableExamples
from hetxl_train.data.fingerprint import fingerprint
from hetxl_train.data.pairs import Pairs
from hetxl_train.distributed import world
from hetxl_train.formatting import duration, plural
from hetxl_train.log import Log
from hetxl_train.loggers import open_loggers
from hetxl_train.loop import Progress, Trainer
from hetxl_train.owner import owned
from hetxl_train.runs import Run, RunIdentity, check_data, default_directory, save_model, start_run
from hetxl_train.tasks import Task


def train(
    config: Config, *, dataset: Any = None, console: Console | None = None, label: str | None = None,
    description: Description | None = None,
) -> Run[Config]:  # fmt: skip
    """Train, evaluate on the test split, and write everything to the run's directory.

    If the directory has a run of the same configuration, resume it; a finished run does not change.

    Args:
        dataset: an opened dataset, including label noise or swaps; or a DataFrame or `datasets.Dataset` to open instead
            of `config.data`, which then only names the run; None to open `config.data`.
        label: name of the run in reports; by default that of the head.
        description: description of the data, if it was already printed; None to describe the data and print that.
    """
    task_class, console, began = _task_class(config), console or Console(), time.perf_counter()
    if dataset is not None and not isinstance(dataset, Dataset | Pairs):
        dataset = task_class.open(config, data=dataset)
    with world(config.device, config.timeout) as processes, contextlib.ExitStack() as stack:
        if not processes.is_main:
            console = Console(quiet=True)
        directory = default_directory(config) if config.out is None else Path(config.out)
        if dataset is None and processes.on_main(lambda: not directory.exists()):
            # Open the data first, so that a failure leaves no directory behind.
            dataset = processes.main_first(lambda: task_class.open(config))

        def own_and_start() -> Run[Config]:
            stack.enter_context(owned(directory))
            return start_run(config, directory)

        run = processes.on_main(own_and_start)
        if run.finished:
            read_json(run.path / "result.json", dict, instead="remove it and rerun the command to evaluate again")
            console.say(f"{run.path} is done; see result.json there, or hetxl {task_class.command}report {run.path}")
            return run
        if dataset is None:
            dataset = processes.main_first(lambda: task_class.open(config))
        if description is None and processes.is_main:
            description = task_class.announce(config, dataset, console)
        processes.wait()  # describing the data can take long in the main process; collectives come next
        task = task_class(config, dataset, processes, console, run.path, description)
        _train(task, run, console, label or HEAD_LABELS[config.head], began)
    return run


def _task_class(config: RunConfig) -> Any:
    """Return the task class of a configuration without importing the other one."""
    if isinstance(config, TrainConfig):
        from hetxl_train.tasks.classification import ClassificationTask

        return ClassificationTask
    from hetxl_train.tasks.contrastive import ContrastiveTask

    return ContrastiveTask


def _train(task: Task, run: Run, console: Console, label: str, began: float) -> None:
    """Train from the last checkpoint to the result; `began` is the `time.perf_counter` at the start of `train`."""
    processes, is_main = task.world, task.world.is_main
    unreadable = UnreadableExamples(path=run.path / ("broken.txt" if is_main else f"broken-{processes.rank}.txt"))
    checkpoints = Checkpoints(
        run.checkpoints.directory, run.config.keep, RunIdentity(run.config, fingerprint(task.dataset))
    )
    processes.wait()  # for all models: their weights may have to be downloaded
    trainer = Trainer(task, checkpoints, console, unreadable)
    if checkpoints.steps():
        check_data(run, task.dataset, tuple(task.dataset.splits), "train again in another --out")
    checkpoint, refused = checkpoints.latest()
    for message in refused:
        console.say(f"Not used: {message}")
    if checkpoint is not None:
        trainer.restore(checkpoint)
        difference = trainer.parts.difference(*checkpoint.state.get("parts", (1, task.config.accumulate)))
        shards = checkpoint.state.get("class_shards", 1)
        if shards != processes.class_shards:
            difference += f"; classes over {processes.class_shards} instead of {shards} processes: other rounding"
        console.say(f"Resuming from step {checkpoint.step:,} of {task.steps:,} in {run.path}{difference}")
    processes.wait()
    before = sum(_phases(trainer.progress).values())  # seconds spent before the run was resumed
    log = None
    if is_main:
        checkpoints.discard_after(trainer.progress.step)
        write_checked(run.path / "model.json", task.describe())
        task.write_data(run.path)
        alone = not trainer.parallel.divided  # with a part of the weights, a process cannot take a step alone
        if alone and checkpoint is None and (estimate := task.estimate(trainer.parts)) is not None and estimate.matters:
            console.say(f"{label}: {estimate}")
        step, options = trainer.progress.step, task.config.options()
        loggers = open_loggers(task.config.chosen_loggers, run.path, options, step)
        log = Log(run.path / "log.jsonl", step, loggers, trainer.progress.evaluated)
        if log.damaged:
            console.say(f"{run.path / 'log.jsonl'} had {plural(log.damaged, 'damaged line')}, which the run leaves out")
    processes.wait()
    with contextlib.closing(log) if log is not None else contextlib.nullcontext():
        progress = trainer.train(log, task.validate)
        if unreadable.seen:
            unreadable.finish()
        processes.wait()
        result = _finish(task, run, trainer, progress, label, began - before, 0 if log is None else log.lines)
        if log is not None:
            log.finish(result)
    console.say(f"{label}: {task.summary(result)}; {run.path}")
    phases = {name.removesuffix("_seconds"): value for name, value in result.items() if name.endswith("_seconds")}
    order = ("train", "validation", "checkpoint", "evaluate", "other")
    console.say(f"Time: {', '.join(f'{name} {duration(phases[name])}' for name in order)}")
    processes.wait()


def _phases(progress: Progress) -> dict[str, float]:
    """Return the seconds that a run has spent in each phase."""
    return {
        "train_seconds": progress.seconds,
        "validation_seconds": progress.validation_seconds,
        "checkpoint_seconds": progress.checkpoint_seconds,
    }


def _finish(
    task: Task, run: Run, trainer: Trainer, progress: Progress, label: str, began: float, log_lines: int
) -> dict[str, Any]:
    """Save and evaluate the final weights: the last ones, or with early stopping the best ones.

    The phases in the result add up to the time since `began`.
    """
    config, step = task.config, progress.step
    weights = trainer.averaged()
    if config.patience:
        checkpoint, refused = trainer.checkpoints.best()
        assert checkpoint is not None
        for message in refused:
            trainer.console.say(f"Not used: {message}")
        load_weights(task.model, checkpoint, averaged=bool(config.ema))
        step, weights = checkpoint.step, torch.no_grad()
    with weights:
        with trainer.parallel.gathered(task.model):
            task.choose_weights()
        if task.world.is_main:
            write_checked(run.path / "model.json", task.describe())
        save_model(run, task.whole, task.world)
        begin = time.perf_counter()
        # The last step ends with an evaluation. Only with early stopping, the weights may be those of another step.
        result = {"label": label, "head": config.head, "seed": config.seed}
        with trainer.parallel.gathered(task.model):
            result |= task.result(run.path, stopped=progress.stopped, validate=bool(config.patience))
    result |= {
        "steps": step,
        "examples": step * config.batch_size,
        "log_lines": log_lines,
        **_phases(progress),
        "evaluate_seconds": time.perf_counter() - begin,
    }
    spent = sum(value for name, value in result.items() if name.endswith("_seconds"))
    result["other_seconds"] = max(0.0, time.perf_counter() - began - spent)  # data, model, estimate, saving
    if task.world.is_main:
        write_checked(run.path / "result.json", result)
    return result
