"""Several processes, as started by torchrun, or one."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """Which process this is, and where it computes."""

    device: torch.device
    rank: int = 0
    processes: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints (rank 0)."""
        return self.rank == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over the processes."""
        if self.processes > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Wait until every process gets here."""
        if self.processes > 1:
            dist.barrier()

    def broadcast_flag(self, flag: bool) -> bool:
        """Return the flag of the main process in every process."""
        if self.processes == 1:
            return flag
        answer = torch.tensor([float(flag)], device=self.device)
        dist.broadcast(answer, 0)
        return bool(answer.item())


def find_device(name: str) -> torch.device:
    """Return the device of a name; "auto" takes an accelerator if available."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ValueError(f"device must be auto, cpu, cuda, mps or another of torch's, found {name!r}") from None
        if device.type == "meta":
            raise ValueError("device 'meta' computes nothing; use auto, cpu, cuda or mps")
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # torch has no error of its own for it
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]  # torch goes on with all it has
            raise ValueError(f"device {name!r} is not available ({reason}); use cpu or auto") from None
        return device
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


@contextmanager
def world(device: str) -> Iterator[World]:
    """Yield the processes that torchrun started, or this one alone."""
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
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(chosen, dist.get_rank(), dist.get_world_size())
    finally:
        if started:
            destroy_process_group()


def destroy_process_group() -> None:
    """End the process group, as the last thing that a program does with it.

    This is dist.destroy_process_group(), and a moment for the threads of gloo. They let go of the last tensors only
    after the collective has returned, and need the interpreter for it: a thread that finds it gone ends the process by
    SIGABRT, with all work done, and torchrun starts everything again. Threads are joined with the last reference to
    their group, and the caches of DTensor, so of FSDP2 too, never release theirs.
    """
    dist.destroy_process_group()
    time.sleep(0.1)
