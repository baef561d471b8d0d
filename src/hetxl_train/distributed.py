"""Several processes, as started by torchrun, or one.

Fast operations use collectives, which have a time-out. For operations that may take long (evaluation, features,
checkpoints, indices), processes wait in their key-value store as long as the others are alive.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from hetxl.classifiers.collectives import LostRankError
from hetxl_train.process_pool import picklable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")
TIMEOUT = 600.0
"""Seconds without a response after which a process counts as lost."""
START = timedelta(days=1)
"""Maximum time to start all processes; torchrun ends processes that fail."""
POLL = (0.001, 0.2)
"""Initial and maximum seconds between two reads of the store."""
_runs = itertools.count()  # numbers the worlds of a process group, equally in all processes


class Meeting:
    """A barrier without a time limit, in a key-value store instead of a collective.

    A thread of each living process increments a number in the store. A waiting process reads the numbers of the others;
    a process whose number does not change for `timeout` seconds is lost.
    """

    def __init__(self, store: dist.Store, rank: int, processes: int, timeout: float = TIMEOUT):
        self.store, self.rank, self.processes, self.timeout = store, rank, processes, timeout
        self.count = 0  # number of meetings so far
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show_life, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until every process arrives; raise a LostRankError if one of them is lost."""
        self.count += 1
        self.store.set(self._key(self.rank), "")
        missing = [rank for rank in range(self.processes) if rank != self.rank]
        pause, looked, signs = POLL[0], time.monotonic(), {}
        while missing := [rank for rank in missing if not self.store.check([self._key(rank)])]:
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])
            if time.monotonic() - looked > self.timeout:
                looked, before = time.monotonic(), signs
                signs = {rank: self._sign(rank) for rank in missing}
                if lost := [rank for rank in missing if before.get(rank) == signs[rank]]:
                    raise LostRankError(
                        f"rank {self.rank}: no response from rank {', '.join(map(str, lost))} for "
                        f"{self.timeout:g} s (--timeout). Its own output says why; rerun the same command to resume"
                    )

    def end(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _key(self, rank: int) -> str:
        return f"hetxl/meeting/{self.count}/{rank}"

    def _sign(self, rank: int) -> int:
        return self.store.add(f"hetxl/life/{rank}", 0)

    def _show_life(self) -> None:
        while not self._ended.wait(min(self.timeout / 8, 10)):
            try:
                self.store.add(f"hetxl/life/{self.rank}", 1)
            except RuntimeError:  # the store and the other processes have ended
                return


@dataclass(frozen=True)
class World:
    """The rank, the processes and the device of this process."""

    device: torch.device
    rank: int = 0
    processes: int = 1
    meeting: Meeting | None = field(default=None, compare=False)
    mesh: "DeviceMesh | None" = field(default=None, compare=False)  # (data, classes) if processes share the classes
    group: Any = field(default=None, compare=False)  # group for `sum` and `values`; None for all processes

    @property
    def class_shards(self) -> int:
        """Return the number of processes that share the classes and see the same rows."""
        return 1 if self.mesh is None else self.mesh["classes"].size()

    @property
    def replicas(self) -> "World":
        """Return the processes that see different rows: all of them, or those with the same classes.

        Use it for the rank, `sum`, `values` and `share`; `wait` needs the whole world.
        """
        if self.mesh is None:
            return self
        data = self.mesh["data"]
        rank, group = data.get_local_rank(), data.get_group()
        return replace(self, rank=rank, processes=data.size(), meeting=None, mesh=None, group=group)

    @property
    def is_main(self) -> bool:
        """Return whether this process writes files and prints (rank 0)."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor on `device` over the processes, in place."""
        if self.processes > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def values(self, value: Tensor) -> list[float]:
        """Return the values of a number on `device` in all processes."""
        slots = value.new_zeros(self.processes)
        slots[self.rank] = value
        return self.sum(slots).cpu().tolist()

    def wait(self) -> None:
        """Wait until every process arrives, as long as they are alive."""
        if self.meeting is not None:
            self.meeting.wait()
        elif self.processes > 1:
            dist.barrier()

    def main_first(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the main process, then in the others, which can use the files that it wrote.

        `work` may take long.
        """
        if not self.is_main:
            self.wait()
        result = work()
        if self.is_main:
            self.wait()
        return result

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return this process's consecutive share of items; the shares in order of rank are all items."""
        start, stop = (len(items) * rank // self.processes for rank in (self.rank, self.rank + 1))
        return items[start:stop]

    def gather(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` in every process; return the results by rank in the main process, and nothing in the others.

        `work` may take long. An error in one process is raised in all of them.
        """
        if self.processes == 1:
            return [work()]
        result, error = _outcome(work)
        self.wait()
        errors: list[Any] = [None] * self.processes
        dist.all_gather_object(errors, error)
        for error in errors:
            if error is not None:
                raise error
        results: list[Any] = [None] * self.processes
        dist.gather_object(result, results if self.is_main else None)
        return results if self.is_main else []

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the main process; return its result, or raise its error, in all processes.

        `work` may take long.
        """
        if self.processes == 1:
            return work()
        outcome: list[Any] = [_outcome(work) if self.is_main else None]
        self.wait()
        dist.broadcast_object_list(outcome)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of `work`, or its error in a picklable form."""
    try:
        return work(), None
    except Exception as error:
        return None, picklable(error)


def find_device(name: str) -> torch.device:
    """Return a device by name; "auto" is an accelerator if one is available."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ValueError(f"device must be auto, cpu, cuda, mps or another of torch's, found {name!r}") from None
        if device.type == "meta":
            raise ValueError("device 'meta' cannot compute; use auto, cpu, cuda or mps")
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # torch raises different errors
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]  # torch's message is long
            raise ValueError(f"device {name!r} is not available ({reason}); use cpu or auto") from None
        return device
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def accelerators(device: str) -> list[str]:
    """Return the devices to distribute runs over, as in CUDA_VISIBLE_DEVICES.

    Empty if runs compute on the CPU, or name their own device.
    """
    chosen = find_device(device)
    if chosen.type != "cuda" or chosen.index is not None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def world(device: str, timeout: float = TIMEOUT) -> Iterator[World]:
    """Yield the processes that torchrun started, or only this process.

    Collectives fail after `timeout` seconds; an existing process group keeps its own time-out.
    """
    chosen = find_device(device)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        yield World(chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    started = not dist.is_initialized()
    if started:
        store, rank, _ = next(iter(rendezvous("env://", timeout=START)))
        meeting = Meeting(dist.PrefixStore("meetings", store), rank, processes, timeout)
        meeting.wait()  # processes start at different times, and the group's time-out starts at once
        backend, limit = "nccl" if chosen.type == "cuda" else "gloo", timedelta(seconds=timeout)
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=processes)
    else:
        # The meetings of earlier runs of this group are over.
        store = dist.PrefixStore(f"meetings-{next(_runs)}", distributed_c10d._get_default_store())
        meeting = Meeting(store, dist.get_rank(), dist.get_world_size(), timeout)
    try:
        yield World(chosen, dist.get_rank(), dist.get_world_size(), meeting)
    finally:
        meeting.end()
        if started:
            destroy_process_group()


def destroy_process_group() -> None:
    """Destroy the process group at the end of a program.

    Calls dist.destroy_process_group() and waits briefly for the threads of gloo. They release the last tensors after
    the collective has returned, and need the interpreter for that. If it has ended, a thread aborts the process with
    SIGABRT, and torchrun restarts everything. Threads are joined with the last reference to their group, which the
    caches of DTensor, and so FSDP2, never release.
    """
    dist.destroy_process_group()
    time.sleep(0.1)
