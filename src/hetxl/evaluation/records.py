"""What evaluation keeps of each example: a handful of numbers, never its K probabilities. Every metric is computed from
these."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

TOP = 5
"""How many of the most probable classes are kept."""

_FORMAT = "hetxl-records-1"
_TYPES = {
    "rows": np.int64,
    "label": np.int64,
    "log_prob": np.float64,
    "rank": np.int32,
    "hit": np.bool_,
    "top_ids": np.int64,
    "top_probs": np.float32,
    "squared": np.float64,
    "entropy": np.float64,
    "expected_entropy": np.float64,
    "logit_std": np.float32,
}


@dataclass(frozen=True)
class Records:
    """Numbers of n evaluated examples.

    Attributes:
        rows: [n] int64, which rows of the split they are.
        label: [n] int64, the class of each; −1 where an example has any number of labels.
        log_prob: [n], log p̄ of the label; for the sigmoid link minus the binary cross-entropy summed over all labels.
        rank: [n] int32, how many classes come before the label, 0 for the most probable; the best of its labels where
            it has several, K but at least 5 where it has none. Ties never favour the label: among the top classes they
            stand as `top_ids` has them, below those the label is in the middle of the classes it ties with.
        hit: [n] bool, whether the most probable class is a label; the same as rank 0.
        top_ids: [n, min(5, K)] int64, the most probable classes, most probable first.
        top_probs: [n, min(5, K)] float32, their probabilities.
        squared: [n], the Brier score Σ_k (p_k − y_k)².
        entropy: [n], of the averaged probabilities, in nats.
        expected_entropy: [n], mean entropy of the single samples.
        logit_std: [n] float32, standard deviation of the most probable class's logit, before the temperature; 0 without
            noise.
    """

    rows: np.ndarray
    label: np.ndarray
    log_prob: np.ndarray
    rank: np.ndarray
    hit: np.ndarray
    top_ids: np.ndarray
    top_probs: np.ndarray
    squared: np.ndarray
    entropy: np.ndarray
    expected_entropy: np.ndarray
    logit_std: np.ndarray

    TYPES: ClassVar[dict[str, type]] = _TYPES

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        for name in _TYPES:
            shape = getattr(self, name).shape
            wanted = (len(self), self.top_ids.shape[-1]) if name.startswith("top_") else (len(self),)
            if shape != wanted:
                raise ValueError(f"{name} must have shape {list(wanted)} as label has, found {list(shape)}")

    def __len__(self) -> int:
        return len(self.label)

    @property
    def confidence(self) -> np.ndarray:
        """The probability of the most probable class, [n] float64."""
        return self.top_probs[:, 0].astype(np.float64)

    def take(self, which: np.ndarray) -> "Records":
        """Some examples, by place [m] or by mask [n]."""
        return Records(**{name: getattr(self, name)[which] for name in _TYPES})

    @staticmethod
    def empty(num_classes: int) -> "Records":
        """No examples yet, of K classes."""
        columns = min(TOP, num_classes)
        shapes = {name: (0, columns) if name.startswith("top_") else (0,) for name in _TYPES}
        return Records(**{name: np.empty(shapes[name], dtype=kind) for name, kind in _TYPES.items()})

    @staticmethod
    def concatenate(parts: Sequence["Records"]) -> "Records":
        """The examples of all parts, one part after the other."""
        if not parts:
            raise ValueError("parts must hold at least one Records, found none; use Records.empty(num_classes)")
        columns = sorted({part.top_ids.shape[1] for part in parts})
        if len(columns) > 1:
            raise ValueError(f"parts must be of the same classes, found Records with {columns} top classes")
        return Records(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _TYPES})

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, and its folder where missing; a reader finds the old file or the new one, never
        half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        try:
            columns = {field.name: np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}
            save_file(columns, unfinished, metadata={"format": _FORMAT})
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> "Records":
        """Read what `save` wrote."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: there is no such records file")
        try:
            with safe_open(path, framework="numpy") as file:
                kind = (file.metadata() or {}).get("format")
                if kind != _FORMAT:
                    raise ValueError(f"{path}: not a records file, its format is {kind!r} instead of {_FORMAT!r}")
                return Records(**{name: file.get_tensor(name) for name in _TYPES})
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole records file ({error}); evaluate again to write it anew") from error
