"""The losses of single examples, for a test between two runs where there is but one seed."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from hetxl.report.read import Run
from hetxl.report.statistics import PairedTest, two_sided_p


def read_losses(run: Run, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The losses of a run's examples, from `records/`; None when there are none that can be read.

    Args:
        run: whose.
        split: of the data.

    Returns:
        Row numbers [n] in order, and losses [n] in nats.
    """
    path = Path(run.path) / "records" / f"{split}.safetensors"
    try:
        with safe_open(path, framework="numpy") as file:
            rows, losses = file.get_tensor("rows"), -file.get_tensor("log_prob")
    except (OSError, SafetensorError, TypeError):
        return None
    if rows.ndim != 1 or rows.shape != losses.shape or not np.isfinite(losses).all():
        return None
    order = np.argsort(rows, kind="stable")
    return rows[order], losses[order].astype(np.float64)


def example_test(run: Run, other: Run, split: str) -> PairedTest | None:
    """The paired t test of two runs over the examples that both were evaluated on.

    It tells whether these two trained models differ on such data, not whether another seed would say the same.

    Args:
        run: the one.
        other: the one it is compared with.
        split: of the data.

    Returns:
        Of run − other; None unless both have the losses of the same examples, at least two.
    """
    ours, theirs = read_losses(run, split), read_losses(other, split)
    if ours is None or theirs is None or len(ours[0]) < 2 or not np.array_equal(ours[0], theirs[0]):
        return None
    differences = ours[1] - theirs[1]
    number, average = len(differences), float(differences.mean())
    error = float(differences.std(ddof=1)) / number**0.5
    p = two_sided_p(average / error, number - 1) if error > 0 else float(average == 0)
    return PairedTest(average, error, p, number)
