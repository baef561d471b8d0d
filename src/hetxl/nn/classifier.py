"""What a head accepts as its classifier: a new linear layer, an existing one, any `get_logits`, or a `Classifier`,
which also says how its loss and its predictions are found."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hetxl.functional import Affine, LogitDistribution, Summary, Targets, Weights
from hetxl.functional._checks import integer_at_least
from hetxl.nn.noisy import NoisyFeatures


def is_plain_linear(classifier: object) -> TypeGuard[nn.Linear]:
    """Whether a classifier is exactly W φ + b, with the W and b that it holds.

    A subclass that changes `forward` (quantised, adapted) is not, nor is a layer with hooks around its forward pass: in
    one of those torch's older norms of weights and its pruning compute W anew.
    """
    return (
        isinstance(classifier, nn.Linear)
        and type(classifier).forward is nn.Linear.forward
        and not (classifier._forward_pre_hooks or classifier._forward_hooks)
    )


class Averages(ABC):
    """The loss and the predictions of what gives a Gaussian over the logits, through all classes in blocks."""

    @abstractmethod
    def distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """The Gaussian over the logits."""

    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Negative log-likelihood of the targets: a scalar, or [...] for reduction "none"."""
        return noisy.nll(self.distribution(noisy), targets, reduction, weights)

    def log_probs(self, noisy: NoisyFeatures) -> Tensor:
        """Averaged log-probabilities [..., K] (sigmoid: logits of the mean probabilities)."""
        return noisy.log_probs(self.distribution(noisy))

    def predict(self, noisy: NoisyFeatures, method: str, top_k: int | None, tolerance: float) -> Summary:
        """Averaged probabilities with entropies."""
        return noisy.predict(self.distribution(noisy), method, top_k, tolerance)


class Classifier(nn.Module, Averages):
    """A map from features [..., D] to the logits of K classes that a head's noise passes through with the features.

    A subclass that never looks at all classes at once answers for its own loss and predictions; those of this base
    class go through all of them, in blocks. See `hetxl.classifiers`.

    Args:
        in_features: D
        num_classes: K

    Attributes:
        linear: whether the logits are W φ + b for some W and b, which `affine` then gives.
        complete: whether the loss is over all classes at once, so that noise may also be lifted beside the classifier
            (HET, HET-H, HET-XL with a projection of its own). The others take noise that goes through them.
    """

    linear = True
    complete = True

    def __init__(self, in_features: int, num_classes: int):
        super().__init__()
        self.in_features = integer_at_least("in_features", in_features, 1)
        self.num_classes = integer_at_least("num_classes", num_classes, 1)

    @property
    def classes(self) -> range:
        """The classes that this process answers for."""
        return range(self.num_classes)

    @property
    def dtype(self) -> torch.dtype:
        """What features must have."""
        return next(self.parameters()).dtype

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Logits [..., K] of features [..., D]."""

    @abstractmethod
    def logits_of(self, features: Tensor, classes: Tensor) -> Tensor:
        """Logits [..., k] of the stated classes [..., k] of each example, without looking at the others."""

    def affine(self) -> Affine | None:
        """W and b over `classes`; None for a classifier that is not linear."""
        return None

    def prepare(self, features: Tensor) -> Tensor:
        """Features [..., D] as the noise is added to them."""
        return features

    def noise_generator(self) -> torch.Generator | None:
        """Where the noise of a call without a generator comes from; None for torch's default."""
        return None

    def distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """The Gaussian over the logits of `classes`."""
        return distribution(self.affine() or GetLogits(self, self.num_classes), noisy)

    def extra_repr(self) -> str:
        """The sizes as shown when the module is printed."""
        return f"in_features={self.in_features}, num_classes={self.num_classes}"


@dataclass(frozen=True, eq=False)
class GetLogits:
    """Calls any `get_logits` with a plain batch [*, D], whatever the shape of the features, and checks what it returns.

    Attributes:
        get_logits: a function or module, [*, D] → [*, K].
        num_classes: K
    """

    get_logits: Callable[[Tensor], Tensor]
    num_classes: int

    def __call__(self, features: Tensor) -> Tensor:
        """[..., D] → [..., K]."""
        flat = features.reshape(-1, features.shape[-1])
        logits = self.get_logits(flat)
        # shape[0] and not len(), which would fix the batch size of an exported model.
        if logits.shape != (flat.shape[0], self.num_classes):
            raise ValueError(
                f"classifier must return logits of shape {[flat.shape[0], self.num_classes]} for features "
                f"{list(flat.shape)}, found {list(logits.shape)}"
            )
        return logits.reshape(*features.shape[:-1], self.num_classes)


def distribution(logits: Affine | GetLogits, noisy: NoisyFeatures) -> LogitDistribution:
    """The Gaussian over the logits of a linear classifier, or of an opaque one, which noise goes through."""
    if isinstance(logits, Affine):
        return noisy.through(logits)
    return LogitDistribution(noisy.features, logits, noisy.noise, noisy.lift)


@dataclass(frozen=True, eq=False)
class Plain(Averages):
    """An nn.Linear or any `get_logits`, as what answers for a loss.

    Attributes:
        logits: as W and b, or as a function.
    """

    logits: Affine | GetLogits

    def distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """The Gaussian over the logits."""
        return distribution(self.logits, noisy)


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
    """A new nn.Linear for None; an existing one by reference, its sizes checked; anything else as it is."""
    if classifier is None:
        if bias_init is not None and not bias:
            raise ValueError(f"bias_init={bias_init} needs bias=True")
        linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        if bias_init is not None:
            nn.init.constant_(linear.bias, bias_init)
        return linear
    if bias_init is not None:
        raise ValueError("bias_init is for a new classifier; set the bias of the one given as classifier")
    if isinstance(classifier, nn.Linear | Classifier):
        classes = classifier.out_features if isinstance(classifier, nn.Linear) else classifier.num_classes
        found = (classifier.in_features, classes)
        if found != (in_features, num_classes):
            raise ValueError(
                f"classifier maps {found[0]} features to {found[1]} classes, but in_features={in_features} and "
                f"num_classes={num_classes}"
            )
    elif not callable(classifier):
        raise TypeError(
            f"classifier must be None, an nn.Linear, a module or a function, found {type(classifier).__name__}"
        )
    return classifier


def factory_options(classifier: object, device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Device and dtype for parameters beside a classifier: the stated ones, or the classifier's own."""
    parameter = next(classifier.parameters(), None) if isinstance(classifier, nn.Module) else None
    if parameter is not None and parameter.is_floating_point():
        device = parameter.device if device is None else device
        dtype = parameter.dtype if dtype is None else dtype
    return {"device": device, "dtype": dtype}
