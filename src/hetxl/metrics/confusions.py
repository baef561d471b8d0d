"""Find pairs of classes that are confused with each other, by correlated noise and by wrong predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl._checks import integer_at_least
from hetxl.functional import IGNORE_INDEX, LabelLists, correlation
from hetxl.nn import Prediction

MAX_PAIRS = 200_000
"""Maximum number of pairs in memory. The smallest pairs beyond it are dropped, and restart from 0 if they recur."""

_PENDING = 2**18
_IDS = 2**31


@dataclass(frozen=True)
class Confusions:
    """The contribution of a batch to the counts of pairs, m entries."""

    keys: np.ndarray  # [m] int64, first · 2³¹ + second, first < second
    sums: np.ndarray  # [m, 4]: examples, correlation × weight, weight, confusions
    labels: np.ndarray  # [e] int64, labels of wrong predictions
    noise: bool  # whether there are correlations


class ConfusionCounter:
    """Count pairs of classes over batches.

    Two classes occur together in an example if both are among its top classes. Their correlation is averaged with
    weights p_i·p_j, so that examples that could be either class count most. They are confused if one is the label and
    the other the most probable class.

    Memory is bounded: after at most 262,144 new entries the counts are merged, and beyond `max_pairs` pairs those with
    the smallest weight + number of confusions are dropped. A dropped pair restarts from 0 if it recurs, so counts of
    rare pairs are then lower bounds; counts of frequent pairs are exact.

    Args:
        top: number of top classes of an example to pair.
    """

    def __init__(self, top: int = 5, max_pairs: int = MAX_PAIRS):
        self.top = integer_at_least("top", top, 2)
        self.max_pairs = integer_at_least("max_pairs", max_pairs, 1)
        self.has_noise = False
        self._keys = np.empty(0, dtype=np.int64)  # first · 2³¹ + second, first < second, rising
        self._sums = np.empty((0, 4))  # examples, correlation × weight, weight, confusions
        self._errors = np.empty(0, dtype=np.int64)  # wrong predictions by the class of the label
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting = 0

    @torch.no_grad()
    def add(self, prediction: Prediction, targets: Tensor | LabelLists) -> None:
        """Add a batch.

        Args:
            prediction: a prediction over all classes, [b, K], or with top_k.
            targets: see `measure`.
        """
        self.put(self.measure(prediction, targets))

    def put(self, batch: Confusions) -> None:
        """Add a batch measured by `measure`, possibly in another process."""
        self.has_noise |= batch.noise
        highest = batch.labels.max(initial=-1)
        if highest >= len(self._errors):
            # Twice the needed size, so that it seldom grows.
            self._errors = np.pad(self._errors, (0, 2 * (highest + 1) - len(self._errors)))
        np.add.at(self._errors, batch.labels, 1)
        self._pending.append((batch.keys, batch.sums))
        self._waiting += len(batch.keys)
        if self._waiting > _PENDING:
            self._join()

    @torch.no_grad()
    def measure(self, prediction: Prediction, targets: Tensor | LabelLists) -> Confusions:
        """Return the contribution of a batch to the counts, for `put`.

        Args:
            prediction: a prediction over all classes, [b, K], or with top_k.
            targets: class ids [b], −100 for ignored examples; or lists of labels. If the most probable class of an
                example is not one of its labels, it counts as a confusion with each label.
        """
        if prediction.log_probs.dim() != 2:
            raise ValueError(f"prediction must be of one batch, [b, K], found {list(prediction.log_probs.shape)}")
        batch, labelled = len(prediction.log_probs), targets.batch if isinstance(targets, LabelLists) else len(targets)
        if labelled != batch:
            raise ValueError(f"targets must be of the {batch} examples of the prediction, found {labelled}")
        k = min(self.top, prediction.log_probs.shape[-1])
        if prediction.indices is None:
            log_probs, classes = prediction.log_probs.topk(k)
        else:
            log_probs, classes = prediction.log_probs[..., :k], prediction.indices[..., :k]
        met, confused = self._meet(prediction, classes, log_probs.exp()), _confuse(classes[:, 0].cpu(), targets)
        keys, sums = (np.concatenate(parts) for parts in zip(met, _entries(*confused), strict=True))
        return Confusions(keys, sums, confused[0], prediction.logits.noise is not None and len(met[0]) > 0)

    def pairs(self, k: int = 20, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the top k pairs by weight × |correlation|, then by the number of confusions.

        Args:
            names: names of the K classes [default: ids].

        Returns:
            A dict for each pair: "first", "second" (names, lower id first), "correlation" (weighted mean; None without
            noise), "weight" (sum of p_i·p_j), "examples" (number with both among the top classes), "confused" (number
            with one as label and the other as prediction) and "confused_share" (share of these among the wrong
            predictions for the two labels; None without wrong predictions).
        """
        integer_at_least("k", k, 1)
        self._join()
        if names is not None and len(self._keys) and len(names) <= (highest := int((self._keys % _IDS).max())):
            raise ValueError(f"names must be of all classes, found {len(names)} names and the class id {highest}")
        examples, tied, weight, confused = self._sums.T
        order = np.lexsort((self._keys, -weight, -confused, -np.abs(tied)))
        rows = []
        for index in order[:k]:
            first, second = (int(value) for value in divmod(self._keys[index], _IDS))
            errors = sum(int(self._errors[label]) for label in (first, second) if label < len(self._errors))
            known = self.has_noise and weight[index] > 0
            rows.append(
                {
                    "first": str(first) if names is None else names[first],
                    "second": str(second) if names is None else names[second],
                    "correlation": float(tied[index] / weight[index]) if known else None,
                    "weight": float(weight[index]),
                    "examples": int(examples[index]),
                    "confused": int(confused[index]),
                    "confused_share": float(confused[index] / errors) if errors else None,
                }
            )
        return rows

    @staticmethod
    def _meet(prediction: Prediction, classes: Tensor, probs: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return entries for every pair of the top classes [b, k] of each example."""
        left, right = np.triu_indices(classes.shape[-1], 1)
        ids, p = classes.cpu().numpy(), probs.double().cpu().numpy()
        weight = p[:, left] * p[:, right]
        tied = np.zeros_like(weight)
        if prediction.logits.noise is not None and len(left):
            matrix = correlation(prediction.logits.covariance(classes)).double().cpu().numpy()
            tied = matrix[:, left, right] * weight
        ones = np.ones_like(weight)
        return _entries(ids[:, left], ids[:, right], np.stack((ones, tied, weight, ones * 0), -1))

    def _join(self) -> None:
        """Merge pending entries into the counts, and drop the smallest pairs beyond the limit."""
        keys = np.concatenate([self._keys, *(keys for keys, _ in self._pending)])
        sums = np.concatenate([self._sums, *(sums for _, sums in self._pending)])
        self._keys, index = np.unique(keys, return_inverse=True)
        self._sums = np.stack([np.bincount(index, column, len(self._keys)) for column in sums.T], -1)
        self._pending, self._waiting = [], 0
        if len(self._keys) > self.max_pairs:
            worth = self._sums[:, 2] + self._sums[:, 3]
            largest = np.sort(np.argsort(-worth, kind="stable")[: self.max_pairs])
            self._keys, self._sums = self._keys[largest], self._sums[largest]


def _confuse(predicted: Tensor, targets: Tensor | LabelLists) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels of wrong predictions and the predicted classes, [e] each."""
    if isinstance(targets, LabelLists):
        sure = slice(None) if targets.values is None else targets.values >= 0.5
        examples, labels = targets.examples[sure].cpu(), targets.classes[sure].cpu()
    else:
        targets = targets.cpu().long()
        examples = (targets != IGNORE_INDEX).nonzero().flatten()
        labels = targets[examples]
    right = torch.zeros(len(predicted), dtype=torch.bool)
    right[examples[labels == predicted[examples]]] = True
    wrong = ~right[examples]
    return labels[wrong].numpy(), predicted[examples[wrong]].numpy()


def _entries(first: np.ndarray, second: np.ndarray, sums: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of pairs, [m], and their contributions to the sums, [m, 4] [default: one confusion]."""
    keys = np.minimum(first, second) * _IDS + np.maximum(first, second)
    sums = np.broadcast_to([0.0, 0.0, 0.0, 1.0], (keys.size, 4)) if sums is None else sums
    return keys.reshape(-1), sums.reshape(-1, 4)
