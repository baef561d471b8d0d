"""Predictions and records of known probabilities, and a split in memory."""

import numpy as np
import torch
from torch import Tensor, nn

from hetxl import DetHead
from hetxl.functional import LabelLists
from hetxl.metrics import Records, RecordsBuilder
from hetxl.nn import Prediction
from hetxl_train.data.dataset import Fetched, Shown, Split, Unreadable
from hetxl_train.data.labels import Labels


def predict_logits(logits: Tensor, link: str = "softmax") -> Prediction:
    """What a head says whose logits are those given, [b, K]."""
    classes = logits.shape[-1]
    return DetHead(classes, classes, classifier=nn.Identity(), link=link).predict(logits)


def records_of(logits: Tensor, targets: Tensor | LabelLists, link: str = "softmax") -> Records:
    """The records of given logits [n, K]."""
    builder = RecordsBuilder(link)
    builder.add(predict_logits(logits, link), targets, np.arange(len(logits)))
    return builder.build()


def with_confidence(confidence, hit) -> Records:
    """Records of two classes with the confidences and hits given, [n] each."""
    confidence, hit = np.asarray(confidence, dtype=np.float64), np.asarray(hit, dtype=bool)
    n = len(hit)
    own = np.where(hit, confidence, 1 - confidence)
    with np.errstate(divide="ignore"):
        return Records(
            rows=np.arange(n),
            label=np.where(hit, 0, 1),
            log_prob=np.log(own),
            rank=np.where(hit, 0, 1),
            hit=hit,
            top_ids=np.tile([0, 1], (n, 1)),
            top_probs=np.stack((confidence, 1 - confidence), -1),
            squared=2 * (1 - own) ** 2,
            entropy=np.zeros(n),
            expected_entropy=np.zeros(n),
            logit_std=np.zeros(n),
        )


def same(first: Records, second: Records) -> bool:
    """Whether all columns are equal to the bit."""
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in Records.TYPES)


def assert_close(first: Records, second: Records) -> None:
    """Columns are equal; numbers of float32 computations up to rounding, which depends on the batch."""
    for name, kind in Records.TYPES.items():
        tolerance = 2e-6 if issubclass(kind, np.floating) else 0
        np.testing.assert_allclose(
            getattr(first, name), getattr(second, name), rtol=tolerance, atol=tolerance, err_msg=name
        )


class ArraySplit(Split):
    """Inputs in memory; rows in `broken` cannot be read."""

    def __init__(self, inputs, labels, offsets=None, broken=(), texts=None, images=None):
        self.inputs = np.asarray(inputs, dtype=np.float32)
        self.labels = Labels(np.asarray(labels, dtype=np.int64), offsets)
        self.broken, self.texts, self.images = set(broken), texts, images

    def fetch(self, rows, seeds=None) -> Fetched:
        assert seeds is None
        good = np.array([row for row in rows if row not in self.broken], dtype=np.int64)
        broken = [Unreadable(f"row {row}", "cannot be read") for row in rows if row in self.broken]
        return Fetched(torch.from_numpy(self.inputs[good]), good, broken)

    def show(self, row: int) -> Shown:
        text = None if self.texts is None else self.texts[row]
        return Shown(text, None if self.images is None else self.images[row])
