"""Trainings two at a time, one thread each: on a few cores that is faster than one after the other on all of them."""

import dataclasses
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from hetxl.contrastive.results import summary_line
from hetxl.contrastive.train import train as train_pairs
from hetxl.data import describe
from hetxl.studies.cache import DIVERGED, AnyTraining, Cache, Training
from hetxl.studies.measure import one_thread
from hetxl.studies.pair_trainings import PairTraining
from hetxl.training.files import write_json
from hetxl.training.progress import Narrator, duration
from hetxl.training.train import train

_KEPT = 3
"""Datasets that a process keeps open."""
_open: dict[tuple[Any, ...], Any] = {}


def default_jobs() -> int:
    """How many trainings at a time: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_trainings(
    trainings: Sequence[AnyTraining], cache: Cache, *, jobs: int | None = None, narrator: Narrator | None = None
) -> float:
    """Run what is not there yet, each training once; a study that was stopped goes on with what is left.

    Args:
        trainings: the same one may be there several times.
        cache: where they are kept.
        jobs: how many at a time, one thread each; None for one a core, 1 for this process alone.
        narrator: tells how far it is.

    Returns:
        The seconds it took.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, found {jobs}")
    narrator = narrator or Narrator()
    begin = time.perf_counter()
    wanted = {one.key: one for one in trainings}
    left = [one for one in wanted.values() if not cache.done(one)]
    if wanted:
        narrator.say(f"{len(wanted)} trainings, {len(wanted) - len(left)} of them done before; in {cache.root}")
    workers = min(jobs or default_jobs(), len(left))
    with narrator.bar("trainings", len(left)) as bar:
        if workers <= 1:
            with one_thread():  # as in processes: how sums are rounded depends on the threads
                for number, one in enumerate(left, 1):
                    _tell(narrator, number, len(left), one, run_training(one, cache))
                    bar.to(number)
        else:
            _in_processes(left, cache, workers, narrator, bar)
    return time.perf_counter() - begin


def _in_processes(left: Sequence[AnyTraining], cache: Cache, workers: int, narrator: Narrator, bar: Any) -> None:
    # New processes, not copies of this one: threads that torch has started here would be missing in a copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as executor:
        futures: dict[Future[str], AnyTraining] = {executor.submit(run_training, one, cache): one for one in left}
        done = 0
        try:
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    done += 1
                    _tell(narrator, done, len(left), futures[future], future.result())
                    bar.to(done)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _one_thread() -> None:
    torch.set_num_threads(1)


def _tell(narrator: Narrator, number: int, total: int, training: AnyTraining, text: str) -> None:
    narrator.say(f"[{number}/{total}] {training.title}: {text}")


def run_training(training: AnyTraining, cache: Cache) -> str:
    """One training, unless another process has done it meanwhile.

    Returns:
        What to tell of it.
    """
    place = cache.place(training)
    with cache.turn(training):
        if not cache.done(training):
            try:
                _train(training, place)
            except FloatingPointError as error:
                write_json(place / DIVERGED, {"message": str(error)})
        # The weights are in model.safetensors; hundreds of optimisers' states would fill a disk.
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    result = cache.result(training)
    if result is None:
        return "the loss did not stay finite"
    if isinstance(training, PairTraining):
        return f"{summary_line(result)}, {duration(result['train_seconds'])}"
    name = "test" if "test" in result["metrics"] else "validation"
    return f"{name} NLL {result['metrics'][name]['nll']:.3f}, {duration(result['train_seconds'])}"


def _train(training: AnyTraining, place: Path) -> None:
    quiet = Narrator(quiet=True)
    if isinstance(training, PairTraining):
        train_pairs(dataclasses.replace(training.config, out=str(place), keep=1), narrator=quiet)
        return
    dataset, description = _data_of(training)
    config = dataclasses.replace(training.config, out=str(place), keep=1)
    train(config, dataset=dataset, narrator=quiet, description=description)


def _data_of(training: Training) -> tuple[Any, Any]:
    """Its dataset and the description of that, kept for the next training of the same data."""
    if training.source not in _open:
        while len(_open) >= _KEPT:
            _open.pop(next(iter(_open)))
        dataset = training.open()
        _open[training.source] = (dataset, describe(dataset))
    return _open[training.source]
