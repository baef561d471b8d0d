"""Sums of gradients over the blocks of an evaluation."""

import torch
from torch import Tensor

from hetxl.functional.engine.inputs import GRADIENTS, Inputs


class Gradients:
    """Sums of gradients over blocks, kept in wide precision, for the inputs that need one.

    Args:
        inputs: of the evaluation.
        needed: names of the inputs that need a gradient.
    """

    def __init__(self, inputs: Inputs, needed: frozenset[str]):
        self.needed = needed
        self.inputs = inputs
        self._sums: dict[str, Tensor] = {}
        self._written: dict[str, int] = {}
        self._buffer: Tensor | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.needed

    @property
    def any_noise(self) -> bool:
        """Whether anything behind the noise needs a gradient."""
        return not self.needed.isdisjoint(("factors", "scale", "residual"))

    def of(self, name: str) -> Tensor:
        """The running sum for one input, like the input but wide; zeros at first."""
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(getattr(self.inputs, name), dtype=self.inputs.wide)
        sums = self._sums[name]
        written = self._written.pop(name, None)
        if written is not None:  # by products, which write before they add
            sums[written:] = 0
            self._written[name] = len(sums)
        return sums

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """left [k, D] @ right [D, m] in wide precision, in `out` or in memory that the next product takes over: fresh
        memory for every block would cost the time to map it."""
        wide, size = self.inputs.wide, left.shape[0] * right.shape[1]
        if left.dtype != wide:
            found = left @ right
            return found.to(wide) if out is None else out.copy_(found)
        if out is not None:
            return torch.mm(left, right, out=out)
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None  # free it first
            self._buffer = left.new_empty(size)
        return torch.mm(left, right, out=self._buffer[:size].view(left.shape[0], right.shape[1]))

    def add(self, name: str, value: Tensor, index: slice | None = None) -> None:
        """Add to the sum of an input, or to a slice of its first dimension."""
        if name in self.needed:
            target = self.of(name)
            (target if index is None else target[index]).add_(value)

    def add_product(self, name: str, classes: slice, left: Tensor, right: Tensor) -> None:
        """Add left [k, m] @ right [m, D] to the rows of a weight that belong to `classes`."""
        if name not in self.needed:
            return
        if name not in self._sums:
            self._sums[name] = torch.empty_like(getattr(self.inputs, name), dtype=self.inputs.wide)
            self._written[name] = 0
        target = self._sums[name][classes]
        right = right.to(gradient_products(right.dtype))
        # The first block of examples writes, the others add: no pass over the weight to make it zero.
        first = classes.start >= self._written[name]
        self._written[name] = max(self._written[name], classes.stop)
        if left.dtype == right.dtype == target.dtype:
            torch.mm(left, right, out=target) if first else target.addmm_(left, right)
        else:
            found = left.to(right.dtype) @ right
            target.copy_(found) if first else target.add_(found)

    def finished(self, scale: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """One gradient for each of `GRADIENTS`, in the precision of its input; None where none is needed.

        A scale is taken in before the precision is narrowed: small gradients are why losses in float16 are scaled.
        """
        # `loss.backward()` scales by 1. On a CPU looking costs nothing, and saves a pass over all of the weight.
        if scale is not None and scale.device.type == "cpu" and scale.dim() == 0 and float(scale) == 1:
            scale = None
        found = []
        for name in GRADIENTS:
            value = self.of(name) if name in self.needed else None
            if value is not None and scale is not None:
                value = value.mul_(scale.to(value.dtype))
            found.append(None if value is None else value.to(getattr(self.inputs, name).dtype))
        return tuple(found)


def gradient_products(products: torch.dtype) -> torch.dtype:
    """The precision of products with gradients: float16 would lose the small ones, which no loss scale has reached."""
    return torch.float32 if products == torch.float16 else products
