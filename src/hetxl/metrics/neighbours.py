"""Label frequencies among the nearest labelled rows, which judge a label without a model."""

import numpy as np
import torch
from torch import Tensor

from hetxl._checks import integer_at_least, one_of
from hetxl.functional import LabelLists
from hetxl.metrics.records import MAX_BYTES, label_entries
from hetxl.registry import LINKS, Link

FEWEST, MOST = 5, 25
"""Bounds of the default number of neighbours, the mean number of rows per class."""
MAX_ROWS = 2**16
"""Maximum number of rows to search for neighbours, because the time grows with both numbers of rows."""


class Neighbours:
    """Labelled rows to search for neighbours.

    Distances are Euclidean, between features standardised to mean 0 and variance 1 on these rows.

    Args:
        features: [m, D]
        targets: class ids [m], −100 for rows without a label; for the sigmoid link also lists of labels.
        num_classes: K
        link: link of the head.
        rows: [m] int64, row of the data; None for 0, 1, ….
        k: number of neighbours; None for the mean number of rows per class, between 5 and 25.
    """

    def __init__(
        self, features: Tensor, targets: Tensor | LabelLists, num_classes: int, *, link: Link | str = "softmax",
        rows: np.ndarray | None = None, k: int | None = None,
    ):  # fmt: skip
        if features.dim() != 2 or not len(features):
            raise ValueError(f"features must have shape [m, D] with m at least 1, got {list(features.shape)}")
        if not torch.isfinite(features).all():
            raise ValueError("features must be finite, got NaN or infinity")
        one_of("link", link, LINKS)
        labels = label_entries(targets, len(features), num_classes, "softmax" if link == "softmax" else "sigmoid")
        present = labels.values >= 0.5
        classes = max(1, len(labels.classes[present].unique()))
        default = min(max(len(features) // classes, FEWEST), MOST)
        self.k = default if k is None else integer_at_least("k", k, 1)
        self.num_classes, device = num_classes, features.device
        self._classes = labels.classes[present].to(device)  # labels of all rows, concatenated
        self._lengths = torch.bincount(labels.examples[present], minlength=len(features)).to(device)
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._rows = torch.arange(len(features)) if rows is None else torch.as_tensor(np.asarray(rows))
        self._rows = self._rows.to(device)
        self._mean, self._scale = features.mean(0), features.std(0, correction=0)
        self._scale[self._scale == 0] = 1.0
        self._points = self._standard(features)
        self._squares = self._points.square().sum(1)
        if link == "softmax":  # rows without a label are not informative; with several labels per row, an empty list is
            self._squares[self._lengths == 0] = torch.inf

    def label_frequencies(self, features: Tensor, rows: np.ndarray | None = None) -> Tensor:
        """Return the share of the k nearest rows with each class as a label, [b, K].

            nearest = torch.cdist(standard(features), points).topk(k, largest=False).indices
            frequencies = F.one_hot(labels[nearest], K).mean(1)

        Args:
            features: [b, D]
            rows: [b] int64, row of the data, so that a row is not its own neighbour; None for new rows.
        """
        own = None if rows is None else torch.as_tensor(np.asarray(rows)).to(self._rows.device)
        parts, size = [], max(1, MAX_BYTES // (4 * max(len(self._points), self.num_classes)))
        for start in range(0, len(features), size):
            some = slice(start, start + size)
            parts.append(self._frequencies(features[some], None if own is None else own[some]))
        return torch.cat(parts) if parts else features.new_zeros(0, self.num_classes)

    def _standard(self, features: Tensor) -> Tensor:
        return (features - self._mean) / self._scale

    def _frequencies(self, features: Tensor, own: Tensor | None) -> Tensor:
        # ‖x − r‖² without ‖x‖², which is equal for all r.
        distances = torch.addmm(self._squares, self._standard(features), self._points.T, alpha=-2.0)  # [b, m]
        if own is not None:
            distances.masked_fill_(own.unsqueeze(1) == self._rows, torch.inf)
        values, nearest = distances.topk(min(self.k, distances.shape[1]), largest=False)  # [b, k]
        usable = values < torch.inf
        lengths = torch.where(usable, self._lengths[nearest], 0).flatten()
        neighbour = torch.repeat_interleave(lengths)  # index of an entry's neighbour among the b · k
        within = torch.arange(len(neighbour), device=lengths.device) - (lengths.cumsum(0) - lengths)[neighbour]
        classes = self._classes[self._starts[nearest.flatten()[neighbour]] + within]
        counts = torch.zeros(len(features), self.num_classes, device=features.device)
        counts.index_put_((neighbour // nearest.shape[1], classes), counts.new_ones(()), accumulate=True)
        return counts / usable.sum(1, keepdim=True).clamp(min=1)
