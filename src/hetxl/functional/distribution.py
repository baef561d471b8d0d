"""The Gaussian over logits that a head predicts: a mean, and noise that is lifted to the classes."""

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
        # The features may come from an autocast region that has ended.
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)


class LogitDistribution:
    """N(mean(x), Σ(x)) over the logits [..., K], before the temperature. Values are computed when they are first read,
    with the weights at that time.

    HET, HET-H:  logits = classifier(φ) + lift(ε)
    HET-XL:      logits = classifier(φ + ε), which is classifier(φ) + W ε when the classifier is linear

    Args:
        features: φ(x), [..., D]
        classifier: features → logits, [..., D] → [..., K].
        noise: the Gaussian in noise space; None for a deterministic classifier.
        lift: noise space → logits. None with noise means that the noise goes through the classifier with the features
            and the classifier is *opaque*, not known to be linear. Then only the order "samples" applies, and `factors`
            (hence variances and covariances) are the differences classifier(φ + row) − classifier(φ): exact for an
            affine classifier, a secant approximation otherwise.
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
        """Return whether the noise goes through a classifier that is not known to be linear."""
        return self.noise is not None and self.lift is None

    @property
    def size(self) -> int:
        """Return Q, the number of standard normals of one sample; 0 without noise."""
        return 0 if self.noise is None else self.noise.size

    # Cached by hand: functools.cached_property has a lock in Python 3.10 and 3.11, which torch.compile cannot trace.
    @property
    def mean(self) -> Tensor:
        """Return the logits without noise, [..., K]."""
        if self._mean is None:
            self._mean = to_accumulation_dtype(self.classifier(self.features))
        return self._mean

    @property
    def factors(self) -> Tensor:
        """Return the basis in logit space, [..., Q, K]: the covariance of the logits is factorsᵀ factors."""
        if self._factors is None:
            if self.noise is None:
                self._factors = self.mean.new_zeros(*self.mean.shape[:-1], 0, self.mean.shape[-1])
            else:
                self._factors = self._lifted(self.noise.basis())
        return self._factors

    @property
    def variance(self) -> Tensor:
        """Return the variance of each logit, [..., K]."""
        if self.noise is None or self.lift is None:
            return to_accumulation_dtype(self.factors).square().sum(-2)
        with without_autocast(self.features.device):
            return self.lift.variance(self.noise)

    def covariance(self, classes: Tensor) -> Tensor:
        """Return the covariance of the logits of the given classes [..., k] of each example, [..., k, k]."""
        with without_autocast(self.features.device):
            if self.noise is not None and self.lift is not None:
                return self.lift.covariance(self.noise, classes)
            factors = to_accumulation_dtype(gather_columns(self.factors, classes))  # [..., Q, k]
            return factors.mT @ factors

    def sample(self, z: Tensor | None, order: Order | None = "samples") -> Tensor:
        """Sample logits in one of two orders, which give the same numbers.

            samples: mean + lift(z @ basis)      S rows per example go through the lift
            factors: mean + z @ lift(basis)      Q rows per example, independent of S

        Args:
            z: [..., S, Q] or [S, Q] standard normals; None without noise.
            order: whether the samples or the factors are lifted; None for the cheaper order.

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
        """Return the same distribution without its noise."""
        return LogitDistribution(self.features, self.classifier)

    def _lifted(self, noise: Tensor) -> Tensor:
        """Lift noise [..., Q, N] to logits [..., Q, K]."""
        if self.lift is not None:
            return self.lift(noise)
        return to_accumulation_dtype(self.classifier(self.features.unsqueeze(-2) + noise)) - self.mean.unsqueeze(-2)


def choose_order(distribution: LogitDistribution, num_samples: int) -> Order:
    """Return the cheaper order: "factors" if there are more samples than rows in the basis.

    An opaque classifier supports only "samples". A diagonal residual has as many rows as the noise space has
    dimensions, so "samples" is cheaper there unless S is very large.
    """
    if distribution.opaque or num_samples <= distribution.size:
        return "samples"
    return "factors"


def correlation(covariance: Tensor) -> Tensor:
    """Return correlations of covariances, both [..., k, k]; a class without noise is correlated only with itself."""
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    normed = covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    eye = torch.eye(covariance.shape[-1], dtype=torch.bool, device=covariance.device)
    return normed.clamp(-1, 1).masked_fill(eye, 1.0)
