"""Add noise to a trained model, learned on held-out rows."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetxl.metrics.noise_fit import FOLDS, NOISE_RANK, STEPS, fit_noise
from hetxl.metrics.records import evaluating

BATCH = 256


def add_noise(
    model: nn.Module, data: Any, *, layer: str | nn.Module | None = None, rank: int = NOISE_RANK,
    link: str = "softmax", folds: int = FOLDS, steps: int = STEPS, seed: int = 0, **options: Any,
) -> Any:  # fmt: skip
    """Add noise to the last layer of a trained model, in place, without changing its weights.

    The features of `data` are computed once. A covariance, τ and ε, the share of uniformly random labels, are learned
    on them in about a second, with fixed mean logits. Cross-validation decides what to keep: if neither noise nor ε
    lowers the NLL of held-out folds, a warning says so, and the model gets only τ, or does not change if τ does not
    help.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))  # trained
    >>> inputs, labels = torch.randn(64, 8), torch.randint(3, (64,))
    >>> with warnings.catch_warnings(action="ignore"):
    ...     model = add_noise(model, (inputs, labels), steps=10)

    Args:
        model: see `hetxl.convert`.
        data: rows that the model was not trained on, such as the validation split: a pair of inputs and targets, or
            batches of them (a DataLoader), also dicts with "labels". Targets are class ids, −100 for ignored rows; for
            the sigmoid link labels in {0, 1}, [B, K].
        layer: name of the layer, such as "head.fc", if the model is ambiguous.
        rank: R of the covariance.
        link: "softmax" for one label among K, "sigmoid" for any number of labels.
        folds: number of folds of the cross-validation.
        steps: steps of Adam for each fit.
        seed: seed of folds, batches and noise.
        **options: options of the head, see `hetxl.convert`, such as eval_samples.

    Returns:
        The model. `hetxl.predict(model, inputs)` returns its uncertainty, and `hetxl.revert` removes the noise.
        `hetxl.metrics.fit_noise` returns the cross-validated losses.
    """
    from hetxl.integrations.convert import convert, head_of, revert

    model = convert(model, "det", layer=layer, link=link)
    try:
        features, targets = _features(model, data, link)
        fit = fit_noise(head_of(model), features, targets, rank=rank, folds=folds, steps=steps, seed=seed)
    finally:
        model = revert(model, fold=False)
    if not fit.helps:
        returned = f"τ = {fit.temperature:.3g} alone" if fit.choice == "temperature" else "the model as it was"
        warnings.warn(f"noise does not help, returning {returned} ({fit.describe()})", stacklevel=2)
        if fit.choice == "none":
            return model
    head, more = ("het-xl", {"rank": rank}) if fit.has_noise else ("det", {})
    model = convert(model, head, layer=layer, link=link, **more, **options)
    fit.apply(head_of(model))
    return model


@torch.no_grad()
def _features(model: nn.Module, data: Any, link: str) -> tuple[Tensor, Tensor]:
    """Return the inputs of the head, [n, D], and the targets, [n] or [n, K]."""
    from hetxl.integrations.convert import features_of

    device = next(model.parameters()).device
    parts, labels = [], []
    with evaluating(model):
        for inputs, targets in _batches(data):
            features = features_of(model, _to(inputs, device))
            rows = torch.as_tensor(targets).to(device)
            if link == "softmax" and rows.shape != features.shape[:-1]:
                raise ValueError(
                    f"targets must be class ids of shape {list(features.shape[:-1])}, the rows of the model's output, "
                    f"got {list(rows.shape)}"
                )
            parts.append(features.reshape(-1, features.shape[-1]))
            labels.append(rows.flatten() if link == "softmax" else rows.reshape(-1, rows.shape[-1]))
    if not parts:
        raise ValueError("data must hold at least one batch, got none")
    return torch.cat(parts), torch.cat(labels)


def _batches(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and targets of arrays or of batches."""
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor | np.ndarray):
        inputs, targets = (torch.as_tensor(part) for part in data)
        if len(inputs) != len(targets):
            raise ValueError(f"data must have a target for each input, got {len(inputs)} and {len(targets)}")
        yield from zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
        return
    if not isinstance(data, Iterable):
        raise TypeError(f"data must be (inputs, targets) or batches of them, got {type(data).__name__}")
    for batch in data:
        if isinstance(batch, dict) and "labels" in batch:
            yield {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            yield batch[0], batch[1]
        else:
            raise TypeError("a batch of data must be (inputs, targets), or a dict with 'labels'")


def _to(inputs: Any, device: torch.device) -> Any:
    """Move tensors of a batch to a device."""
    if isinstance(inputs, dict):
        return {key: _to(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(_to(value, device) for value in inputs)
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs
