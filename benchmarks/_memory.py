"""The peak memory of one step, measured in a process of its own; Linux only.

A process that has freed memory may keep it and use it again unseen, so every measurement starts a new one. The peak is
the kernel's own high-water mark, set back just before the step: nothing is sampled, so nothing is missed.
"""

import ctypes
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from _cases import THREADS, Case, prepare

MEGABYTE = 1e6


def peak_bytes(case: Case) -> int:
    """The peak resident memory of a case in a new process, beyond what is there before it.

    For a loss or a prediction "before" is with all parameters and inputs in place. A training step is weighed as a
    whole: parameters, gradients and the optimiser's state count as well.
    """
    # The processes come from a server that has imported the package and computed nothing: they start at once, and
    # know nothing of what this process allocated.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetxl.profiling"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(_measure, case).result()


def _measure(case: Case) -> int:
    torch.set_num_threads(THREADS)
    prepare(case.tiny())()
    whole = case.task == "train"
    if whole:
        before = reset_peak()
        step = prepare(case)
        step()  # the optimiser has its state only after the first step
    else:
        step = prepare(case)
        before = reset_peak()
    step()
    return status("VmHWM") - before


def reset_peak() -> int:
    """Give freed memory back, set the high-water mark to what is left, and return it in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """A field of /proc/self/status in bytes. Not ru_maxrss, which a new process has from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")
