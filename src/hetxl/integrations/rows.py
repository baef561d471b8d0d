"""A head on rows of numbers, and its training: what `HetXLClassifier` is made of, without scikit-learn."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hetxl.evaluation.scaling import Scales, fit_scales
from hetxl.functional import LabelLists
from hetxl.nn import FixedTemperature, Head

BLOCK = 4096
"""Rows that are evaluated or predicted at a time."""

Result = TypeVar("Result")


class Examples(NamedTuple):
    """Rows with what is known of them.

    Attributes:
        X: [n, D] array, or a sparse matrix whose rows can be chosen.
        targets: [n] class ids, or [n, K] numbers for the sigmoid link.
        weight: [n]
    """

    X: Any
    targets: np.ndarray
    weight: np.ndarray


class RowNetwork(nn.Module):
    """Rows [B, D] → the features of a head: standardised, then through hidden layers.

    Args:
        in_features: D
        hidden: sizes of the hidden layers, each with a ReLU; its last, or D without any, is the head's `in_features`.
        head: a head with a linear classifier of its own.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, in_features: int, hidden: Sequence[int], head: Head):
        super().__init__()
        self.register_buffer("mean", torch.zeros(in_features))
        self.register_buffer("scale", torch.ones(in_features))
        sizes = [in_features, *hidden]
        layers = (layer for pair in zip(sizes, hidden, strict=False) for layer in (nn.Linear(*pair), nn.ReLU()))
        self.body = nn.Sequential(*layers)
        self.head = head
        # Nothing is known at the start: equal probabilities, and no weight on what never varies.
        for parameter in head.classifier.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rows: Tensor) -> Tensor:
        """The features of rows [B, D]."""
        return self.body((rows - self.mean) / self.scale)


class RowTrainer:
    """A network with what its training carries along: the optimiser, AdamW, and the random numbers.

    The rows of a batch share their noise, [S, Q], drawn anew for every step; evaluations and predictions share one
    draw. So no result depends on where in a batch a row is, or on which others are there.

    Args:
        network: trained in place.
        weight_decay: on weights, and not on biases and τ.
        seed: of the order of the rows and of the noise.
    """

    def __init__(self, network: RowNetwork, *, weight_decay: float, seed: int):
        self.network = network
        parameters = list(network.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [one for one in parameters if one.dim() > 1], "weight_decay": weight_decay},
                {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
            ]
        )
        self.rng = np.random.default_rng(seed)
        self.noise_seed = self._new_seed()
        self._unscaled: tuple[Any, float] | None = None

    def epoch(self, examples: Examples, rows: np.ndarray, batch_size: int, rates: Iterable[float]) -> float:
        """Go once through some rows.

        Args:
            examples: those and others.
            rows: their numbers.
            batch_size: how many to take at most for a step; batches are of one size, give or take one row.
            rates: the learning rate of each step.

        Returns:
            The weighted mean of their losses, each before the step it led to.
        """
        steps = math.ceil(len(rows) / batch_size)
        # With one batch its order is of no account, and what is drawn must not depend on the number of rows: so weights
        # stand for repeated rows.
        order = self.rng.permutation(rows) if steps > 1 else rows
        total = 0.0
        self.network.train()
        for batch, rate in zip(np.array_split(order, steps), rates, strict=False):
            noise = self._normals(self.network.head.train_samples, self._new_seed())
            loss = self._loss(examples, batch, noise)
            self.optimizer.zero_grad()
            (loss / len(batch)).backward()
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            total += loss.item()
        return total / float(examples.weight[rows].sum())

    @torch.no_grad()
    def evaluate(self, examples: Examples, rows: np.ndarray) -> float:
        """The weighted mean loss of some rows, with the noise of predictions."""
        self.network.eval()
        noise = self._normals(self.network.head.eval_samples, self.noise_seed)
        blocks = np.array_split(rows, math.ceil(len(rows) / BLOCK))
        total = sum(self._loss(examples, block, noise).item() for block in blocks)
        return total / float(examples.weight[rows].sum())

    @torch.no_grad()
    def predict(self, X: Any, function: Callable[[Head, Tensor, Tensor | None], Result]) -> list[Result]:
        """What a function of head, features [B, D] and noise [S, Q] returns for each block of the rows of X [n, D]."""
        head = self.network.eval().head
        noise = self._normals(head.eval_samples, self.noise_seed)
        blocks = np.array_split(np.arange(X.shape[0]), math.ceil(X.shape[0] / BLOCK))
        return [function(head, self.network(self._rows(X, block)), noise) for block in blocks]

    def rescale(self, examples: Examples) -> Scales:
        """Give the head the τ and the scale of the noise that are best for some rows, all of one weight."""
        head, features = self.network.head, self.predict(examples.X, lambda head, features, noise: features)
        labels = torch.from_numpy(examples.targets).to(features[0].device)
        targets = LabelLists.from_sparse(labels.to_sparse()) if labels.dim() == 2 else labels
        found = fit_scales(head, features, targets, seed=self.noise_seed)
        self._unscaled = head.temperature, head.noise_scale
        head.temperature = FixedTemperature(found.temperature)
        head.noise_scale = found.noise
        return found

    def unscale(self) -> None:
        """Take that back."""
        if self._unscaled is not None:
            self.network.head.temperature, self.network.head.noise_scale = self._unscaled
            self._unscaled = None

    def _loss(self, examples: Examples, rows: np.ndarray, noise: Tensor | None) -> Tensor:
        """The sum of the weighted losses of some rows."""
        features = self.network(self._rows(examples.X, rows))
        targets = torch.from_numpy(examples.targets[rows]).to(features.device)
        weight = torch.from_numpy(examples.weight[rows]).to(features)
        return self.network.head(features, targets, weight=weight, reduction="sum", noise=noise)

    def _rows(self, X: Any, rows: np.ndarray) -> Tensor:
        """Some rows as a dense tensor, [B, D]."""
        chosen = X[rows]
        return torch.from_numpy(chosen.toarray() if hasattr(chosen, "toarray") else chosen).to(self.network.mean)

    def _normals(self, samples: int, seed: int) -> Tensor | None:
        """Standard normals [S, Q]; None for a head without noise."""
        head = self.network.head
        if head.covariance is None:
            return None
        generator, like = torch.Generator().manual_seed(seed), self.network.mean
        return head.covariance.draw(head.sampler, samples, generator=generator, device=like.device, dtype=like.dtype)

    def _new_seed(self) -> int:
        return int(self.rng.integers(2**63))
