"""Several trainings, each with a directory of its own: one after the other here, or some at a time in processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl.data import Description
from hetxl.data.dataset import Dataset
from hetxl.training.config import TrainConfig
from hetxl.training.estimate import LARGE
from hetxl.training.files import read_json, write_json
from hetxl.training.memory import jobs_for, needed_memory
from hetxl.training.opened import opened, source_of
from hetxl.training.parallel import check_jobs, each
from hetxl.training.progress import Narrator, amount, duration
from hetxl.training.rescale import rescale
from hetxl.training.run import check_same
from hetxl.training.train import open_data, train

DIVERGED = "diverged.json"
"""What a training leaves whose loss did not stay finite: that is a finding, too."""
NOT_FINITE = "the loss did not stay finite"
"""What to tell of it."""


@dataclass(frozen=True)
class Task:
    """One training.

    Attributes:
        config: its options, with a directory that no other has.
        label: how tables call it.
        scaled: directory of the same head rescaled to the validation split afterwards; None for none.
        blind: whether the test split is taken away first.
        may_diverge: whether a loss that does not stay finite is a finding; an error otherwise.
    """

    config: TrainConfig
    label: str
    scaled: Path | None = None
    blind: bool = False
    may_diverge: bool = False

    @property
    def place(self) -> Path:
        """Its directory."""
        return Path(str(self.config.out))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do; a run of other options in its place is an error."""
        if (self.place / "config.json").exists():
            check_same(self.config, self.place)
        if self.diverged:
            return True
        return all((place / "result.json").exists() for place in (self.place, self.scaled) if place is not None)

    @property
    def diverged(self) -> bool:
        """Whether its loss did not stay finite, and may do so."""
        return self.may_diverge and (self.place / DIVERGED).exists()


def run_tasks(
    tasks: Sequence[Task],
    dataset: Dataset,
    description: Description,
    *,
    jobs: int | None = None,
    narrator: Narrator,
) -> None:
    """Train what is not finished.

    Args:
        tasks: all on the same data.
        dataset: that data, opened already; other processes open it themselves.
        description: of it, shown already.
        jobs: how many at a time, one thread each, or fewer where memory has no room for so many; None for one after
            the other here, on all threads.
        narrator: tells how far it is.
    """
    check_jobs(jobs)
    if jobs is None:
        for task in tasks:
            _do(task, dataset, description, narrator)
        return
    left = [task for task in tasks if not task.finished]
    jobs = _with_room(left, dataset, jobs, narrator)
    with narrator.bar("trainings", len(left)) as bar:
        for number, (task, told) in enumerate(each(_do_elsewhere, left, jobs=jobs), 1):
            narrator.say(f"[{number}/{len(left)}] {task.label}, seed {task.config.seed}: {told}")
            bar.to(number)


def _with_room(tasks: Sequence[Task], dataset: Dataset, wanted: int, narrator: Narrator) -> int:
    """How many at a time, so that memory has room for as many of the largest."""
    wanted = min(wanted, len(tasks))
    if wanted <= 1:
        return 1
    # Of each head the one with the largest blocks, which are kept last: a step of every option would take its time.
    by_size = sorted(tasks, key=lambda task: task.config.batch_size * task.config.train_samples * task.config.rank)
    largest = {task.config.head: task for task in by_size}
    needed, label = max((needed_memory(task.config, dataset), task.label) for task in largest.values())
    found = jobs_for(len(tasks), needed, wanted, tasks[0].config.device)
    if found < wanted or found * needed >= LARGE:
        instead = f" (memory has no room for {wanted})" if found < wanted else ""
        narrator.say(f"Trainings at a time: {found}{instead}, up to {amount(needed)} each, the largest {label}")
    return found


def _do(task: Task, dataset: Dataset, description: Description, narrator: Narrator) -> None:
    seen = dataset.without("test") if task.blind else dataset
    if task.diverged:
        return
    try:
        run = train(task.config, dataset=seen, narrator=narrator, label=task.label, description=description)
    except FloatingPointError as error:
        if not task.may_diverge:
            raise
        write_json(task.place / DIVERGED, {"message": str(error)})
        narrator.say(f"{task.label}: {error}")
        return
    if task.scaled is not None:
        rescale(run, task.scaled, seen, narrator)


def _do_elsewhere(task: Task) -> str:
    """A task in a process that has not opened its data; gives what to tell of it."""
    dataset, description = opened(source_of(task.config), lambda: open_data(task.config))
    _do(task, dataset, description, Narrator(quiet=True))
    if task.diverged:
        return NOT_FINITE
    return result_line(
        read_json(task.place / "result.json"), None if task.scaled is None else read_json(task.scaled / "result.json")
    )


def result_line(result: Mapping[str, Any], scaled: Mapping[str, Any] | None = None) -> str:
    """What to tell of a training that has ended.

    Args:
        result: what result.json of it holds.
        scaled: that of the same head rescaled.
    """
    name = "test" if "test" in result["metrics"] else "validation"
    told = f"{name} NLL {result['metrics'][name]['nll']:.3f}"
    if scaled is not None:
        told += f", rescaled {scaled['metrics'][name]['nll']:.3f}"
    return f"{told}, {duration(result['train_seconds'])}"
