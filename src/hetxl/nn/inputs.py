"""What a head checks of the tensors that it is called with."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_features(features: Tensor, in_features: int, dtype: torch.dtype | None) -> None:
    """Raise unless features fit a head.

    Args:
        features: what was given, [..., D]
        in_features: D
        dtype: of the head; None where there is nothing to go by.
    """
    if not isinstance(features, Tensor) or not features.is_floating_point():
        found = f"dtype {features.dtype}" if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"features must be a floating-point tensor [..., {in_features}], found {found}")
    if features.dim() == 0 or features.shape[-1] != in_features:
        raise ValueError(f"features must have shape [..., {in_features}] (in_features), found {list(features.shape)}")
    if dtype is not None and dtype != features.dtype and not under_autocast(features):
        raise TypeError(
            f"features have dtype {features.dtype} and the head {dtype}; "
            f"cast one of them (features.to({dtype}) or head.to({features.dtype})) or use torch.autocast"
        )


def check_normals(z: Tensor, batch_shape: Sequence[int], size: int, num_samples: int | None) -> None:
    """Raise unless normals that were given as `noise=` fit a call.

    Args:
        z: what was given.
        batch_shape: of the features.
        size: Q
        num_samples: S, where that was given too.
    """
    shape, expected = list(z.shape), list(batch_shape)
    if shape[-1:] != [size] or shape[:-2] not in (expected, []) or len(shape) < 2 or shape[-2] < 1:
        raise ValueError(
            f"noise must have shape {[*expected, 'S', size]}, or {['S', size]} shared by all examples, "
            f"with S at least 1; found {shape}".replace("'S'", "S")
        )
    if num_samples is not None and num_samples != shape[-2]:
        raise ValueError(f"num_samples is {num_samples} but noise holds {shape[-2]} samples; give one of them")


def under_autocast(values: Tensor) -> bool:
    """Whether products of these values would be in another precision."""
    kind = values.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
