"""Work in several processes with one thread each, which is faster on a few cores than several threads per item."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_jobs(jobs: int | None) -> None:
    """Raise unless it is a number of processes, or None."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, found {jobs}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to one thread: two cores are often shared with something else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parallel_map(
    work: Callable[[Item], Result], items: Sequence[Item], *, jobs: int | None = None, devices: Sequence[str] = ()
) -> Iterator[tuple[Item, Result]]:
    """Yield every item with its result, in order of completion; an error is raised and stops the others.

    Equivalent to `((item, work(item)) for item in items)`, several at the same time.

    Args:
        work: a function at the top level of a module, so that other processes can import it.
        items: picklable items.
        jobs: number of items at the same time; None for one per core, 1 for only this process.
        devices: see `Pool`.
    """
    check_jobs(jobs)
    count = min(jobs or default_jobs(), len(items))
    if count <= 1:
        with one_thread():  # as in processes: how sums are rounded depends on the threads
            for item in items:
                yield item, work(item)
        return
    with Pool(work, count, devices) as pool:
        for item, result in pool.map(items):
            if isinstance(result, Exception):
                raise result
            yield item, result


class Pool(ExitStack, Generic[Item, Result]):
    """Processes that do the same kind of work and are reused by further calls of `map`. A context manager, whose end
    terminates them.

    For the work see `parallel_map`. `jobs`, the number of items at the same time, may be increased between calls. Each
    process sees one of the `devices`, named as in CUDA_VISIBLE_DEVICES, in turn [default: all devices].
    """

    def __init__(self, work: Callable[[Item], Result], jobs: int = 1, devices: Sequence[str] = ()):
        super().__init__()
        self.work, self.jobs, self.devices = work, jobs, devices
        self._idle: list[Worker] = []

    def map(self, items: Sequence[Item]) -> Iterator[tuple[Item, Result | Exception]]:
        """Yield every item with its result, or with the error of its work or its process, in order of completion."""
        waiting = iter(items)
        busy: dict[Any, tuple[Worker, Item]] = {}

        def submit(workers: Sequence["Worker"]) -> None:
            for worker, item in zip(workers, itertools.islice(waiting, len(workers)), strict=False):
                self._idle.remove(worker)
                busy[worker.submit(item)] = worker, item

        while len(self._idle) < min(self.jobs, len(items)):
            device = self.devices[len(self._idle) % len(self.devices)] if self.devices else None
            self._idle.append(self.enter_context(Worker(self.work, device)))
        submit(self._idle[: self.jobs])
        while busy:
            for ready in wait(list(busy)):
                worker, item = busy.pop(ready)
                try:
                    result = worker.result()
                except Exception as error:
                    result = error
                    if isinstance(error, ChildProcessError) and not worker.alive:
                        worker = self.enter_context(Worker(self.work, worker.device))
                self._idle.append(worker)
                submit([worker])
                yield item, result


class Worker:
    """A process that does one piece of work after the other, a context manager.

    It ignores Ctrl-C; its parent terminates it. If the parent dies, the worker exits immediately, so that it does not
    write into a directory that a resumed run uses. (The executors of the standard library wait for running work, and
    hang if Ctrl-C reaches an idle process.)
    """

    def __init__(self, work: Callable[..., Any], device: str | None = None):
        self.device = device  # the only visible device, as in CUDA_VISIBLE_DEVICES; None for all
        # A new process instead of a fork, which would lack the threads that torch has started.
        context = multiprocessing.get_context("spawn")
        self._connection, connection = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(work, connection, lifeline, device))
        with _interrupts_ignored(), _main_hidden(unless=b"__main__" in pickle.dumps(work)):
            self._process.start()
        connection.close()
        lifeline.close()

    @property
    def alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.is_alive()

    def submit(self, item: Any) -> Connection:
        """Send an item to work on; return the connection to wait for."""
        with contextlib.suppress(BrokenPipeError):  # the process died, which `result` reports
            self._connection.send(item)
        return self._connection

    def result(self) -> Any:
        """Return what the work returned, or raise what it raised."""
        try:
            result, error, trace = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            raise ChildProcessError(
                f"a process ended with code {code} before its work was done"
                + ("; it was killed: if memory ran out, use fewer jobs" if code == -signal.SIGKILL else "")
            ) from None
        if error is not None:
            raise error from RemoteError(trace)
        return result

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate the process."""
        self._process.terminate()
        self._process.join()
        self._process.close()
        self._connection.close()
        self._lifeline.close()


class RemoteError(Exception):
    """The traceback of an error in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Start a process that ignores Ctrl-C from the beginning; only a main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _main_hidden(unless: bool) -> Iterator[None]:
    """Start a process that does not run this process's script again, so that scripts need no guard."""
    main = sys.modules["__main__"]
    if not unless:
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(work: Callable[[Any], Any], connection: Connection, lifeline: Connection, device: str | None) -> None:
    torch.set_num_threads(1)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # read when the first run asks for its device
    threading.Thread(target=_exit_with, args=(lifeline,), daemon=True).start()
    while True:
        item = connection.recv()
        try:
            answer = work(item), None, ""
        except Exception as error:
            answer = None, picklable(error), traceback.format_exc()
        connection.send(answer)


def _exit_with(lifeline: Connection) -> None:
    """Exit when the parent exits, which closes its end of the pipe."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


def picklable(error: Exception) -> Exception:
    """Return the error, or one with the same message if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
