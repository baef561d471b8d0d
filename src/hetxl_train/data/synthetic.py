"""Data drawn from a HET-XL model with known parameters, so that the lowest possible loss is known too.

    x ~ N(0, I),   ε ~ N(0, Σ(x)),   y ~ softmax(W (x + ε) + b)

A model without noise in its logits cannot match it; a HET-XL head can.
"""

import copy
import math

import numpy as np
import torch
from torch import Tensor

from hetxl._checks import integer_at_least, positive_float
from hetxl.functional import sobol
from hetxl.nn import HetXLHead
from hetxl_train.console import progress_bar
from hetxl_train.data.dataset import SPLITS, Dataset, Fetched, InputSpec, Split
from hetxl_train.data.labels import Labels

LOGIT_SCALE = 8.0
"""Standard deviation of the mean logits over inputs. With the default noise, the best loss among 100 classes is about
2.2 nats and that of a linear classifier about 2.6: most of the loss comes from the noise."""

RESIDUAL_SCALE = 0.16
"""Standard deviation of the residual at x = 0 with noise 1: small, so that the noise is mostly that of the factors."""

LABELS_PER_ROW = 3  # the approximate number of labels of a multi-label row, for any number of classes
SHARES = (0.9, 0.05, 0.05)
EVALUATED_ROWS = 10_000
EVALUATED_SAMPLES = 1024  # at most, for the lowest loss. It is then exact to about 0.003 nats, given the test labels
EFFORT = 2**30  # approximate rows × samples × classes above which the lowest loss uses fewer rows and samples
_STREAMS = {"features": 1, "noise": 2, "labels": 3, "evaluation": 4, "parameters": 5}


class FeatureSplit(Split):
    """Rows of a matrix in memory: features [n, D] float32."""

    def __init__(self, features: Tensor, labels: Labels):
        self.features, self.labels = features, labels

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows: inputs [b, D] float32."""
        rows = np.asarray(rows, dtype=np.int64)
        return Fetched(self.features[torch.from_numpy(rows)], rows)


def load_synthetic(
    *,
    features: int = 16,
    classes: int = 100,
    rank: int = 4,
    noise: float = 1.0,
    rows: int = 200_000,
    seed: int = 0,
    multi_label: bool = False,
) -> Dataset:
    """Draw features and labels from `true_head`, 90 % for training and 5 % each for validation and test.

    `best_nll` of the result is the test loss of `true_head`; other models can be better only by chance.

    Args:
        noise: the strength of the noise, relative to that of the features.
        rows: the number of rows of all splits together.
        multi_label: whether each class is a separate label, drawn from the sigmoid of its logit; the logits of a row
            share one noise sample.
    """
    integer_at_least("rows", rows, 20)
    head = true_head(features=features, classes=classes, rank=rank, noise=noise, seed=seed, multi_label=multi_label)
    inputs = torch.from_numpy(_stream(seed, "features").standard_normal((rows, features), dtype=np.float32))
    labels = draw_labels(head, inputs, seed=seed)
    stops = [round(rows * share) for share in np.cumsum(SHARES)]
    splits: dict[str, Split] = {}
    for name, start, stop in zip(SPLITS, [0, *stops], stops, strict=False):
        splits[name] = FeatureSplit(inputs[start:stop], labels.subset(np.arange(start, stop)))
    count, samples = _effort(len(splits["test"]), classes, multi_label)
    return Dataset(
        name="synthetic",
        input=InputSpec("features", (features,)),
        class_names=[str(number) for number in range(classes)],
        splits=splits,
        best_nll=true_nll(head, splits["test"], rows=count, samples=samples, seed=seed),
        notes=(
            f"drawn from a HET-XL model of rank {rank} with noise {noise:g}; seed {seed}",
            f"best_nll: the loss of that model on {count:,} test rows, averaged over {samples:,} samples",
        ),
    )


def true_head(
    *,
    features: int = 16,
    classes: int = 100,
    rank: int = 4,
    noise: float = 1.0,
    seed: int = 0,
    multi_label: bool = False,
) -> HetXLHead:
    """Return the model that `load_synthetic` draws its labels from, given the same arguments; in evaluation mode."""
    integer_at_least("features", features, 1)
    integer_at_least("classes", classes, 2)
    integer_at_least("rank", rank, 1)
    integer_at_least("seed", seed, 0)
    noise = positive_float("noise", noise)
    rng = _stream(seed, "parameters")

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * scale)

    with torch.random.fork_rng(devices=[]):  # a new head draws parameters; leave the caller's generator alone
        head = HetXLHead(
            features,
            classes,
            rank=rank,
            temperature=1.0,
            link="sigmoid" if multi_label else "softmax",
            sampler="sobol",  # the most exact for the few normals of a low rank
            eval_samples=EVALUATED_SAMPLES,
        )
    unit, spread = 1 / math.sqrt(features), RESIDUAL_SCALE * noise
    raw_spread = spread + math.log(-math.expm1(-spread))  # the inverse of softplus, log(eᵛ − 1), without overflow
    values = {
        "classifier.weight": normal(classes, features, scale=LOGIT_SCALE * unit),
        "classifier.bias": torch.zeros(classes),
        "covariance.factor": normal(rank, features, scale=noise / math.sqrt(rank)),
        "covariance.scale.weight": normal(features, features, scale=unit),
        "covariance.scale.bias": torch.zeros(features),
        "covariance.residual.weight": normal(features, features, scale=unit),
        "covariance.residual.bias": torch.full((features,), raw_spread),
    }
    head.load_state_dict(head.state_dict() | values)
    head.eval().requires_grad_(False)
    if multi_label:
        trial = torch.from_numpy(rng.standard_normal((max(16, 2**22 // classes), features)))
        logits = _draw_logits(copy.deepcopy(head).double(), trial, rng)
        # The same for all classes, and such that the right share of the logits, about, is above zero.
        bias = -float(np.quantile(logits.numpy(), 1 - min(0.5, LABELS_PER_ROW / classes)))
        head.load_state_dict(head.state_dict() | {"classifier.bias": torch.full((classes,), bias)})
    return head


@torch.no_grad()
def draw_labels(head: HetXLHead, features: Tensor, *, seed: int = 0) -> Labels:
    """Draw labels of features [n, D] from a head: for every row one draw of the noise, then labels by its logits."""
    # In double precision, rounding that differs between machines practically never decides a label.
    exact = copy.deepcopy(head).double()
    noise, choice = _stream(seed, "noise"), _stream(seed, "labels")
    ids, counts = [], []
    for block in features.split(max(1, 2**21 // head.num_classes)):
        logits = _draw_logits(exact, block.double(), noise)  # [b, K]
        if head.link == "sigmoid":
            drawn = torch.from_numpy(choice.random(logits.shape)) < logits.sigmoid()
            ids.append(drawn.nonzero()[:, 1].numpy())
            counts.append(drawn.sum(-1).numpy())
        else:
            cumulated = logits.softmax(-1).cumsum(-1)
            level = torch.from_numpy(choice.random((len(block), 1))) * cumulated[:, -1:]
            ids.append(torch.searchsorted(cumulated, level).squeeze(-1).numpy())
    if head.link == "sigmoid":
        return Labels(np.concatenate(ids), np.concatenate(([0], np.cumsum(np.concatenate(counts)))))
    return Labels(np.concatenate(ids))


@torch.no_grad()
def true_nll(head: HetXLHead, split: Split, *, rows: int, samples: int, seed: int = 0) -> float:
    """Return the mean loss of a head on the first rows of a split, with S samples drawn by the seed."""
    assert head.covariance is not None
    generator = torch.Generator().manual_seed(int(_stream(seed, "evaluation").integers(2**62)))
    size = head.covariance.size  # Q
    block = max(1, min(1024, 2**23 // (samples * size)))
    total = 0.0
    with progress_bar("Loss of the true model", rows) as advance:
        for start in range(0, rows, block):
            which = np.arange(start, min(start + block, rows))
            # One net for the block, rotated at random for each row: as exact as a net for each, and quicker to draw.
            net = sobol(1, samples, size, generator=generator)  # [1, S, Q]
            turns = torch.linalg.qr(torch.randn(len(which), size, size, generator=generator)).Q
            inputs, targets = split.fetch(which).inputs, split.labels.take(which)
            total += float(head.loss(inputs, targets, "none", noise=net @ turns).double().sum())
            advance(len(which))
    return total / rows


def _effort(rows: int, classes: int, multi_label: bool) -> tuple[int, int]:
    """Return the number of test rows and of samples for the lowest loss."""
    # The sigmoid's averages converge sooner, and each sample costs twice as much.
    most, effort = (EVALUATED_SAMPLES // 2, EFFORT // 2) if multi_label else (EVALUATED_SAMPLES, EFFORT)
    count = min(rows, EVALUATED_ROWS, max(EVALUATED_ROWS // 5, effort // (most * classes)))
    return count, min(most, max(EVALUATED_SAMPLES // 4, effort // (count * classes)))


def _draw_logits(head: HetXLHead, features: Tensor, rng: np.random.Generator) -> Tensor:
    """Draw logits with one draw of the noise for each row, [b, K], in double precision."""
    assert head.covariance is not None
    z = torch.from_numpy(rng.standard_normal((len(features), 1, head.covariance.size)))
    return head.logit_distribution(features).sample(z).squeeze(-2)


def _stream(seed: int, use: str) -> np.random.Generator:
    """Return random numbers for one use, independent of the others: more rows do not change the parameters."""
    return np.random.default_rng([seed, _STREAMS[use]])
