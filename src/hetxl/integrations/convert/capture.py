"""Find the rows of its head's features that a model's output consists of, without computing the head.

A model may select or move rows after its classifier: take the last token of every sequence, reshape, permute. Inside
`capture()` the layer returns row numbers instead of its K outputs, and the numbers in the model's output identify the
rows:

    features [B, T, D]  →  layer  →  numbers [B, T, K]  →  the model picks rows  →  output [B, K]  →  features[rows]

        row 0   φ₀             -1  -1  -1
        row 1   φ₁     →      -24 -24 -24      →   last token of each    →    -24 -24 -24      →    row 1 = φ₁
        row 2   φ₂            -10 -10 -10          of two sequences            -7  -7  -7           row 3 = φ₃
        row 3   φ₃             -7  -7  -7

A fused loss therefore samples only the rows that are used. A model that changes values (a softmax, scaling, averaging)
returns something that is not a row number, and raises an error.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHANGED = (
    "the model changes the values that its head returns (a softmax, scaling, capping, rounding or averaging), so the "
    "head's probabilities would not be the model's; remove that operation, or name another layer= to convert"
)


class Captured:
    """The features that a layer was called with, and the rows of them in a model's output."""

    def __init__(self) -> None:
        self.features: Tensor | None = None

    def stand_in(self, features: Tensor, num_classes: int) -> Tensor:
        """Return row numbers [..., K] for features [..., D], without memory for K."""
        if self.features is not None:
            raise ValueError(
                "the head was called twice in one forward pass, so the rows of the model's output are ambiguous for a "
                "fused loss, a prediction or an export; train with the model's output instead, as with a linear layer"
            )
        self.features = features
        rows = features.shape[:-1].numel()
        dtype = torch.float32 if rows <= _rows_of(torch.float32) else torch.float64
        numbers = _numbers(torch.arange(rows, device=features.device)).to(dtype)
        return numbers.reshape(*features.shape[:-1], 1).expand(*features.shape[:-1], num_classes)

    def rows(self, numbers: Tensor) -> Tensor:
        """Return the features [..., D] of the rows whose numbers a model returned, [...]."""
        flat = self._flat()
        if len(flat) > _rows_of(numbers.dtype):
            raise ValueError(
                f"the model returns its head's output as {numbers.dtype}, which can identify only "
                f"{_rows_of(numbers.dtype)} of {len(flat)} rows; return it as float32"
            )
        values = numbers.detach().double()
        whole = -values.round().long()
        odd = whole // (whole & -whole).clamp(min=1)  # the lowest bit of a number is its power of two
        rows = ((odd - 1) // 2).clamp(0, len(flat) - 1)
        if not torch.equal(_numbers(rows).double(), values):
            raise ValueError(_CHANGED)
        if rows.numel() == len(flat) and torch.equal(rows.flatten(), torch.arange(len(flat), device=rows.device)):
            return flat.reshape(*numbers.shape, -1)
        return flat[rows]

    def rows_of(self, outputs: Tensor, num_classes: int) -> Tensor:
        """Return the features [..., D] behind a model's outputs, [..., K], or with the classes in another dimension."""
        self._flat()
        dims = [dim for dim in reversed(range(outputs.dim())) if outputs.shape[dim] == num_classes]
        if not dims:
            raise ValueError(
                f"the model's output must have {num_classes} classes last, as its head's, "
                f"found shape {list(outputs.shape)}"
            )
        # Sizes alone do not decide: an image may be as wide as there are classes. A row has one number for all classes.
        for dim in dims:
            numbers = outputs.select(dim, 0)
            # As the layer returned them, all classes are one number in memory.
            if outputs.stride(dim) == 0 or torch.equal(numbers.unsqueeze(dim).expand_as(outputs), outputs):
                return self.rows(numbers)
        raise ValueError(_CHANGED)

    def _flat(self) -> Tensor:
        """Return the features of all rows, [*, D]."""
        if self.features is None:
            raise ValueError("the model did not call its head in this forward pass")
        return self.features.reshape(-1, self.features.shape[-1])


def _numbers(rows: Tensor) -> Tensor:
    """Return row r as −(2 r + 1)·2ᵉ, int64, with e of 0 to 4 by a hash of r.

    Numbers are odd, so that rounding in half precision is detected; negative, so that a ReLU or a sigmoid is detected;
    and have irregular powers of two, so that an average is detected, which could be another row if they were evenly
    spaced.
    """
    return -((2 * rows + 1) << (rows * 0x9E3779B1 >> 16) % 5)  # the golden ratio, as in Fibonacci hashing


def _rows_of(dtype: torch.dtype) -> int:
    """Return how many of these numbers, from row 0, a floating-point dtype represents exactly: 128 in bfloat16."""
    return int(1 / torch.finfo(dtype).eps)


class Capturing:
    """Mix-in that captures the calls of a module."""

    _captured: Captured | None = None

    @property
    def capturing(self) -> bool:
        """Return whether a call is inside `capture()`."""
        return self._captured is not None

    @contextlib.contextmanager
    def capture(self) -> Iterator[Captured]:
        """Inside the block, store the features of calls and return their row numbers."""
        self._captured = Captured()
        try:
            yield self._captured
        finally:
            self._captured = None


def logits_of(output: Any) -> Tensor:
    """Return the tensor that a model returned, directly or as the `.logits` of an object."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model's output must be a tensor or have .logits, found {type(output).__name__}")
    return logits
