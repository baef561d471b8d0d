"""Features of mean 0 and variance 1, measured once: what is trained does not depend on the scale of its inputs."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hetxl._checks import integer_at_least


class Standardize(nn.Module):
    """(features − mean) / deviation, with both measured on training rows and kept as buffers [D].

    They are saved and exported with the model. Before `measure` features pass as they are.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, features: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.features = integer_at_least("features", features, 1)
        self.register_buffer("mean", torch.zeros(features, device=device, dtype=dtype))
        self.register_buffer("deviation", torch.ones(features, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Let features pass as they are until `measure`, also after `to_empty`."""
        self.mean.zero_()
        self.deviation.fill_(1.0)

    def forward(self, features: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return (features - self.mean.to(features.dtype)) / self.deviation.to(features.dtype)

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor]) -> None:
        """Measure mean and deviation over batches of features [n, D]; a feature that never varies keeps its scale."""
        count, mean = 0, torch.zeros(self.features, dtype=torch.float64)
        squares = torch.zeros_like(mean)
        for batch in batches:
            values = batch.detach().double().cpu()
            # Chan's update of the moments: sums of squares would cancel where a mean is large.
            own, total = values.mean(0), count + len(values)
            squares += (values - own).square().sum(0) + (own - mean).square() * (count * len(values) / total)
            mean += (own - mean) * (len(values) / total)
            count = total
        if not count:
            raise ValueError("no features to measure: batches is empty")
        deviation = (squares / count).sqrt()
        # Below rounding errors of the mean, a feature is constant.
        constant = deviation <= 1e-7 * mean.abs()
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.masked_fill(constant, 1.0))

    @torch.no_grad()
    def share(self, deviation: float) -> None:
        """Divide all features by one deviation, so that their variances keep their proportions."""
        self.deviation.fill_(deviation)

    def extra_repr(self) -> str:
        """D, as shown when the module is printed."""
        return f"{self.features}"
