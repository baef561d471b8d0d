"""Records of evaluated examples: a few numbers per example instead of its K probabilities. All metrics are computed
from records, which are built from predictions over all classes, batch by batch."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._checks import one_of
from hetxl._tensors import read_tensors, write_tensors
from hetxl.functional import IGNORE_INDEX, LabelLists, check_targets
from hetxl.nn import Prediction
from hetxl.registry import LINKS, Link

TOP = 5
"""The number of most probable classes in a record."""

_FORMAT = "hetxl-records-2"
_UNCHECKED = "hetxl-records-1"
"""The previous format, without a checksum."""


@dataclass(frozen=True)
class Records:
    """The records of n evaluated examples.

    Attributes:
        rows: [n] int64, row of the split.
        label: [n] int64, label of the example; −1 if examples have several labels.
        log_prob: [n], log p̄ of the label; for the sigmoid link minus the binary cross-entropy summed over all labels.
        rank: [n] int32, number of classes ranked before the label, 0 for the most probable class; the best rank of
            several labels, and K but at least 5 without labels. Ties never favour the label: among the top classes the
            order is that of `top_ids`; below, the label is in the middle of the tied classes.
        hit: [n] bool, whether the most probable class is a label, the same as rank 0.
        top_ids: [n, min(5, K)] int64, the most probable classes, in descending order.
        top_probs: [n, min(5, K)] float32, their probabilities.
        squared: [n], Brier score Σ_k (p_k − y_k)².
        entropy: [n], entropy of the averaged probabilities, in nats.
        expected_entropy: [n], mean entropy of the single samples.
        logit_std: [n] float32, standard deviation of the most probable class's logit, before the temperature; 0 without
            noise.
    """

    rows: np.ndarray = field(metadata={"dtype": np.int64})
    label: np.ndarray = field(metadata={"dtype": np.int64})
    log_prob: np.ndarray = field(metadata={"dtype": np.float64})
    rank: np.ndarray = field(metadata={"dtype": np.int32})
    hit: np.ndarray = field(metadata={"dtype": np.bool_})
    top_ids: np.ndarray = field(metadata={"dtype": np.int64})
    top_probs: np.ndarray = field(metadata={"dtype": np.float32})
    squared: np.ndarray = field(metadata={"dtype": np.float64})
    entropy: np.ndarray = field(metadata={"dtype": np.float64})
    expected_entropy: np.ndarray = field(metadata={"dtype": np.float64})
    logit_std: np.ndarray = field(metadata={"dtype": np.float32})

    TYPES: ClassVar[dict[str, type]]

    def __post_init__(self) -> None:
        for name, kind in Records.TYPES.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        for name in Records.TYPES:
            shape = getattr(self, name).shape
            expected = (len(self), self.top_ids.shape[-1]) if name.startswith("top_") else (len(self),)
            if shape != expected:
                raise ValueError(f"{name} must have shape {list(expected)} as label has, found {list(shape)}")

    def __len__(self) -> int:
        return len(self.label)

    @property
    def confidence(self) -> np.ndarray:
        """Return the probability of the most probable class, [n] float64."""
        return self.top_probs[:, 0].astype(np.float64)

    def non_empty(self) -> "Records":
        """Return the records, or raise if there are none."""
        if not len(self):
            raise ValueError("records must hold at least one example, found none")
        return self

    def take(self, which: np.ndarray) -> "Records":
        """Select examples by index [m] or by mask [n]."""
        return Records(**{name: getattr(self, name)[which] for name in Records.TYPES})

    @staticmethod
    def empty(num_classes: int) -> "Records":
        """Return empty records for K classes."""
        columns = min(TOP, num_classes)
        shapes = {name: (0, columns) if name.startswith("top_") else (0,) for name in Records.TYPES}
        return Records(**{name: np.empty(shapes[name], dtype=kind) for name, kind in Records.TYPES.items()})

    @staticmethod
    def concatenate(parts: Sequence["Records"]) -> "Records":
        """Concatenate the examples of all parts."""
        if not parts:
            raise ValueError("parts must hold at least one Records, found none; use Records.empty(num_classes)")
        columns = sorted({part.top_ids.shape[1] for part in parts})
        if len(columns) > 1:
            raise ValueError(f"parts must be of the same classes, found Records with {columns} top classes")
        return Records(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Records.TYPES})

    def save(self, path: str | Path) -> None:
        """Write a safetensors file atomically, and create its directory if missing."""
        columns = {name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in Records.TYPES}
        write_tensors(Path(path), columns, {"format": _FORMAT})

    @staticmethod
    def load(path: str | Path) -> "Records":
        """Read a file written by `save`."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: records file does not exist")
        try:
            stored = read_tensors(Path(path))
        except ValueError as error:
            raise ValueError(f"{error}; evaluate again to rewrite it") from None
        kind = (stored.about if stored.checked else stored.metadata).get("format")
        if kind != (_FORMAT if stored.checked else _UNCHECKED):
            raise ValueError(f"{path}: not a records file, its format is {kind!r} instead of {_FORMAT!r}")
        if missing := [name for name in Records.TYPES if name not in stored.tensors]:
            raise ValueError(f"{path}: incomplete records file (no {', '.join(missing)}); evaluate again to rewrite it")
        return Records(**{name: stored.tensors[name].numpy() for name in Records.TYPES})


Records.TYPES = {column.name: column.metadata["dtype"] for column in fields(Records)}


_BLOCK = 2**22

MAX_BYTES = 64 * 2**20
"""Maximum bytes of probabilities in memory, [b, K] in float32."""


class NotFiniteError(FloatingPointError, ValueError):
    """Predictions are NaN because training has diverged or features are not finite."""


@dataclass(frozen=True)
class LabelEntries:
    """Labels of b examples as m flat entries, one per distinct class of an example."""

    ids: Tensor  # [b], class of each example; −1 for lists, −100 for ignored examples
    examples: Tensor  # [m], example of each entry, in ascending order
    classes: Tensor  # [m]
    values: Tensor  # [m] float64, in [0, 1]

    def of(self, start: int, stop: int) -> "LabelEntries":
        """Return the entries of the examples `start` to `stop`, renumbered from 0."""
        borders = torch.tensor([start, stop], device=self.examples.device)
        first, last = torch.searchsorted(self.examples, borders).tolist()
        examples = self.examples[first:last] - start
        return LabelEntries(self.ids[start:stop], examples, self.classes[first:last], self.values[first:last])

    def to(self, device: torch.device) -> "LabelEntries":
        """Move to another device, except the values, since some devices lack double precision."""
        return LabelEntries(self.ids.to(device), self.examples.to(device), self.classes.to(device), self.values)


def label_entries(targets: Tensor | LabelLists, batch: int, num_classes: int, link: Link) -> LabelEntries:
    """Check class ids [b] or lists of labels (sigmoid), and convert them to entries on the CPU."""
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
    key, index = torch.unique((lists.examples * num_classes + lists.classes).cpu(), return_inverse=True)
    listed = torch.ones(len(index)) if lists.values is None else lists.values.cpu()
    # The values of a class that is listed twice add up, to at most 1, as in `LabelLists.dense`.
    values = torch.zeros(len(key), dtype=torch.float64).index_add_(0, index, listed.double()).clamp_(max=1)
    return LabelEntries(torch.full((batch,), -1), key // num_classes, key % num_classes, values)


class RecordsBuilder:
    """Build records from batches, for the link of the head."""

    def __init__(self, link: Link | str = "softmax"):
        self.link: Link = one_of("link", link, LINKS)
        self._parts: list[Records] = []
        self._num_classes: int | None = None

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    @torch.no_grad()
    def add(self, prediction: Prediction, targets: Tensor | LabelLists, rows: np.ndarray) -> None:
        """Add a batch.

        Args:
            prediction: `head.predict(features)` over all classes, [b, K].
            targets: class ids [b], −100 for ignored examples; for the sigmoid link also lists of labels. Soft labels of
                at least 0.5 count as labels for ranks and hits.
            rows: [b] int64, row of the split.
        """
        log_probs = prediction.log_probs
        if prediction.indices is not None or log_probs.dim() != 2:
            shape = f"{list(log_probs.shape)}" + (", with top_k" if prediction.indices is not None else "")
            raise ValueError(f"prediction must be over all classes of a batch, [b, K], found {shape}; leave out top_k")
        batch, num_classes = log_probs.shape
        if len(rows) != batch:
            raise ValueError(f"rows must name the {batch} rows of the prediction, found {len(rows)}")
        if self._num_classes not in (None, num_classes):
            raise ValueError(f"prediction has {num_classes} classes, those before had {self._num_classes}")
        self._num_classes = num_classes
        if not batch:
            return
        labels = label_entries(targets, batch, num_classes, self.link)
        # In blocks, because comparing and squaring copy the probabilities.
        step = max(1, _BLOCK // num_classes)
        parts = [
            _measure(log_probs[first:last], prediction.probs[first:last], labels.of(first, last), self.link)
            for first, last in zip(range(0, batch, step), range(step, batch + step, step), strict=True)
        ]
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
        """Return the records of all batches so far."""
        if self._num_classes is None:
            raise ValueError("no batch was added; add predictions before build()")
        # Merge the parts once, for the next call.
        self._parts = [Records.concatenate([Records.empty(self._num_classes), *self._parts])]
        return self._parts[0]


def _measure(log_probs: Tensor, probs: Tensor, labels: LabelEntries, link: Link) -> dict[str, Tensor]:
    """Return the columns that need all classes, for examples [b, K], on the CPU."""
    batch, num_classes = log_probs.shape
    k = min(TOP, num_classes)
    top, top_ids = log_probs.topk(k)
    examples, classes = labels.examples.to(probs.device), labels.classes.to(probs.device)
    own = log_probs[examples, classes]  # [m]

    def summed(entries: Tensor) -> Tensor:
        """Sum entries [m] by example, [b]."""
        return torch.zeros(batch, dtype=torch.float64).index_add_(0, labels.examples, entries)

    if link == "sigmoid":
        log_not_p = log_not(log_probs)
        log_odds = _double(own) - _double(log_not_p[examples, classes])
        log_prob = _double(log_not_p.sum(-1)) + summed(labels.values * log_odds)
    else:
        log_prob = summed(_double(own))
    own_probs = _double(probs[examples, classes])
    squared = _double(probs.square().sum(-1)) + summed(labels.values * (labels.values - 2 * own_probs))

    # Entries of at least 0.5 count as labels for ranks and hits.
    sure = (labels.values >= 0.5).to(probs.device)
    examples, classes = examples[sure], classes[sure]
    # The best label of each example, −inf without labels.
    best = log_probs.new_full((batch,), -torch.inf).scatter_reduce_(0, examples, own[sure], "amax").unsqueeze(-1)
    # int32: the sum of booleans is slow in int64.
    before = (log_probs > best).sum(-1, dtype=torch.int32)
    ties = (log_probs == best).sum(-1, dtype=torch.int32)
    has = torch.zeros(batch, dtype=torch.bool, device=probs.device).index_fill_(0, examples, True)
    rank = torch.where(has, (before + (ties - 1).clamp(min=0) // 2).clamp(min=k), max(num_classes, TOP))
    offset = torch.arange(batch, device=probs.device).unsqueeze(-1) * num_classes
    among = torch.isin(top_ids + offset, examples * num_classes + classes)  # [b, k]
    rank = torch.where(among.any(-1), among.int().argmax(-1).int(), rank)
    return {
        "log_prob": log_prob,
        "rank": rank.cpu(),
        "hit": among[:, 0].cpu(),
        "top_ids": top_ids.cpu(),
        "top_probs": top.exp().cpu(),
        "squared": squared.clamp(min=0),
    }


def log_not(log_probs: Tensor) -> Tensor:
    """Return log(1 − p) from log p; if p rounds to 1, 1 − p is half the spacing of numbers near 1."""
    nearest = -torch.finfo(log_probs.dtype).eps / 2
    return log_probs.clamp(max=nearest).expm1().neg_().log_()


def _double(values: Tensor) -> Tensor:
    """Return values in double precision on the CPU, since some devices lack it."""
    return values.cpu().double()


@contextmanager
def evaluating(*parts: object) -> Iterator[None]:
    """Put modules in evaluation mode, and restore the mode of each submodule afterwards."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    before = [(module, module.training) for module in itertools.chain(*(part.modules() for part in modules))]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, training in before:
            module.training = training
