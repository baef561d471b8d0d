"""What is measured in PyTorch Lightning, and Lightning itself: the package that the program uses, `lightning` or
`pytorch_lightning`."""

import importlib
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hetxl.evaluation import Records, calibration_error
from hetxl.nn import Head


def import_lightning() -> Any:
    """`lightning.pytorch`, or `pytorch_lightning` where only that is installed or it alone is in use."""
    # A Trainer takes modules of its own package only: the one that is in use already goes first.
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != name.partition(".")[0]:
                raise
    raise ImportError("hetxl.integrations.lightning needs lightning: pip install lightning")


if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torchmetrics
else:
    pl = import_lightning()
    # After Lightning, which brings it: where both are missing, the error is that above.
    torchmetrics = importlib.import_module("torchmetrics")

NOISE_CLASSES = 256
"""Logits of each example that `noise_scale` looks at, evenly spaced over the classes."""


class CalibrationError(torchmetrics.Metric):
    """The expected calibration error with 15 bins of equally many examples, as `hetxl.evaluation.calibration_error`
    gives it. It keeps two numbers of each example, and joins those of all processes."""

    full_state_update = False
    confidence: list[Tensor]
    hit: list[Tensor]

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("hit", [], dist_reduce_fx="cat")

    def update(self, confidence: Tensor, hit: Tensor) -> None:
        """Add examples.

        Args:
            confidence: [b], probability of the most probable class.
            hit: [b], whether that class is a label.
        """
        self.confidence.append(confidence.to(self.device, torch.float32))
        self.hit.append(hit.to(self.device, torch.bool))

    def compute(self) -> Tensor:
        """The error over all examples; NaN without any."""
        confidence, hit = _joined(self.confidence), _joined(self.hit)
        if not len(hit):
            return torch.tensor(math.nan, device=self.device)
        columns = {name: np.zeros((len(hit), 1) if name.startswith("top_") else len(hit)) for name in Records.TYPES}
        columns |= {"hit": hit, "top_probs": confidence[:, None]}
        return torch.tensor(calibration_error(Records(**columns)), dtype=torch.float32, device=self.device)


def _joined(parts: list[Tensor] | Tensor) -> np.ndarray:
    # One tensor already where processes were joined.
    if isinstance(parts, list):
        parts = torch.cat(parts) if parts else torch.empty(0)
    return parts.cpu().numpy()


@torch.no_grad()
def noise_scale(head: Head, features: Tensor) -> float:
    """How far the noise moves logits, in the units of what the softmax sees.

    For each example the standard deviation of a logit, as root mean square over the classes and divided by τ; of those
    the median. With more than 256 classes it looks at 256 of them. 0 for a head without noise.

    Args:
        head: of any kind.
        features: [b, D]
    """
    count = min(head.num_classes, NOISE_CLASSES)
    classes = torch.linspace(0, head.num_classes - 1, count, device=features.device).round().long()
    covariance = head.logit_distribution(features).covariance(classes.expand(len(features), -1))
    variance = covariance.diagonal(dim1=-2, dim2=-1).float().mean(-1)
    return float(variance.sqrt().median() / head.temperature())


def draws(device: torch.device, number: int) -> torch.Generator:
    """For one batch of an evaluation: the same each time, and without a trace in torch's own generators."""
    return torch.Generator(device).manual_seed(number)
