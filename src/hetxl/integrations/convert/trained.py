"""Noise for a model that is trained already, by rows that it was not trained on."""

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
    """Give a trained model the noise that its last layer lacks, in place; nothing that it has learned changes.

    The features of `data` are computed once. A covariance, τ and the share ε of labels that are any class alike are
    learned on them with the mean logits as they are, which takes about a second, and folds decide: where neither noise
    nor ε lowers the NLL of rows that it was not fitted to, a warning says so, and the model is returned with τ alone,
    or as it was if τ makes it worse.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))  # trained
    >>> inputs, labels = torch.randn(64, 8), torch.randint(3, (64,))
    >>> with warnings.catch_warnings(action="ignore"):
    ...     model = add_noise(model, (inputs, labels), steps=10)

    Args:
        model: as for `hetxl.convert`.
        data: rows that the model was not trained on, such as the validation split: a pair of inputs and targets, or
            batches of them (a DataLoader), also dicts with "labels". Targets are class ids, −100 for those to leave
            out; for the sigmoid link labels in {0, 1}, [B, K].
        layer: which one, as in "head.fc", if a model is ambiguous.
        rank: R of the covariance.
        link: "softmax" for one label among K, "sigmoid" for any number of labels.
        folds: of the rows that decide.
        steps: of Adam, for each fit.
        seed: of folds, batches and noise.
        **options: of the head, as for `hetxl.convert`, such as eval_samples.

    Returns:
        The model. `hetxl.predict(model, inputs)` shows where its uncertainty comes from; `hetxl.revert` takes the noise
        away. `hetxl.metrics.fit_noise` returns the losses that decided.
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
    """Return what reaches the head, [n, D], and its targets, [n] or [n, K]."""
    from hetxl.integrations.convert import features_of

    device = next(model.parameters()).device
    parts, labels = [], []
    with evaluating(model):
        for inputs, targets in _batches(data):
            features = features_of(model, _to(inputs, device))
            rows = torch.as_tensor(targets).to(device)
            if link == "softmax" and rows.shape != features.shape[:-1]:
                raise ValueError(
                    f"targets must be class ids of shape {list(features.shape[:-1])}, as the model's output has rows, "
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
