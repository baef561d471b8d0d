"""Frequent and rare classes: accuracy in three bands that each hold a third of the training examples.

Classes are put in order of their training examples, most first (of equals, the lower id). The **head** is the fewest
classes from the front that together have at least a third of all training examples, the **middle** goes on to at least
two thirds, and the **tail** is all the rest, classes without training examples included. A class that crosses a border
belongs to the band it starts in.
"""

import numpy as np

from hetxl.evaluation.records import Records

BANDS = ("head", "middle", "tail")


def class_bands(class_counts: np.ndarray) -> np.ndarray:
    """The band of each class: 0 head, 1 middle, 2 tail.

    Args:
        class_counts: [K], training examples of each class.

    Returns:
        [K] int8
    """
    counts = np.asarray(class_counts)
    if counts.ndim != 1 or not len(counts) or (counts < 0).any():
        raise ValueError(f"class_counts must be K counts of at least 0, found shape {list(counts.shape)}")
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    sorted_counts = counts[order].astype(np.int64)
    before = np.cumsum(sorted_counts) - sorted_counts
    bands = np.empty(len(counts), dtype=np.int8)
    # Three times what came before against the total: whole numbers, so that borders are exact.
    bands[order] = np.minimum(3 * before // max(1, int(sorted_counts.sum())), 2)
    bands[counts == 0] = 2
    return bands


def band_accuracy(records: Records, class_counts: np.ndarray) -> dict[str, float | None]:
    """Precision@1 of the examples whose class is in each band; None for a band without examples.

    Args:
        records: those with any number of labels are in no band.
        class_counts: [K], training examples of each class.

    Returns:
        By the names in `BANDS`.
    """
    bands = class_bands(class_counts)
    single = records.label >= 0
    labels = records.label[single]
    if len(labels) and labels.max() >= len(bands):
        raise ValueError(f"class_counts has {len(bands)} classes, and a record the class id {labels.max()}")
    of, hit = bands[labels], records.hit[single]
    return {name: float(hit[of == place].mean()) if (of == place).any() else None for place, name in enumerate(BANDS)}
