"""Audit labels: which of them are probably wrong, judged by predictions of models that were not trained on them.

A probability is the mean of the model's and, where features are given, of the frequency of the class among the labels
of the nearest rows (`hetxl.metrics.neighbours`). The two err differently: together they found more wrong labels than
either did in 12 settings of 12 (lab/docs/experiments.md).

A label is compared with the most probable other class. The score is the difference of two tempered probabilities,

    score = p(suggestion)^POWER − p(label)^POWER

which lies between the two scores in common use: power 1 is the margin, better where labels are mistaken for similar
classes, and power → 0 the log-ratio, which ranks as the label's own probability does, better where wrong labels are
random. A power of 1/4 was within 0.004 of the better one's average precision in 12 settings, and above both in three
(lab/docs/experiments.md).

Nothing of size N × K is kept: an audit has a few numbers for each label.
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
"""Classes of an example, at most, that are suggested as missing labels (sigmoid)."""


@dataclass(frozen=True)
class Audit:
    """Hold the scores of m labels.

    Softmax: one entry for each example. Sigmoid: one for each label of an example, which may be superfluous, and one
    for each of its most probable other classes, which may be missing.

    Attributes:
        rows: [m] int64, which rows of the data they are.
        label: [m] int64, the label; −1 where one may be missing.
        suggestion: [m] int64, the class that is more probable, or the most probable other class; −1 where the label may
            be superfluous.
        score: [m] in [−1, 1], above 0 where the suggestion is more probable than the label.
        label_prob: [m], probability of the label, by the model and the nearest rows; for a missing one, that the class
            does not apply.
        suggestion_prob: [m], probability of the suggestion; for a superfluous label, that it does not apply.
        noise_gain: [m], log p(label) with noise − log p(label) without: how much of the label the noise explains.
        correlation: [m], of the logits of label and suggestion; near −1 if they are confused with each other. 0 without
            noise, and for missing or superfluous labels.
        neighbours: [m], share of the nearest rows that have the suggestion as a label; for a superfluous label, that do
            not have it. NaN where there were no features to compare.
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
        """Return which labels have an alternative that is more probable, and as probable as where it is the label, [m].

        The suggested class must reach the mean probability of its own labels, the threshold of confident learning:
        where a model is unsure of a class everywhere, a lower probability of it says little about a label.
        """
        pairs = (self.label >= 0) & (self.suggestion >= 0)
        top = int(max(self.label.max(initial=0), self.suggestion.max(initial=0))) + 1
        counts = np.bincount(self.label[pairs], minlength=top)
        means = np.bincount(self.label[pairs], self.label_prob[pairs], minlength=top) / np.maximum(counts, 1)
        return (self.score > 0) & (~pairs | (self.suggestion_prob >= means[self.suggestion]))

    @property
    def suspects(self) -> int:
        """Return the number of suspects."""
        return int(self.is_suspect.sum())

    def take(self, which: np.ndarray) -> "Audit":
        """Return some labels, by index or by mask [m]."""
        return Audit(**{column.name: getattr(self, column.name)[which] for column in fields(self)})

    def ranked(self, limit: int | None = None) -> "Audit":
        """Return the labels, most suspicious first; of equals, the lower row."""
        order = np.lexsort((self.rows, -self.score))
        return self.take(order[:limit])

    @staticmethod
    def concatenate(parts: Sequence["Audit"]) -> "Audit":
        """Join the labels of all parts, such as the folds of a cross-fit, in the order of their rows."""
        if not parts:
            raise ValueError("parts must hold at least one Audit, got none")
        columns = {column.name: [getattr(part, column.name) for part in parts] for column in fields(Audit)}
        joined = Audit(**{name: np.concatenate(values) for name, values in columns.items()})
        return joined.take(np.argsort(joined.rows, kind="stable"))

    def class_errors(self, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each class its labels and those of them that are suspects, two arrays [K]."""
        has = self.label >= 0
        labels = np.bincount(self.label[has], minlength=num_classes)
        return labels, np.bincount(self.label[has & self.is_suspect], minlength=num_classes)

    def pair_errors(self, k: int = 20) -> list[tuple[int, int, int]]:
        """Return the k most frequent pairs among the suspects: label, suggestion and count."""
        integer_at_least("k", k, 1)
        suspect = self.is_suspect & (self.label >= 0) & (self.suggestion >= 0)
        pairs, counts = np.unique(np.stack((self.label, self.suggestion))[:, suspect], axis=1, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:k]
        return [(int(pairs[0, i]), int(pairs[1, i]), int(counts[i])) for i in order]


class AuditBuilder:
    """Gather an audit over batches of predictions, with the link of the head."""

    def __init__(self, link: Link | str = "softmax"):
        self.link: Link = one_of("link", link, LINKS)
        self._parts: list[Audit] = []

    @torch.no_grad()
    def add(
        self, prediction: Prediction, targets: Tensor | LabelLists, rows: np.ndarray, frequencies: Tensor | None = None
    ) -> None:
        """Add a batch that the model was not trained on.

        Args:
            prediction: `head.predict(features)` over all classes, [b, K].
            targets: class ids [b], −100 for examples to leave out; for the sigmoid link also lists of labels.
            rows: [b] int64, which rows of the data they are.
            frequencies: [b, K] of `Neighbours.label_frequencies`; None for the model alone.
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
        """Return the audit of all batches so far, in the order of their rows."""
        return Audit.concatenate(self._parts)


def audit(labels: Any, probs: Any, features: Any = None) -> Audit:
    """Audit labels [n] by out-of-sample probabilities [n, K] of any classifier, and by the labels of similar rows.

    For n × K numbers that do not fit into memory, add batches of predictions to an `AuditBuilder`.

    Args:
        labels: class ids [n]; −100 leaves a row out.
        probs: [n, K], each row from a model that was not trained on it, such as by cross-validation.
        features: [n, D] numbers by which rows are similar, such as embeddings; None for the probabilities alone.
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
    """Return log((p + frequency) / 2), [b, K]; the model's log p without frequencies."""
    if frequencies is None:
        return log_probs
    return torch.logaddexp(log_probs, frequencies.to(log_probs).log()) - math.log(2)


def _single(
    log_probs: Tensor, labels: LabelEntries, rows: np.ndarray, frequencies: Tensor | None = None,
    prediction: Prediction | None = None,
) -> Audit:  # fmt: skip
    """Audit one label for each example, [b, K]."""
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
    """Audit every label of an example and its most probable other classes, [b, K]."""
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
    """Return an audit from the log-probabilities of labels and suggestions [m], and what noise and neighbours say."""
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
