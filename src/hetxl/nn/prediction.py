"""What `head.predict` returns."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from hetxl.functional import LogitDistribution, correlation

TOP_CLASSES = 5  # how many classes `covariance` and `correlation` cover when the prediction is for all classes


@dataclass(frozen=True, repr=False)
class Prediction:
    """Averaged probabilities for a batch [...], and where their uncertainty comes from.

    With `top_k` the last dimension of `probs`, `log_probs` and `logit_variance` runs over the k most probable classes,
    most probable first, and `indices` holds their ids; without it, over all K.

    Attributes:
        probs: [..., K] or [..., k]
        log_probs: like `probs`, finite where a probability underflows.
        indices: [..., k] class ids, or None for a prediction over all classes.
        entropy: [...] of the averaged probabilities, in nats; for the sigmoid link summed over the labels.
        expected_entropy: [...] mean entropy of the single samples.
        left_out: [...] with `top_k`, the estimated probability of classes that were not sampled by themselves, which
            `probs` accounts for (sigmoid: the largest probability of any of them); None when all were.
        temperature: τ
        logits: the Gaussian over the logits, before the temperature. `logit_variance`, `covariance` and `correlation`
            are computed from it when first read, from the head's weights as they are then.
        method: how it was predicted.
        num_samples: S, or None for a method without samples.
        distance: [...] to the features of the training rows, by the density of the head; None where it has none.
    """

    probs: Tensor
    log_probs: Tensor
    indices: Tensor | None
    entropy: Tensor
    expected_entropy: Tensor
    left_out: Tensor | None
    temperature: Tensor | float
    logits: LogitDistribution = field(repr=False)
    method: str
    num_samples: int | None
    distance: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The probabilities: with `indices` the pair that torch.topk returns."""
        return self.probs

    @property
    def top_class(self) -> Tensor:
        """The most probable class of each example, [...]."""
        return self.classes[..., 0]

    @property
    def labels(self) -> Tensor:
        """`top_class`, by its name until 0.2: a label is what an example was given, not what is predicted."""
        warnings.warn("Prediction.labels is renamed to top_class", DeprecationWarning, stacklevel=2)
        return self.top_class

    @cached_property
    def classes(self) -> Tensor:
        """The top classes, [..., k] ids, most probable first (at most 5 of them for a prediction over all classes)."""
        if self.indices is not None:
            return self.indices
        return self.probs.topk(min(TOP_CLASSES, self.probs.shape[-1])).indices

    @property
    def mutual_information(self) -> Tensor:
        """The part of the entropy that the noise explains, [...]: entropy − expected_entropy."""
        return self.entropy - self.expected_entropy

    @property
    def novelty(self) -> Tensor:
        """How unlike the training data each example is, [...]: the larger, the less alike.

        With `head.density` the distance to the nearest class mean; otherwise the entropy that noise does not explain,
        `expected_entropy`, which finds less (lab/docs/experiments.md). Values of different heads do not compare.
        """
        return self.expected_entropy if self.distance is None else self.distance

    @cached_property
    def logit_variance(self) -> Tensor:
        """Variance of the logits before the temperature, like `probs`."""
        with torch.no_grad():
            if self.indices is None:
                return self.logits.variance
            return self.covariance.diagonal(dim1=-2, dim2=-1)

    @cached_property
    def covariance(self) -> Tensor:
        """Covariance of the logits among the top `classes`, [..., k, k]."""
        with torch.no_grad():
            return self.logits.covariance(self.classes)

    @cached_property
    def correlation(self) -> Tensor:
        """Correlation of the logits among the top `classes`, [..., k, k]: which of them move together.

        Near +1, two classes rise and fall together and only their mean logits tell them apart; near −1, the noise
        trades one for the other: the model takes the example for either.
        """
        return correlation(self.covariance)

    def describe(self, example: int = 0, names: Sequence[str] | None = None, top: int = 3) -> str:
        """One example in one line: its top classes, its entropy, and its most correlated pair of top classes.

        Args:
            example: which one, counted through the flattened batch.
            names: class names; ids without.
            top: how many classes to show.
        """
        classes = self.classes.reshape(-1, self.classes.shape[-1])[example]
        log_probs = self.log_probs.reshape(-1, self.log_probs.shape[-1])[example]
        shown = log_probs if self.indices is not None else log_probs[classes]

        def name(rank: int) -> str:
            return str(int(classes[rank])) if names is None else names[int(classes[rank])]

        ranks = range(min(top, len(classes)))
        parts = [", ".join(f"{name(rank)} {float(shown[rank].exp()):.1%}" for rank in ranks)]
        entropy = float(self.entropy.reshape(-1)[example])
        from_noise = float(self.mutual_information.reshape(-1)[example])
        parts.append(f"entropy {entropy:.2f} nats" + (f", {from_noise:.2f} from noise" if self.num_samples else ""))
        if len(ranks) > 1 and self.logits.noise is not None:
            matrix = self.correlation.reshape(-1, *self.correlation.shape[-2:])[example][: len(ranks), : len(ranks)]
            strongest = int(matrix.abs().triu(1).argmax())
            first, second = divmod(strongest, len(ranks))
            parts.append(f"{name(first)} ~ {name(second)} correlation {float(matrix[first, second]):+.2f}")
        return " | ".join(parts)

    def __repr__(self) -> str:
        examples = self.entropy.numel()
        how = self.method if self.num_samples is None else f"{self.method}, {self.num_samples} samples"
        what = f"{examples} example{'' if examples == 1 else 's'}, {how}"
        return f"Prediction({what}{': ' + self.describe() if examples else ''}{'; …' if examples > 1 else ''})"
