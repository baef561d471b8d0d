"""How many trainings fit into the machine at a time."""

import os
import sys
from pathlib import Path

from hetxl.training.distributed import find_device
from hetxl.training.estimate import estimate
from hetxl.training.loader import Parts, to_device
from hetxl.training.model import build_model, link_of
from hetxl.training.order import Order, derive
from hetxl.training.train import open_data
from hetxl.tuning.trial import Trial

SPARE = 0.8
"""Share of the free memory that trials may take together."""


def available_memory(system: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be taken without swapping; None where the system does not tell.

    Args:
        system: where Linux tells about memory.
        group: where it tells about that of a container.
    """
    try:
        lines = system.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    found = int(sizes["MemAvailable"]) * 1024 if "MemAvailable" in sizes else None
    limit = _left_of_limit(group)
    return limit if found is None else found if limit is None else min(found, limit)


def _left_of_limit(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdecimal() else None


def needed_memory(trial: Trial) -> int:
    """Bytes that a process needs for a trial: what it has had after trying a step, and what it will add to that.

    Args:
        trial: of which a step is tried in this process.
    """
    config = trial.config
    dataset = open_data(config)
    split, device = dataset.splits["train"], find_device(config.device)
    model = build_model(config, dataset.input, dataset.num_classes, link_of(config, dataset)).to(device)
    rows, seeds = Order(len(split), derive(config.seed, 12)).of(
        *Parts(config.batch_size, config.accumulate).places(0, 0)
    )
    fetched = split.fetch(rows, seeds)
    targets = to_device(split.labels.take(fetched.rows), device)
    memory = estimate(config, model, fetched.inputs.to(device), targets, 1, config.accumulate).memory
    added = memory["the optimiser's moments"] + memory["the moving average"]
    if config.temperature_method == "bilevel":  # two more tensors like each parameter
        added += 2 * memory["their gradients"]
    return max(peak_memory(), sum(memory.values())) + added


def peak_memory() -> int:
    """Bytes that this process has had at most; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    # In kilobytes, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def jobs_for(trials: int, needed: int | None, wanted: int | None, device: str = "auto") -> int:
    """How many trials to run at a time.

    Args:
        trials: how many there are.
        needed: bytes of one; None if unknown.
        wanted: at most so many; None for as many as there are cores, and one where there is an accelerator.
        device: of the trainings.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = (cores if find_device(device).type == "cpu" else 1) if wanted is None else wanted
    free = available_memory()
    if needed and free is not None:
        limit = min(limit, int(SPARE * free) // needed)
    return max(1, min(limit, trials))
