"""From predictions over all classes to records, one batch after the other."""

import numpy as np
import torch
from torch import Tensor

from hetxl.evaluation.entries import LabelEntries, label_entries
from hetxl.evaluation.records import TOP, Records
from hetxl.functional import IGNORE_INDEX, LabelLists
from hetxl.functional._checks import one_of
from hetxl.functional.links import LINKS, Link
from hetxl.nn import Prediction

_BLOCK = 2**22


class NotFiniteError(FloatingPointError, ValueError):
    """Predictions that are not numbers: training has diverged, or features are none."""


class RecordsBuilder:
    """Gathers records over batches.

    Args:
        link: the head's: "softmax" for one label among K, "sigmoid" for any number of labels.
    """

    def __init__(self, link: Link | str = "softmax"):
        one_of("link", link, LINKS)
        self.link: Link = "softmax" if link == "softmax" else "sigmoid"
        self._parts: list[Records] = []
        self._num_classes: int | None = None

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    @torch.no_grad()
    def add(self, prediction: Prediction, targets: Tensor | LabelLists, rows: np.ndarray) -> None:
        """Add a batch.

        Args:
            prediction: `head.predict(features)` over all classes, [b, K].
            targets: class ids [b], −100 for examples to leave out; for the sigmoid link also lists of labels. Of soft
                labels, those of at least 0.5 count as labels for ranks and hits.
            rows: [b] int64, which rows of the split they are.
        """
        log_probs = prediction.log_probs
        if prediction.indices is not None or log_probs.dim() != 2:
            found = f"{list(log_probs.shape)}" + (", with top_k" if prediction.indices is not None else "")
            raise ValueError(f"prediction must be over all classes of a batch, [b, K], found {found}; leave out top_k")
        batch, num_classes = log_probs.shape
        if len(rows) != batch:
            raise ValueError(f"rows must name the {batch} rows of the prediction, found {len(rows)}")
        if self._num_classes not in (None, num_classes):
            raise ValueError(f"prediction has {num_classes} classes, those before had {self._num_classes}")
        self._num_classes = num_classes
        if not batch:
            return
        labels = label_entries(targets, batch, num_classes, self.link)
        parts = []
        # A few examples at a time: comparing and squaring make copies of the probabilities.
        step = max(1, _BLOCK // num_classes)
        for start in range(0, batch, step):
            stop = min(start + step, batch)
            parts.append(
                _measure(log_probs[start:stop], prediction.probs[start:stop], labels.of(start, stop), self.link)
            )
        measured = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
        wrong = np.isnan(measured["log_prob"]) | np.isnan(measured["top_probs"]).any(-1)
        if wrong.any():
            raise NotFiniteError(
                f"prediction holds NaN for row {int(np.asarray(rows)[wrong][0])}: "
                "the features or the head's weights are not finite"
            )
        top = torch.from_numpy(measured["top_ids"][:, :1]).to(log_probs.device)
        variance = prediction.logits.covariance(top).reshape(batch)
        records = Records(
            rows=np.asarray(rows),
            label=labels.ids.numpy(),
            entropy=prediction.entropy.cpu().numpy(),
            expected_entropy=prediction.expected_entropy.cpu().numpy(),
            logit_std=variance.sqrt().cpu().numpy(),
            **measured,
        )
        counted = records.label != IGNORE_INDEX
        self._parts.append(records if counted.all() else records.take(counted))

    def build(self) -> Records:
        """The records of all batches so far."""
        if self._num_classes is None:
            raise ValueError("no batch was added; add predictions before build()")
        # Joined once: the next call starts from one part.
        self._parts = [Records.concatenate([Records.empty(self._num_classes), *self._parts])]
        return self._parts[0]


def _measure(log_probs: Tensor, probs: Tensor, labels: LabelEntries, link: Link) -> dict[str, Tensor]:
    """The columns of some examples [b, K] that need all their classes; on the CPU."""
    batch, num_classes = log_probs.shape
    k = min(TOP, num_classes)
    top, top_ids = log_probs.topk(k)
    examples, classes = labels.examples.to(probs.device), labels.classes.to(probs.device)
    own = log_probs[examples, classes]  # [m]

    def summed(entries: Tensor) -> Tensor:
        """Entries [m] summed by example, [b]."""
        return torch.zeros(batch, dtype=torch.float64).index_add_(0, labels.examples, entries)

    if link == "softmax":
        log_prob = summed(_double(own))
    else:
        # log(1 − p) from log p. Where p rounds to 1, 1 − p is taken as half the spacing of numbers there.
        nearest = -torch.finfo(log_probs.dtype).eps / 2
        log_not_p = log_probs.clamp(max=nearest).expm1().neg_().log_()
        log_odds = _double(own) - _double(log_not_p[examples, classes])
        log_prob = _double(log_not_p.sum(-1)) + summed(labels.values * log_odds)
    own_probs = _double(probs[examples, classes])
    squared = _double(probs.square().sum(-1)) + summed(labels.values * (labels.values - 2 * own_probs))

    sure = labels.sure.to(probs.device)
    # The best label of each example, −inf without.
    values = log_probs[sure.examples, sure.classes]
    best = log_probs.new_full((batch,), -torch.inf).scatter_reduce_(0, sure.examples, values, "amax").unsqueeze(-1)
    # int32: the sum of booleans is slow in int64.
    before = (log_probs > best).sum(-1, dtype=torch.int32)
    ties = (log_probs == best).sum(-1, dtype=torch.int32)
    has = torch.zeros(batch, dtype=torch.bool, device=probs.device).index_fill_(0, sure.examples, True)
    rank = torch.where(has, (before + (ties - 1).clamp(min=0) // 2).clamp(min=k), max(num_classes, TOP))
    offset = torch.arange(batch, device=probs.device).unsqueeze(-1) * num_classes
    among = torch.isin(top_ids + offset, sure.examples * num_classes + sure.classes)  # [b, k]
    rank = torch.where(among.any(-1), among.int().argmax(-1).int(), rank)
    return {
        "log_prob": log_prob,
        "rank": rank.cpu(),
        "hit": among[:, 0].cpu(),
        "top_ids": top_ids.cpu(),
        "top_probs": top.exp().cpu(),
        "squared": squared.clamp(min=0),
    }


def _double(values: Tensor) -> Tensor:
    """On the CPU: not every device has double precision."""
    return values.cpu().double()
