"""The inputs of one evaluation: the tensors of a logit distribution, flattened to one batch dimension. Mean logits have
one small type for each kind of classifier; noise is stored with its lift."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hetxl.functional.distribution import Affine, LogitDistribution
from hetxl.functional.lifts import ClassifierLift, LinearLift
from hetxl.functional.noise import GaussianNoise

Part = TypeVar("Part", bound=Any)
TensorOrNone = TypeVar("TensorOrNone", Tensor, Tensor | None)


@dataclass(frozen=True)
class LinearMean:
    """Mean logits W φ + b."""

    features: Tensor  # φ, [B, D]
    weight: Tensor  # W, [K, D]
    bias: Tensor | None  # b, [K]

    @property
    def first(self) -> Tensor:
        """Return the tensor that determines batch size, width, precision and device, [B, D]."""
        return self.features

    @property
    def num_classes(self) -> int:
        """K."""
        return self.weight.shape[0]

    def of_examples(self, examples: slice | Tensor) -> "LinearMean":
        """Return the mean logits of some of the examples."""
        return replace(self, features=self.features[examples])


@dataclass(frozen=True)
class GivenMean:
    """Mean logits of a classifier that is not linear."""

    mean: Tensor  # [B, K]

    @property
    def first(self) -> Tensor:
        """Return the tensor that determines batch size, width, precision and device, [B, K]."""
        return self.mean

    @property
    def num_classes(self) -> int:
        """K."""
        return self.mean.shape[1]

    def of_examples(self, examples: slice | Tensor) -> "GivenMean":
        """Return the mean logits of some of the examples."""
        return GivenMean(self.mean[examples])


@dataclass(frozen=True)
class NoiseInput:
    """Noise, its normals and its lift to the logits."""

    gaussian: GaussianNoise  # its parts are [B, …], or factors [R, N] shared by all examples
    z: Tensor | None  # [B, S, Q] standard normals; None for evaluations without samples
    lift: Any  # a `Lift`; one of kind "classifier" has the W of the mean logits

    @property
    def normals(self) -> Tensor:
        """Return z, for evaluations that sample."""
        assert self.z is not None
        return self.z

    def of_examples(self, examples: slice | Tensor) -> "NoiseInput":
        """Return the noise of some of the examples."""
        z = None if self.z is None else self.z[examples]
        return replace(self, gaussian=self.gaussian.of_examples(examples), z=z)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a `LogitDistribution` and its normals."""

    mean: LinearMean | GivenMean
    noise: NoiseInput | None  # None for a deterministic classifier
    temperature: Tensor  # τ, a float32 or float64 scalar

    @property
    def batch(self) -> int:
        """B."""
        return self.mean.first.shape[0]

    @property
    def num_classes(self) -> int:
        """K."""
        return self.mean.num_classes

    @property
    def noise_features(self) -> int:
        """N; 0 without noise."""
        return 0 if self.noise is None else self.noise.gaussian.features

    @property
    def noise_size(self) -> int:
        """Q; 0 without noise."""
        return 0 if self.noise is None else self.noise.gaussian.size

    @property
    def samples(self) -> int:
        """S; 1 without noise."""
        return 1 if self.noise is None or self.noise.z is None else self.noise.z.shape[1]

    @property
    def wide(self) -> torch.dtype:
        """Return the precision of all sums: float64 for float64, float32 for anything narrower."""
        return torch.float64 if self.mean.first.dtype == torch.float64 else torch.float32

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that may need a gradient, by name."""
        noise: list[Any] = [] if self.noise is None else [self.noise.gaussian]
        named = {field.name: getattr(part, field.name) for part in (self.mean, *noise) for field in fields(part)}
        named |= {"temperature": self.temperature}
        if self.noise is not None and self.noise.lift.kind == "projection":
            named["projection"] = self.noise.lift.weight
        return {name: named[name] for name in DIFFERENTIABLE if named.get(name) is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Inputs":
        """Return the same evaluation with the named tensors replaced."""
        noise = self.noise
        if noise is not None:
            lift = noise.lift
            if lift.kind == "projection" and "projection" in tensors:
                lift = LinearLift(tensors["projection"])
            elif lift.kind == "classifier" and "weight" in tensors:
                lift = ClassifierLift(tensors["weight"])
            noise = NoiseInput(_replaced(noise.gaussian, tensors), tensors.get("z", noise.z), lift)
        return Inputs(_replaced(self.mean, tensors), noise, tensors.get("temperature", self.temperature))

    def widened(self) -> "Inputs":
        """Return the same evaluation with all tensors in the precision of the sums."""
        tensors = self.tensors()
        if self.noise is not None and self.noise.z is not None:
            tensors["z"] = self.noise.z
        return self.with_tensors({name: value.to(self.wide) for name, value in tensors.items()})

    def of_examples(self, examples: slice | Tensor) -> "Inputs":
        """Return the same evaluation for some of the examples."""
        noise = None if self.noise is None else self.noise.of_examples(examples)
        return Inputs(self.mean.of_examples(examples), noise, self.temperature)

    def product_precision(self) -> torch.dtype:
        """Return the precision of matrix products: autocast's, or that of the classifier."""
        own = self.mean.weight.dtype if isinstance(self.mean, LinearMean) else self.mean.mean.dtype
        device = self.temperature.device.type
        # Autocast leaves float64 unchanged, as in torch's own products.
        if own != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return own

    def distribution_and_normals(self) -> tuple[LogitDistribution, Tensor | None]:
        """Convert these inputs back to a `LogitDistribution` and z, for the reference evaluation."""
        if isinstance(self.mean, GivenMean):
            features, classifier = self.mean.mean, lambda values: values
        else:
            features, classifier = self.mean.features, Affine(self.mean.weight, self.mean.bias)
        if self.noise is None:
            return LogitDistribution(features, classifier), None
        return LogitDistribution(features, classifier, self.noise.gaussian, self.noise.lift), self.noise.z


DIFFERENTIABLE = ("features", "weight", "bias", "mean", "factors", "scale", "residual", "projection", "temperature")
"""What an evaluation gives gradients for, where it is a part of the inputs."""


def _replaced(part: Part, tensors: Mapping[str, Tensor]) -> Part:
    """Return a dataclass with the named fields replaced."""
    return replace(part, **{field.name: tensors[field.name] for field in fields(part) if field.name in tensors})


def batch_shape_of(distribution: LogitDistribution, z: Tensor | None) -> torch.Size:
    """Return the batch shape [...] of the result: that of the features, to which the normals may be broadcast."""
    shape = distribution.features.shape[:-1]
    return shape if z is None else torch.broadcast_shapes(shape, z.shape[:-2])


def gather_inputs(distribution: LogitDistribution, z: Tensor | None, temperature: Tensor | float) -> Inputs:
    """Flatten the batch of a distribution [..., K]; the classifier must be linear if noise goes through it."""
    features, batch_shape = distribution.features, batch_shape_of(distribution, z)
    if isinstance(distribution.classifier, Affine):
        weight, bias = distribution.classifier.weight, distribution.classifier.bias
        mean = LinearMean(flat_batch(features, batch_shape, 1), weight, bias)
    else:
        mean = GivenMean(flat_batch(distribution.mean, batch_shape, 1))
    noise = None
    if distribution.noise is not None and distribution.lift is not None:
        gaussian = flat_noise(distribution.noise, batch_shape)
        noise = NoiseInput(gaussian, flat_batch(z, batch_shape, 2), distribution.lift)
    wide = torch.float64 if features.dtype == torch.float64 else torch.float32
    return Inputs(mean, noise, torch.as_tensor(temperature, dtype=wide, device=features.device))


def flat_batch(values: TensorOrNone, shape: torch.Size, trailing: int) -> TensorOrNone:
    """Return values [..., X] (`trailing` 1) or [..., X, Y] (2) as [B, X] or [B, X, Y]."""
    if values is None:
        return values
    own = values.shape[-trailing:]
    return values.expand(*shape, *own).reshape(shape.numel(), *own)


def flat_noise(noise: GaussianNoise, shape: torch.Size) -> GaussianNoise:
    """Return the Gaussians of a batch [...] as those of [B]; shared factors stay shared."""
    shared = noise.factors is not None and noise.factors.dim() == 2
    factors = noise.factors if shared else flat_batch(noise.factors, shape, 2)
    scale, residual = (flat_batch(part, shape, 1) for part in (noise.scale, noise.residual))
    return GaussianNoise(factors, scale, residual, noise.residual_kind)
