"""The classifiers that a head accepts: a new linear layer, an existing one, any `get_logits`, or a `Classifier`, which
also computes its own loss and predictions. A head passes `NoisyFeatures` to its classifier."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hetxl._checks import integer_at_least
from hetxl.functional import (
    Affine,
    ClassifierLift,
    GaussianNoise,
    Lift,
    Link,
    LogitDistribution,
    Order,
    Targets,
    Weights,
)
from hetxl.functional.engine import Summary, mc_log_probs, mc_nll, mc_predict
from hetxl.functional.engine.inputs import flat_batch, flat_noise


@dataclass(frozen=True, eq=False)
class GetLogits:
    """Call any `get_logits` with a flat batch [*, D], for features of any shape, and check its result."""

    get_logits: Callable[[Tensor], Tensor]  # [*, D] → [*, K]
    num_classes: int

    def __call__(self, features: Tensor) -> Tensor:
        """Compute logits: [..., D] → [..., K]."""
        flat = features.reshape(-1, features.shape[-1])
        logits = self.get_logits(flat)
        # shape[0], not len(): len() would fix the batch size of an exported model.
        if logits.shape != (flat.shape[0], self.num_classes):
            raise ValueError(
                f"classifier must return logits of shape {[flat.shape[0], self.num_classes]} for features "
                f"{list(flat.shape)}, found {list(logits.shape)}"
            )
        return logits.reshape(*features.shape[:-1], self.num_classes)


@dataclass(frozen=True, eq=False)
class NoisyFeatures:
    """Features with the Gaussian around them and the normals drawn for it.

    Attributes:
        features: φ(x), [..., D]
        noise: the Gaussian in noise space; None for a deterministic head.
        z: [..., S, Q] or [S, Q] standard normals; None without noise or samples.
        lift: map from noise to logits; None if the noise goes through the classifier, as in HET-XL without a
            projection.
        temperature: τ
        link: "softmax" or "sigmoid"
        order: "samples" or "factors" to force an order of evaluation; None to choose the cheaper one.
        memory_budget: bytes of working memory; None for the default.
        generator: source of the draws that the classifier makes itself; None for torch's default.
    """

    features: Tensor
    noise: GaussianNoise | None
    z: Tensor | None
    lift: Lift | None
    temperature: Tensor | float
    link: Link
    order: Order | None = None
    memory_budget: int | None = None
    generator: torch.Generator | None = None

    def through(self, logits: "Affine | GetLogits") -> LogitDistribution:
        """Return the Gaussian over the logits; noise goes through an opaque classifier sample by sample."""
        lift = self.lift
        if lift is None and self.noise is not None and isinstance(logits, Affine):
            lift = ClassifierLift(logits.weight)
        return LogitDistribution(self.features, logits, self.noise, lift)

    def flat(self) -> "NoisyFeatures":
        """Flatten all batch dimensions to one: features [B, D], z [B, S, Q]."""
        shape = self.features.shape[:-1]
        if len(shape) == 1 and (self.z is None or self.z.dim() == 3):
            return self
        features, z = flat_batch(self.features, shape, 1), flat_batch(self.z, shape, 2)
        return replace(self, features=features, noise=self.noise and flat_noise(self.noise, shape), z=z)

    def of_examples(self, examples: slice | Tensor) -> "NoisyFeatures":
        """Select examples of a flat batch."""
        z = None if self.z is None else self.z[examples]
        noise = self.noise and self.noise.of_examples(examples)
        return replace(self, features=self.features[examples], noise=noise, z=z)

    def projected(self, weight: Tensor) -> "NoisyFeatures":
        """Apply a linear map without bias, weight [H, D], to a flat batch: features and noise in H dimensions."""
        noise = None if self.noise is None else GaussianNoise(self.noise.basis() @ weight.T)
        return replace(self, features=self.features @ weight.T, noise=noise)

    def logits_at(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Sample the logits [..., S] of one class of each example, before the temperature, in at least float32.

        Args:
            rows: [..., D], for each example the row of W of its class.
            bias: [...], for each example the bias of its class; None for 0.
        """
        wide = torch.float64 if self.features.dtype == torch.float64 else torch.float32
        rows = rows.to(wide)
        mean = (rows * self.features.to(wide)).sum(-1, keepdim=True)
        if bias is not None:
            mean = mean + bias.to(wide).unsqueeze(-1)
        if self.noise is None or self.z is None:
            return mean
        factors = self.noise.project(rows.unsqueeze(-2))  # [..., 1, Q]
        return mean + (self.z.to(factors.dtype) @ factors.mT).squeeze(-1)

    def evaluation_options(self) -> dict[str, Any]:
        """Return τ, the order and the memory budget as options of the primitives."""
        return {"temperature": self.temperature, "order": self.order, "memory_budget": self.memory_budget}

    def nll(self, logits: LogitDistribution, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return `mc_nll` of these logits: a scalar, or [...] for reduction "none"."""
        options = {"link": self.link, "reduction": reduction, "weights": weights, **self.evaluation_options()}
        return mc_nll(logits, self.z, targets, **options)

    def log_probs(self, logits: LogitDistribution) -> Tensor:
        """Return `mc_log_probs` of these logits, [..., K]."""
        return mc_log_probs(logits, self.z, link=self.link, **self.evaluation_options())

    def predict(
        self, logits: LogitDistribution, method: str, top_k: int | None, tolerance: float, classes: Tensor | None = None
    ) -> Summary:
        """Return `mc_predict` of these logits."""
        options = {"link": self.link, "method": method, "top_k": top_k, "tolerance": tolerance, "classes": classes}
        return mc_predict(logits, self.z, **options, **self.evaluation_options())


class Classifier(nn.Module, ABC):
    """A map from features [..., D] to the logits of K classes that a head's noise passes through with the features.

    The methods of this base class compute all K logits, in blocks. A subclass that uses only some of the classes at a
    time overrides the loss and the predictions. See `hetxl.classifiers`.

    Args:
        in_features: D
        num_classes: K

    Attributes:
        linear: whether the logits are W φ + b; `affine` then returns W and b.
        complete: whether the loss uses the logits of all classes. Only then may noise bypass the classifier (HET,
            HET-H, HET-XL with its own projection); otherwise it must go through the classifier.
    """

    linear = True
    complete = True

    def __init__(self, in_features: int, num_classes: int):
        super().__init__()
        self.in_features = integer_at_least("in_features", in_features, 1)
        self.num_classes = integer_at_least("num_classes", num_classes, 1)

    @property
    def classes(self) -> range:
        """Return the range of classes that this process holds."""
        return range(self.num_classes)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that features must have."""
        return next(self.parameters()).dtype

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Compute the logits [..., K] of features [..., D]."""

    @abstractmethod
    def logits_of(self, features: Tensor, classes: Tensor) -> Tensor:
        """Compute the logits [..., k] of given classes [..., k] of each example, and of no others."""

    def affine(self) -> Affine | None:
        """Return W and b over `classes`; None for a classifier that is not linear."""
        return None

    def prepare(self, features: Tensor) -> Tensor:
        """Return the features [..., D] that the noise is added to."""
        return features

    def noise_generator(self) -> torch.Generator | None:
        """Return the generator for calls without one; None for torch's default."""
        return None

    def distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """Return the Gaussian over the logits of `classes`."""
        return noisy.through(self.affine() or GetLogits(self, self.num_classes))

    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return the negative log-likelihood of the targets: a scalar, or [...] for reduction "none"."""
        return noisy.nll(self.distribution(noisy), targets, reduction, weights)

    def log_probs(self, noisy: NoisyFeatures) -> Tensor:
        """Return averaged log-probabilities [..., K] (sigmoid: logits of the mean probabilities)."""
        return noisy.log_probs(self.distribution(noisy))

    def predict(self, noisy: NoisyFeatures, method: str, top_k: int | None, tolerance: float) -> Summary:
        """Return averaged probabilities with entropies."""
        return noisy.predict(self.distribution(noisy), method, top_k, tolerance)

    def extra_repr(self) -> str:
        """Return the sizes shown when the module is printed."""
        return f"in_features={self.in_features}, num_classes={self.num_classes}"


def is_plain_linear(classifier: object) -> TypeGuard[nn.Linear]:
    """Return whether a classifier computes exactly W φ + b with its parameters W and b.

    False for a subclass that overrides `forward` (quantised, adapted), and for a layer with forward hooks: torch's
    older weight normalisation and its pruning recompute W in such a hook."""
    return (
        isinstance(classifier, nn.Linear)
        and type(classifier).forward is nn.Linear.forward
        and not (classifier._forward_pre_hooks or classifier._forward_hooks)
    )


def as_classifier(
    classifier: nn.Module | Callable[[Tensor], Tensor] | None,
    in_features: int,
    num_classes: int,
    *,
    bias: bool,
    bias_init: float | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module | Callable[[Tensor], Tensor]:
    """Return a new nn.Linear for None, an existing layer after a check of its sizes, anything else unchanged."""
    if classifier is None:
        if bias_init is not None and not bias:
            raise ValueError(f"bias_init={bias_init} needs bias=True")
        linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        if bias_init is not None:
            nn.init.constant_(linear.bias, bias_init)
        return linear
    if bias_init is not None:
        raise ValueError("bias_init applies to a new classifier only; set the bias of the existing classifier instead")
    if isinstance(classifier, nn.Linear | Classifier):
        classes = classifier.out_features if isinstance(classifier, nn.Linear) else classifier.num_classes
        if (classifier.in_features, classes) != (in_features, num_classes):
            raise ValueError(
                f"classifier maps {classifier.in_features} features to {classes} classes, but "
                f"in_features={in_features} and num_classes={num_classes}"
            )
    elif not callable(classifier):
        raise TypeError(
            f"classifier must be None, an nn.Linear, a module or a function, found {type(classifier).__name__}"
        )
    return classifier


def factory_options(classifier: object, device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return device and dtype for further parameters of a head [default: those of its classifier]."""
    parameter = next(classifier.parameters(), None) if isinstance(classifier, nn.Module) else None
    if parameter is not None and parameter.is_floating_point():
        device = parameter.device if device is None else device
        dtype = parameter.dtype if dtype is None else dtype
    return {"device": device, "dtype": dtype}
