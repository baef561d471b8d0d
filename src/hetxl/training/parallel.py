"""Work for several processes, one thread each: on a few cores that is faster than one thing after the other on all."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch

from hetxl.training.worker import Worker

Item = TypeVar("Item")
Found = TypeVar("Found")


def default_jobs() -> int:
    """How many at a time: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_jobs(jobs: int | None) -> None:
    """Raise unless it is a number of processes, or None."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, found {jobs}")


@contextmanager
def one_thread() -> Iterator[None]:
    """While it lasts torch has one thread: two cores are often shared with something else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def each(
    work: Callable[[Item], Found], items: Sequence[Item], *, jobs: int | None = None
) -> Iterator[tuple[Item, Found]]:
    """Every item with what the work found for it, as they are done; what fails is raised, and ends the rest.

    `((item, work(item)) for item in items)`, with several at a time.

    Args:
        work: a function of a module, so that another process finds it.
        items: of any kind that can be sent to one.
        jobs: how many at a time; None for one a core, 1 for this process alone.
    """
    check_jobs(jobs)
    count = min(jobs or default_jobs(), len(items))
    if count <= 1:
        with one_thread():  # as in processes: how sums are rounded depends on the threads
            for item in items:
                yield item, work(item)
        return
    left = iter(items)
    with ExitStack() as stack:
        busy = dict[Connection, tuple[Worker, Item]]()
        for item in itertools.islice(left, count):
            worker = stack.enter_context(Worker(work))
            busy[worker.give(item)] = worker, item
        while busy:
            for ready in wait(list(busy)):
                worker, item = busy.pop(ready)  # pyright: ignore[reportArgumentType]
                found = worker.take()
                for following in itertools.islice(left, 1):
                    busy[worker.give(following)] = worker, following
                yield item, found
