"""What a head accepts as its classifier: a new linear layer, an existing one, or any `get_logits`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


def is_plain_linear(classifier: object) -> TypeGuard[nn.Linear]:
    """Whether a classifier is exactly W φ + b. A subclass that changes `forward` (quantised, adapted) is not."""
    return isinstance(classifier, nn.Linear) and type(classifier).forward is nn.Linear.forward


@dataclass(frozen=True)
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
    if isinstance(classifier, nn.Linear):
        found = (classifier.in_features, classifier.out_features)
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
