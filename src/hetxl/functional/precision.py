"""In which precision sums are formed."""

import torch
from torch import Tensor


def accumulate(values: Tensor) -> Tensor:
    """Half precision is widened to float32 before anything is summed; float32 and float64 stay as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def without_autocast(device: torch.device) -> torch.autocast:
    """While it lasts products have the precision of what is multiplied."""
    return torch.autocast(device.type, enabled=False)
