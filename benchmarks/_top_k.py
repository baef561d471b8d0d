"""`predict(top_k=…)` against the full prediction, on a head that was trained on confusable labels."""

from typing import NamedTuple

import torch
from _meter import Meter, Sizes
from torch import Tensor

import hetxl

TOP_K = 5
TRAIN_BATCH, TRAIN_SAMPLES = 32, 16
TWIN_SHARE = 0.3
TWIN_DISTANCE = 0.3
"""Of a class from the centre of its pair, as a share of that of two pairs."""
FIRST_LOGIT = 40.0
"""What the right class has before training: enough to stand out of some thousands at the first temperature."""


class TopK(NamedTuple):
    """How the two compare.

    Attributes:
        pruned: seconds of the prediction of the top classes.
        full: seconds of the prediction of all classes.
        total_variation: largest over the examples, see `total_variation`.
        accuracy: of the full prediction; how well the head was trained.
    """

    pruned: float
    full: float
    total_variation: float
    accuracy: float


class Problem:
    """Classes in pairs of near twins; features are the class centre with noise, and 3 labels in 10 are the twin's."""

    def __init__(self, classes: int, features: int):
        pairs = torch.randn(classes // 2, features).repeat_interleave(2, dim=0)
        self.centres = pairs + TWIN_DISTANCE * torch.randn(classes, features)  # [K, D]

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features [count, D], and [count] labels and true classes."""
        classes = torch.randint(len(self.centres), (count,))
        features = self.centres[classes] + 0.5 * torch.randn(count, self.centres.shape[1])
        labels = torch.where(torch.rand(count) < TWIN_SHARE, classes ^ 1, classes)
        return features, labels, classes


def train(problem: Problem, sizes: Sizes) -> hetxl.HetXLHead:
    """A head after a few hundred steps; its classifier starts from the centres, as one that was converted would."""
    # Noise as large as the authors start it: a small one would leave nothing to prune around.
    head = hetxl.HetXLHead(sizes.top_k_features, sizes.top_k_classes, noise_init=1.0)
    with torch.no_grad():
        head.get_parameter("classifier.weight").copy_(problem.centres * (FIRST_LOGIT / sizes.top_k_features))
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
    for _ in range(sizes.top_k_steps):
        features, labels, _ = problem.draw(TRAIN_BATCH)
        loss = head.loss(features, labels, num_samples=TRAIN_SAMPLES)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return head.eval()


def total_variation(top: Tensor, indices: Tensor, full: Tensor) -> Tensor:
    """Between two predictions of which one knows only its top classes: all others count as one more class.

    Args:
        top: [B, k] probabilities.
        indices: [B, k] their classes.
        full: [B, K] probabilities.

    Returns:
        [B]
    """
    difference = top - full.gather(-1, indices)
    return (difference.abs().sum(-1) + difference.sum(-1).abs()) / 2


def compare_top_k(meter: Meter) -> TopK:
    """Train a head, then time both predictions and compare them on the same draws."""
    sizes = meter.sizes
    torch.manual_seed(0)
    problem = Problem(sizes.top_k_classes, sizes.top_k_features)
    meter.say("training the head")
    head = train(problem, sizes)
    features, _, classes = problem.draw(sizes.top_k_batch)

    def predict(top_k: int | None) -> hetxl.nn.Prediction:
        generator = torch.Generator().manual_seed(0)
        return head.predict(features, top_k=top_k, num_samples=sizes.S, generator=generator)

    meter.say("predicting")
    pruned, full = meter.time(
        {"pruned": lambda: predict(TOP_K), "full": lambda: predict(None)}, sizes.least, sizes.limit
    )
    top, everything = predict(TOP_K), predict(None)
    assert top.indices is not None
    variation = total_variation(top.probs, top.indices, everything.probs)
    accuracy = (everything.labels == classes).float().mean()
    return TopK(pruned, full, float(variation.max()), float(accuracy))
