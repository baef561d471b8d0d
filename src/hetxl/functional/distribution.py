"""The Gaussian over logits that a head predicts for its features: a mean, and noise that is lifted to the classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional._torch import to_accumulation_dtype, without_autocast
from hetxl.functional.lifts import Lift
from hetxl.functional.noise import GaussianNoise, gather_columns

Order = Literal["samples", "factors"]
ORDERS: tuple[Order, ...] = ("samples", "factors")


@dataclass(frozen=True, eq=False)
class Affine:
    """A linear classifier as plain tensors: features [..., D] → logits [..., K]."""

    weight: Tensor  # [K, D]
    bias: Tensor | None = None  # [K]

    def __call__(self, features: Tensor) -> Tensor:
        """W φ + b."""
        # Features of an autocast region may be asked for their logits after its end.
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)


class LogitDistribution:
    """N(mean(x), Σ(x)) over the logits [..., K], before the temperature. Nothing is computed before it is read,
    from the tensors it was made of as they are then.

    HET, HET-H:  logits = classifier(φ) + lift(ε)
    HET-XL:      logits = classifier(φ + ε), which is classifier(φ) + W ε when the classifier is linear

    Args:
        features: φ(x), [..., D]
        classifier: features → logits, [..., D] → [..., K].
        noise: the Gaussian in noise space; None for a deterministic classifier.
        lift: noise space → logits. None beside noise: the noise goes through the classifier with the features, and the
            classifier is *opaque*, not known to be linear. Then only samples-first applies, and `factors` (hence
            variances and covariances) are the differences classifier(φ + row) − classifier(φ): exact for an affine
            classifier, a secant approximation for any other.
    """

    def __init__(
        self,
        features: Tensor,
        classifier: Callable[[Tensor], Tensor],
        noise: GaussianNoise | None = None,
        lift: Lift | None = None,
    ):
        self.features, self.classifier, self.noise, self.lift = features, classifier, noise, lift
        self._mean: Tensor | None = None
        self._factors: Tensor | None = None

    @property
    def opaque(self) -> bool:
        """Whether the noise goes through a classifier that is not known to be linear."""
        return self.noise is not None and self.lift is None

    @property
    def size(self) -> int:
        """Q, the standard normals that one draw takes; 0 without noise."""
        return 0 if self.noise is None else self.noise.size

    # Kept by hand: functools.cached_property holds a lock in Python 3.10 and 3.11, which torch.compile cannot trace.
    @property
    def mean(self) -> Tensor:
        """The logits without noise, [..., K]."""
        if self._mean is None:
            self._mean = to_accumulation_dtype(self.classifier(self.features))
        return self._mean

    @property
    def factors(self) -> Tensor:
        """The basis in logit space, [..., Q, K]: the covariance of the logits is factorsᵀ factors."""
        if self._factors is None:
            if self.noise is None:
                self._factors = self.mean.new_zeros(*self.mean.shape[:-1], 0, self.mean.shape[-1])
            else:
                self._factors = self._lifted(self.noise.basis())
        return self._factors

    @property
    def variance(self) -> Tensor:
        """The variance of each logit, [..., K]."""
        if self.noise is None or self.lift is None:
            return to_accumulation_dtype(self.factors).square().sum(-2)
        with without_autocast(self.features.device):
            return self.lift.variance(self.noise)

    def covariance(self, classes: Tensor) -> Tensor:
        """The covariance of the logits of some classes of each example, [..., k, k] for class ids [..., k]."""
        with without_autocast(self.features.device):
            if self.noise is not None and self.lift is not None:
                return self.lift.covariance(self.noise, classes)
            factors = to_accumulation_dtype(gather_columns(self.factors, classes))  # [..., Q, k]
            return factors.mT @ factors

    def sample(self, z: Tensor | None, order: Order | None = "samples") -> Tensor:
        """Sampled logits, in either of two orders that give the same numbers.

            samples: mean + lift(z @ basis)      S rows through the lift for each example
            factors: mean + z @ lift(basis)      Q rows, however large S is

        Args:
            z: [..., S, Q] or [S, Q] standard normals; None without noise.
            order: what is lifted, the samples or the factors; None for what is cheaper.

        Returns:
            [..., S, K]; without noise [..., 1, K].
        """
        if self.noise is None or z is None:
            return self.mean.unsqueeze(-2)
        if (order or choose_order(self, z.shape[-2])) == "factors":
            if self.opaque:
                raise ValueError('order="factors" needs a linear classifier; this one is opaque: use order="samples"')
            return self.mean.unsqueeze(-2) + z @ self.factors
        draws = self.noise.draw(z)  # [..., S, N]
        if self.lift is None:
            return to_accumulation_dtype(self.classifier(self.features.unsqueeze(-2) + draws))
        return self.mean.unsqueeze(-2) + self.lift(draws)

    def without_noise(self) -> "LogitDistribution":
        """The deterministic classifier at the centre of this one."""
        return LogitDistribution(self.features, self.classifier)

    def _lifted(self, noise: Tensor) -> Tensor:
        """Noise [..., Q, N] → logits [..., Q, K]."""
        if self.lift is not None:
            return self.lift(noise)
        return to_accumulation_dtype(self.classifier(self.features.unsqueeze(-2) + noise)) - self.mean.unsqueeze(-2)


def choose_order(distribution: LogitDistribution, num_samples: int) -> Order:
    """Return the cheaper order: factors-first once there are more samples than rows in the basis.

    An opaque classifier takes samples only. A true diagonal residual has as many rows as the noise space has
    dimensions, so samples win there until S is very large.
    """
    if distribution.opaque or num_samples <= distribution.size:
        return "samples"
    return "factors"


def correlation(covariance: Tensor) -> Tensor:
    """Correlations from covariances, both [..., k, k]; a class without noise is correlated with nothing but itself."""
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    normed = covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    eye = torch.eye(covariance.shape[-1], dtype=torch.bool, device=covariance.device)
    return normed.clamp(-1, 1).masked_fill(eye, 1.0)
