"""Standardise features to mean 0 and variance 1, so that training does not depend on their scale."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hetxl._checks import integer_at_least


class Standardize(nn.Module):
    """Compute (features − mean) / deviation with buffers [D], both measured on training rows.

    The buffers are saved and exported with the model. Before `measure`, features are returned unchanged.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.features = integer_at_least("features", features, 1)
        self.register_buffer("mean", torch.zeros(features, device=device, dtype=dtype))
        self.register_buffer("deviation", torch.ones(features, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Reset to mean 0 and deviation 1, which leave features unchanged."""
        self.mean.zero_()
        self.deviation.fill_(1.0)

    def forward(self, features: Tensor) -> Tensor:
        """Standardise features: [..., D] → [..., D]."""
        return (features - self.mean.to(features.dtype)) / self.deviation.to(features.dtype)

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor]) -> None:
        """Measure mean and deviation over batches of features [n, D]; the deviation of a constant feature is 1."""
        count, mean = 0, torch.zeros(self.features, dtype=torch.float64)
        squares = torch.zeros_like(mean)
        for batch in batches:
            values = batch.detach().double().cpu()
            # Chan's update of the moments: plain sums of squares would cancel if a mean is large.
            own, total = values.mean(0), count + len(values)
            squares += (values - own).square().sum(0) + (own - mean).square() * (count * len(values) / total)
            mean += (own - mean) * (len(values) / total)
            count = total
        if not count:
            raise ValueError("no features to measure: batches is empty")
        deviation = (squares / count).sqrt()
        # A deviation below the rounding error of the mean means that the feature is constant.
        constant = deviation <= 1e-7 * mean.abs()
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.masked_fill(constant, 1.0))

    @torch.no_grad()
    def share(self, deviation: float) -> None:
        """Use one deviation for all features, so that their variances keep their ratios."""
        self.deviation.fill_(deviation)

    def extra_repr(self) -> str:
        """Return D, shown when the module is printed."""
        return f"{self.features}"
