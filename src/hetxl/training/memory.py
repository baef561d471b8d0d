"""How many trainings fit into the machine at a time."""

import sys
from pathlib import Path

from hetxl.data.dataset import Dataset
from hetxl.training.config import TrainConfig
from hetxl.training.distributed import find_device
from hetxl.training.estimate import estimate_on
from hetxl.training.loader import Parts
from hetxl.training.model import build_model, link_of
from hetxl.training.parallel import default_jobs

SPARE = 0.8
"""Share of the free memory that trainings may take together."""


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


def needed_memory(config: TrainConfig, dataset: Dataset) -> int:
    """Bytes that a process needs for a training: what it has had after trying a step, and what it will add to that.

    Args:
        config: of the training, a step of which is tried in this process.
        dataset: its data.
    """
    device = find_device(config.device)
    model = build_model(config, dataset.input, dataset.num_classes, link_of(config, dataset)).to(device)
    parts = Parts(config.batch_size, config.accumulate)
    found = estimate_on(config, model, dataset.splits["train"], parts, 1, device)
    if found is None:
        return peak_memory()
    added = found.memory["the optimiser's moments"] + found.memory["the moving average"]
    if config.temperature_method == "bilevel":  # two more tensors like each parameter
        added += 2 * found.memory["their gradients"]
    return max(peak_memory(), found.total) + added


def peak_memory() -> int:
    """Bytes that this process has had at most; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    # In kilobytes, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def jobs_for(trainings: int, needed: int | None, wanted: int | None, device: str = "auto") -> int:
    """How many trainings to run at a time.

    Args:
        trainings: how many there are.
        needed: bytes of one; None if unknown.
        wanted: at most so many; None for as many as there are cores, and one where there is an accelerator.
        device: of the trainings.
    """
    limit = (default_jobs() if find_device(device).type == "cpu" else 1) if wanted is None else wanted
    free = available_memory()
    if needed and free is not None:
        limit = min(limit, int(SPARE * free) // needed)
    return max(1, min(limit, trainings))
