"""The trainings of the studies, several at a time."""

import dataclasses
import functools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from hetxl.contrastive.results import summary_line
from hetxl.contrastive.train import train as train_pairs
from hetxl.studies.cache import AnyTraining, Cache
from hetxl.studies.pair_trainings import PairTraining
from hetxl.training.files import write_json
from hetxl.training.opened import opened
from hetxl.training.parallel import check_jobs, each
from hetxl.training.progress import Narrator, duration
from hetxl.training.tasks import DIVERGED, NOT_FINITE, result_line
from hetxl.training.train import train


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
    check_jobs(jobs)
    narrator = narrator or Narrator()
    begin = time.perf_counter()
    wanted = {one.key: one for one in trainings}
    left = [one for one in wanted.values() if not cache.done(one)]
    if wanted:
        narrator.say(f"{len(wanted)} trainings, {len(wanted) - len(left)} of them done before; in {cache.root}")
    with narrator.bar("trainings", len(left)) as bar:
        found = each(functools.partial(run_training, cache=cache), left, jobs=jobs)
        for number, (one, told) in enumerate(found, 1):
            narrator.say(f"[{number}/{len(left)}] {one.title}: {told}")
            bar.to(number)
    return time.perf_counter() - begin


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
        return NOT_FINITE
    if isinstance(training, PairTraining):
        return f"{summary_line(result)}, {duration(result['train_seconds'])}"
    return result_line(result)


def _train(training: AnyTraining, place: Path) -> None:
    quiet = Narrator(quiet=True)
    if isinstance(training, PairTraining):
        train_pairs(dataclasses.replace(training.config, out=str(place), keep=1), narrator=quiet)
        return
    dataset, description = opened(training.source, training.open)
    config = dataclasses.replace(training.config, out=str(place), keep=1)
    train(config, dataset=dataset, narrator=quiet, description=description)
