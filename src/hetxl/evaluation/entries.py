"""Labels as entries: class ids and lists of labels in one form, which can be cut by examples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetxl.functional import IGNORE_INDEX, LabelLists, check_targets
from hetxl.functional.links import Link


@dataclass(frozen=True)
class LabelEntries:
    """The labels of b examples, each class of an example once.

    Attributes:
        ids: [b], the class of each example; −1 for lists, −100 for examples to leave out.
        examples: [m], which example an entry belongs to, in rising order.
        classes: [m], its class.
        values: [m] float64, in [0, 1].
    """

    ids: Tensor
    examples: Tensor
    classes: Tensor
    values: Tensor

    @property
    def sure(self) -> "LabelEntries":
        """Those that count as labels where only yes or no will do: of at least 0.5."""
        which = self.values >= 0.5
        return LabelEntries(self.ids, self.examples[which], self.classes[which], self.values[which])

    def of(self, start: int, stop: int) -> "LabelEntries":
        """Those of the examples from `start` up to `stop`, counted from 0."""
        borders = torch.tensor([start, stop], device=self.examples.device)
        first, last = torch.searchsorted(self.examples, borders).tolist()
        examples = self.examples[first:last] - start
        return LabelEntries(self.ids[start:stop], examples, self.classes[first:last], self.values[first:last])

    def to(self, device: torch.device) -> "LabelEntries":
        """On another device. The values stay where they are: not every device has double precision."""
        return LabelEntries(self.ids.to(device), self.examples.to(device), self.classes.to(device), self.values)


def label_entries(targets: Tensor | LabelLists, batch: int, num_classes: int, link: Link) -> LabelEntries:
    """Check targets and bring them to entries, on the CPU.

    Args:
        targets: class ids [b], −100 for examples to leave out; for the sigmoid link also lists of labels.
        batch: b
        num_classes: K
        link: "softmax" or "sigmoid"
    """
    checked = check_targets(targets, torch.Size([batch]), num_classes, link)
    if checked.ids is not None:
        ids = checked.ids.cpu()
        examples = (ids != IGNORE_INDEX).nonzero().flatten()
        return LabelEntries(ids, examples, ids[examples], torch.ones(len(examples), dtype=torch.float64))
    if checked.lists is None:
        raise TypeError(
            f"targets must be class ids [{batch}] or lists of labels, found one row for each example; "
            "use LabelLists.from_sparse(rows.to_sparse())"
        )
    lists = checked.lists
    key, place = torch.unique((lists.examples * num_classes + lists.classes).cpu(), return_inverse=True)
    given = torch.ones(len(place)) if lists.values is None else lists.values.cpu()
    # A class that is listed twice counts its values together, at most 1, as in `LabelLists.dense`.
    values = torch.zeros(len(key), dtype=torch.float64).index_add_(0, place, given.double()).clamp_(max=1)
    return LabelEntries(torch.full((batch,), -1), key // num_classes, key % num_classes, values)
