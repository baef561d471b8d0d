"""What one evaluation starts from: the tensors of a logit distribution, flattened to one batch dimension, and the order
in which they pass through autograd."""

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from hetxl.functional.distribution import Affine, LogitDistribution
from hetxl.functional.lifts import HashLift, IdentityLift, LinearLift
from hetxl.functional.noise import GaussianNoise, Residual

LiftKind = Literal["none", "identity", "hash", "classifier", "projection"]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a `LogitDistribution` and its normals. Everything that may need a gradient is here by itself.

    Attributes:
        features: [B, D]
        weight: W, [K, D]; None when the mean logits are given.
        bias: [K] or None
        mean: [B, K], the mean logits of a classifier that is not linear; None otherwise.
        factors: [R, N] or [B, R, N] or None
        scale: [B, N] or None
        residual: [B, N] or None
        projection: W′, [K, N], for lift "projection".
        temperature: τ, a float32 or float64 scalar.
        z: [B, S, Q]; None without noise.
        buckets: [K], for lift "hash".
        residual_kind: "rank1" or "diagonal".
        lift: how noise reaches the logits.
    """

    features: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    factors: Tensor | None
    scale: Tensor | None
    residual: Tensor | None
    projection: Tensor | None
    temperature: Tensor
    z: Tensor | None
    buckets: Tensor | None
    residual_kind: Residual
    lift: LiftKind

    @property
    def batch(self) -> int:
        """B."""
        first = self.mean if self.features is None else self.features
        assert first is not None
        return first.shape[0]

    @property
    def num_classes(self) -> int:
        """K."""
        if self.weight is not None:
            return self.weight.shape[0]
        assert self.mean is not None
        return self.mean.shape[1]

    @property
    def noise(self) -> GaussianNoise | None:
        """The Gaussian in noise space."""
        if self.lift == "none":
            return None
        return GaussianNoise(self.factors, self.scale, self.residual, self.residual_kind)

    @property
    def noise_features(self) -> int:
        """N; 0 without noise."""
        for tensor in (self.residual, self.factors):
            if tensor is not None:
                return tensor.shape[-1]
        return 0

    @property
    def samples(self) -> int:
        """S; 1 without noise."""
        return 1 if self.z is None else self.z.shape[1]

    @property
    def wide(self) -> torch.dtype:
        """The precision of all sums: float64 for float64, float32 for anything narrower."""
        first = self.mean if self.features is None else self.features
        assert first is not None
        return torch.float64 if first.dtype == torch.float64 else torch.float32

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The differentiable tensors, in the order of `GRADIENTS`."""
        return tuple(getattr(self, name) for name in GRADIENTS)

    def with_tensors(self, tensors: tuple[Tensor | None, ...]) -> "Inputs":
        """The same evaluation with other differentiable tensors."""
        return replace(self, **dict(zip(GRADIENTS, tensors, strict=True)))

    def widened(self) -> "Inputs":
        """The same evaluation with all tensors in the precision of the sums."""
        tensors = {name: getattr(self, name) for name in (*GRADIENTS, "z")}
        return replace(self, **{name: value.to(self.wide) for name, value in tensors.items() if value is not None})

    def of_examples(self, examples: slice | Tensor) -> "Inputs":
        """The same evaluation for some of the examples."""

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[examples]

        shared = self.factors is not None and self.factors.dim() == 2
        return replace(
            self,
            features=part(self.features),
            mean=part(self.mean),
            factors=self.factors if shared else part(self.factors),
            scale=part(self.scale),
            residual=part(self.residual),
            z=part(self.z),
        )

    def distribution(self) -> LogitDistribution:
        """These inputs as a LogitDistribution again, for the reference evaluation."""
        features = self.features
        if self.weight is not None:
            classifier = Affine(self.weight, self.bias)
        else:
            mean = self.mean
            assert mean is not None
            features = mean
            classifier = _identity
        assert features is not None
        lift = None
        if self.lift == "identity":
            lift = IdentityLift()
        elif self.lift == "hash":
            assert self.buckets is not None
            lift = HashLift(self.buckets)
        elif self.lift in ("classifier", "projection"):
            weight = self.weight if self.lift == "classifier" else self.projection
            assert weight is not None
            lift = LinearLift(weight)
        return LogitDistribution(features, classifier, self.noise, lift)


GRADIENTS = tuple(field.name for field in fields(Inputs))[: len(fields(Inputs)) - 4]
"""features … temperature: what an evaluation gives gradients for."""


def _identity(values: Tensor) -> Tensor:
    return values


def batch_shape_of(distribution: LogitDistribution, z: Tensor | None) -> torch.Size:
    """[...] of the result: that of the features, against which the normals' may be broadcast."""
    shape = distribution.features.shape[:-1]
    return shape if z is None else torch.broadcast_shapes(shape, z.shape[:-2])


def gather_inputs(distribution: LogitDistribution, z: Tensor | None, temperature: Tensor | float) -> Inputs:
    """Take a distribution [..., K] apart and flatten its batch; the classifier must be linear where noise goes through
    it."""
    features = distribution.features
    batch_shape = batch_shape_of(distribution, z)
    batch = batch_shape.numel()

    def flat(values: Tensor | None) -> Tensor | None:
        """[..., X] → [B, X]"""
        return None if values is None else values.expand(*batch_shape, -1).reshape(batch, values.shape[-1])

    weight = bias = mean = factors = scale = residual = projection = buckets = None
    if isinstance(distribution.classifier, Affine):
        weight, bias = distribution.classifier.weight, distribution.classifier.bias
    else:
        mean = flat(distribution.mean)
    noise, lift = distribution.noise, distribution.lift
    kind: LiftKind = "none"
    residual_kind: Residual = "rank1"
    if noise is not None:
        kind = "identity"
        if isinstance(lift, HashLift):
            kind, buckets = "hash", lift.buckets
        elif isinstance(lift, LinearLift):
            kind = "classifier" if lift.weight is weight else "projection"
            projection = None if kind == "classifier" else lift.weight
        factors = noise.factors
        if factors is not None and factors.dim() > 2:
            factors = factors.expand(*batch_shape, -1, -1).reshape(batch, *factors.shape[-2:])
        scale, residual, residual_kind = flat(noise.scale), flat(noise.residual), noise.residual_kind
        if z is not None:
            z = z.expand(*batch_shape, *z.shape[-2:]).reshape(batch, *z.shape[-2:])
    wide = torch.float64 if features.dtype == torch.float64 else torch.float32
    return Inputs(
        features=flat(features) if mean is None else None,
        weight=weight,
        bias=bias,
        mean=mean,
        factors=factors,
        scale=scale,
        residual=residual,
        projection=projection,
        temperature=torch.as_tensor(temperature, dtype=wide, device=features.device),
        z=z if kind != "none" else None,
        buckets=buckets,
        residual_kind=residual_kind,
        lift=kind,
    )
