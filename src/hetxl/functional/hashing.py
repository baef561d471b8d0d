"""The fixed hash h: {0 … K − 1} → {0 … H − 1} of HET-H."""

import numpy as np
import torch
from torch import Tensor


def hash_classes(num_classes: int, buckets: int, seed: int = 0) -> Tensor:
    """Map every class to a bucket, the same on every platform and for every number of classes.

    The mixing is splitmix64's, on exact 64-bit integers, so neither torch's generators nor the machine have a say,
    and class k keeps its bucket when classes are added.

    Args:
        num_classes: K
        buckets: H
        seed: another seed gives an independent hash.

    Returns:
        [K] int64, each in 0 … H − 1.
    """
    golden = 0x9E3779B97F4A7C15
    start = np.uint64((seed * 0xD1B54A32D192ED03 + golden) % 2**64)
    mixed = np.arange(num_classes, dtype=np.uint64) * np.uint64(golden) + start
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed % np.uint64(buckets)).astype(np.int64))
