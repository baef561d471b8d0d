"""Labels of the sigmoid link for a block of examples and classes, made when the block comes."""

import torch
from torch import Tensor

from hetxl.functional.targets import Targets
from hetxl.functional.weighting import known_ids


class LabelBlocks:
    """Blocks [k, n] of a label matrix [B, K] that is given dense, as one class id for each example, or as lists.

    Args:
        targets: of the flattened batch.
        like: a tensor of the precision and device of the blocks.
    """

    def __init__(self, targets: Targets, like: Tensor):
        self.dense = None
        self.like = like
        if targets.dense is not None:
            self.dense = targets.dense.reshape(-1, targets.dense.shape[-1])
        elif targets.ids is not None:
            self.classes = known_ids(targets.ids).flatten()
            self.examples = torch.arange(len(self.classes), device=like.device)
            self.values = torch.ones(len(self.classes), dtype=like.dtype, device=like.device)
        else:
            assert targets.lists is not None
            lists = targets.lists
            self.classes, self.examples = lists.classes.to(like.device), lists.examples.to(like.device)
            values = torch.ones(len(self.classes)) if lists.values is None else lists.values
            self.values = values.to(dtype=like.dtype, device=like.device)

    def block(self, examples: slice, classes: slice) -> Tensor:
        """The labels of some examples for some classes, [k, n]."""
        if self.dense is not None:
            return self.dense[examples, classes].T.to(self.like.dtype)
        count, size = classes.stop - classes.start, examples.stop - examples.start
        row, column = self.classes - classes.start, self.examples - examples.start
        hit = (row >= 0) & (row < count) & (column >= 0) & (column < size)
        out = self.like.new_zeros(count * size)
        # Entries of other blocks add 0 at place 0: no look at the data, no wait for a device.
        out.index_add_(0, torch.where(hit, row * size + column, 0), torch.where(hit, self.values, 0.0))
        return out.clamp_(max=1).view(count, size)
