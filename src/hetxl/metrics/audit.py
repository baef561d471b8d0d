"""Audit labels: find those that are probably wrong, using predictions of models that were not trained on them.

A probability is the mean of the model's probability and, if there are features, the frequency of the class among the
labels of the nearest rows (`hetxl.metrics.neighbours`). Their errors differ: together they found more wrong labels
than either alone in all of 12 settings (lab/docs/experiments.md).

A label is compared with the most probable other class. The score is the difference of two tempered probabilities,

    score = p(suggestion)^POWER − p(label)^POWER

which lies between two common scores. Power 1 is the margin, which is better if labels are confused with similar
classes. Power → 0 is the log-ratio, which ranks like the label's probability and is better if wrong labels are random.
In 12 settings, the average precision with power 1/4 was within 0.004 of the better one, and above both in three
(lab/docs/experiments.md).

An audit stores a few numbers per label, nothing of size N × K.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl._checks import integer_at_least, one_of
from hetxl._seeds import some_rows
from hetxl.functional import IGNORE_INDEX, LabelLists, correlation
from hetxl.metrics.neighbours import MAX_ROWS, Neighbours
from hetxl.metrics.records import LabelEntries, NotFiniteError, label_entries, log_not
from hetxl.nn import Prediction
from hetxl.registry import LINKS, Link

POWER = 0.25
MISSING = 5
"""Maximum number of classes suggested as missing labels of an example (sigmoid)."""


@dataclass(frozen=True)
class Audit:
    """The scores of m labels.

    Softmax: one entry per example. Sigmoid: one entry per label of an example, which may be superfluous, and one per
    most probable other class, which may be missing.

    Attributes:
        rows: [m] int64, row of the data.
        label: [m] int64, the label; −1 if a label may be missing.
        suggestion: [m] int64, the most probable other class; −1 if the label may be superfluous.
        score: [m] in [−1, 1], positive if the suggestion is more probable than the label.
        label_prob: [m], probability of the label from the model and the nearest rows; for a missing label, the
            probability that the class does not apply.
        suggestion_prob: [m], probability of the suggestion; for a superfluous label, that it does not apply.
        noise_gain: [m], log p(label) with noise − log p(label) without, the part of the label that noise explains.
        correlation: [m], correlation of the logits of label and suggestion; near −1 if they are confused with each
            other. 0 without noise, and for missing or superfluous labels.
        neighbours: [m], share of the nearest rows that have the suggestion as a label; for a superfluous label, share
            that do not have the label. NaN without features.
    """

    rows: np.ndarray = field(metadata={"dtype": np.int64})
    label: np.ndarray = field(metadata={"dtype": np.int64})
    suggestion: np.ndarray = field(metadata={"dtype": np.int64})
    score: np.ndarray = field(metadata={"dtype": np.float64})
    label_prob: np.ndarray = field(metadata={"dtype": np.float64})
    suggestion_prob: np.ndarray = field(metadata={"dtype": np.float64})
    noise_gain: np.ndarray = field(metadata={"dtype": np.float64})
    correlation: np.ndarray = field(metadata={"dtype": np.float64})
    neighbours: np.ndarray = field(metadata={"dtype": np.float64})

    def __post_init__(self) -> None:
        for column in fields(self):
            values = np.asarray(getattr(self, column.name), dtype=column.metadata["dtype"])
            if values.shape != (len(self.rows),):
                raise ValueError(f"{column.name} must have shape [{len(self.rows)}] as rows has, got {values.shape}")
            object.__setattr__(self, column.name, values)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def is_suspect(self) -> np.ndarray:
        """Return a mask [m] of the labels that are probably wrong.

        The suggestion must be more probable than the label, and reach the mean probability of its class on its own
        labels, the threshold of confident learning, because a class that is uncertain everywhere says little about a
        label.
        """
        pairs = (self.label >= 0) & (self.suggestion >= 0)
        top = int(max(self.label.max(initial=0), self.suggestion.max(initial=0))) + 1
        counts = np.bincount(self.label[pairs], minlength=top)
        means = np.bincount(self.label[pairs], self.label_prob[pairs], minlength=top) / np.maximum(counts, 1)
        return (self.score > 0) & (~pairs | (self.suggestion_prob >= means[self.suggestion]))

    @property
    def suspects(self) -> int:
        """Return the number of suspect labels."""
        return int(self.is_suspect.sum())

    def take(self, which: np.ndarray) -> "Audit":
        """Select labels by index or by mask [m]."""
        return Audit(**{column.name: getattr(self, column.name)[which] for column in fields(self)})

    def ranked(self, limit: int | None = None) -> "Audit":
        """Return the labels, most suspicious first; ties are sorted by row."""
        order = np.lexsort((self.rows, -self.score))
        return self.take(order[:limit])

    @staticmethod
    def concatenate(parts: Sequence["Audit"]) -> "Audit":
        """Join the labels of all parts, such as the folds of a cross-fit, sorted by row."""
        if not parts:
            raise ValueError("parts must hold at least one Audit, got none")
        columns = {column.name: [getattr(part, column.name) for part in parts] for column in fields(Audit)}
        joined = Audit(**{name: np.concatenate(values) for name, values in columns.items()})
        return joined.take(np.argsort(joined.rows, kind="stable"))

    def class_errors(self, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of labels and of suspect labels of each class, two arrays [K]."""
        has = self.label >= 0
        labels = np.bincount(self.label[has], minlength=num_classes)
        return labels, np.bincount(self.label[has & self.is_suspect], minlength=num_classes)

    def pair_errors(self, k: int = 20) -> list[tuple[int, int, int]]:
        """Return the k most frequent pairs among the suspect labels: label, suggestion and count."""
        integer_at_least("k", k, 1)
        suspect = self.is_suspect & (self.label >= 0) & (self.suggestion >= 0)
        pairs, counts = np.unique(np.stack((self.label, self.suggestion))[:, suspect], axis=1, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:k]
        return [(int(pairs[0, i]), int(pairs[1, i]), int(counts[i])) for i in order]


class AuditBuilder:
    """Build an audit from batches of predictions, for the link of the head."""

    def __init__(self, link: Link | str = "softmax"):
        self.link: Link = one_of("link", link, LINKS)
        self._parts: list[Audit] = []

    @torch.no_grad()
    def add(
        self, prediction: Prediction, targets: Tensor | LabelLists, rows: np.ndarray, frequencies: Tensor | None = None
    ) -> None:
        """Add a batch of examples that the model was not trained on.

        Args:
            prediction: `head.predict(features)` over all classes, [b, K].
            targets: class ids [b], −100 for ignored examples; for the sigmoid link also lists of labels.
            rows: [b] int64, rows of the data.
            frequencies: [b, K], from `Neighbours.label_frequencies`; None to use only the model.
        """
        log_probs = prediction.log_probs
        if prediction.indices is not None or log_probs.dim() != 2:
            raise ValueError(f"prediction must be over all classes, [b, K], got {list(log_probs.shape)}; omit top_k")
        if torch.isnan(log_probs).any():
            raise NotFiniteError("prediction holds NaN: the features or the head's weights are not finite")
        labels = label_entries(targets, len(log_probs), log_probs.shape[1], self.link)
        part = _single if self.link == "softmax" else _several
        self._parts.append(part(log_probs, labels, np.asarray(rows), frequencies, prediction))

    def build(self) -> Audit:
        """Return the audit of all batches so far, sorted by row."""
        return Audit.concatenate(self._parts)


def audit(labels: Any, probs: Any, features: Any = None) -> Audit:
    """Audit labels [n] with out-of-sample probabilities [n, K] of any classifier and the labels of similar rows.

    If n × K numbers do not fit into memory, add batches of predictions to an `AuditBuilder`.

    Args:
        labels: class ids [n]; −100 ignores a row.
        probs: [n, K], each row from a model that was not trained on it, for instance by cross-validation.
        features: [n, D] numbers that measure similarity of rows, such as embeddings; None to use only probabilities.
    """
    log_probs = torch.as_tensor(np.asarray(probs)).double().log()
    ids = torch.as_tensor(np.asarray(labels))
    if log_probs.dim() != 2 or len(log_probs) != len(ids):
        raise ValueError(f"probs must have shape [{len(ids)}, K], a row for each label, got {list(log_probs.shape)}")
    if torch.isnan(log_probs).any():
        raise ValueError("probs must be numbers of at least 0, got NaN or negative ones")
    entries, rows = label_entries(ids, len(ids), log_probs.shape[1], "softmax"), np.arange(len(ids))
    frequencies = None
    if features is not None:
        vectors = torch.as_tensor(np.asarray(features)).float()
        if vectors.dim() != 2 or len(vectors) != len(ids):
            raise ValueError(f"features must have shape [{len(ids)}, D], got {list(vectors.shape)}")
        chosen = some_rows(rows, MAX_ROWS)
        known = Neighbours(vectors[chosen], ids[chosen], log_probs.shape[1], rows=chosen)
        frequencies = known.label_frequencies(vectors, rows)
    return _single(log_probs, entries, rows, frequencies)


def _mixed(log_probs: Tensor, frequencies: Tensor | None) -> Tensor:
    """Return log((p + frequency) / 2), [b, K], or log p without frequencies."""
    if frequencies is None:
        return log_probs
    return torch.logaddexp(log_probs, frequencies.to(log_probs).log()) - math.log(2)


def _single(
    log_probs: Tensor, labels: LabelEntries, rows: np.ndarray, frequencies: Tensor | None = None,
    prediction: Prediction | None = None,
) -> Audit:  # fmt: skip
    """Audit one label per example, [b, K]."""
    counted = (labels.ids != IGNORE_INDEX).numpy()
    ids = labels.ids.clamp(min=0).to(log_probs.device).unsqueeze(1)  # [b, 1]
    mixed = _mixed(log_probs, frequencies)
    other, suggestion = mixed.scatter(1, ids, -torch.inf).max(1, keepdim=True)
    gain, tied = torch.zeros_like(other), torch.zeros_like(other)
    if prediction is not None and prediction.logits.noise is not None:
        without = (prediction.logits.mean / prediction.temperature).log_softmax(-1)
        gain = (log_probs - without).gather(1, ids)
        matrix = correlation(prediction.logits.covariance(torch.cat((ids, suggestion), 1)))  # [b, 2, 2]
        tied = matrix[:, 0, 1].nan_to_num()
    near = None if frequencies is None else frequencies.gather(1, suggestion)
    return _scored(rows, ids, suggestion, mixed.gather(1, ids), other, gain, tied, near).take(counted)


def _several(
    log_probs: Tensor, labels: LabelEntries, rows: np.ndarray, frequencies: Tensor | None, prediction: Prediction
) -> Audit:
    """Audit every label of each example and its most probable other classes, [b, K]."""
    present = labels.values >= 0.5
    examples, classes = labels.examples[present], labels.classes[present]
    at = examples.to(log_probs.device), classes.to(log_probs.device)
    mixed, gain = _mixed(log_probs, frequencies), torch.zeros(len(classes))
    if prediction.logits.noise is not None:
        gain = log_probs[at] - F.logsigmoid(prediction.logits.mean[at] / prediction.temperature)
    own, none = mixed[at], torch.full_like(classes, -1)
    near = None if frequencies is None else 1 - frequencies[at]
    superfluous = _scored(rows[examples.numpy()], classes, none, own, log_not(own), gain, near=near)
    unlisted = mixed.index_put(at, mixed.new_tensor(-torch.inf))
    other, suggestion = unlisted.topk(min(MISSING, unlisted.shape[1]))  # [b, k]
    near = None if frequencies is None else frequencies.gather(1, suggestion)
    keep = other > -torch.inf
    other, suggestion, near = other[keep], suggestion[keep], None if near is None else near[keep]  # [m]
    missing = _scored(
        rows[keep.cpu().nonzero()[:, 0].numpy()], torch.full_like(suggestion, -1), suggestion, log_not(other), other,
        near=near,
    )  # fmt: skip
    return Audit.concatenate([superfluous, missing])


def _scored(
    rows: np.ndarray, label: Tensor, suggestion: Tensor, own: Tensor, other: Tensor,
    gain: Tensor | None = None, tied: Tensor | None = None, near: Tensor | None = None,
) -> Audit:  # fmt: skip
    """Return an audit from log-probabilities of labels and suggestions [m], and values from noise and neighbours."""
    log_own, log_other, noise_gain, pair = (
        np.zeros(len(rows)) if values is None else values.flatten().double().cpu().numpy()
        for values in (own, other, gain, tied)
    )
    return Audit(
        rows=rows,
        label=label.flatten().cpu().numpy(),
        suggestion=suggestion.flatten().cpu().numpy(),
        score=np.exp(POWER * log_other) - np.exp(POWER * log_own),
        label_prob=np.exp(log_own),
        suggestion_prob=np.exp(log_other),
        noise_gain=noise_gain,
        correlation=pair,
        neighbours=np.full(len(rows), np.nan) if near is None else near.flatten().double().cpu().numpy(),
    )
