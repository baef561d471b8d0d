"""Work for several processes, one thread each: on a few cores that is faster than one thing after the other on all."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

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
    workers = min(jobs or default_jobs(), len(items))
    if workers <= 1:
        with one_thread():  # as in processes: how sums are rounded depends on the threads
            for item in items:
                yield item, work(item)
        return
    # New processes, not copies of this one: threads that torch has started here would be missing in a copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as executor:
        futures = {executor.submit(work, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _one_thread() -> None:
    torch.set_num_threads(1)
