"""In which precision sums are formed."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def accumulate(values: Tensor) -> Tensor:
    """Half precision is widened to float32 before anything is summed; float32 and float64 stay as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """While it lasts products have the precision of what is multiplied."""
    # The meta device, for one, has no autocast.
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
