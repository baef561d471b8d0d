"""The result of `head.predict`."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from hetxl.functional import LogitDistribution, correlation

TOP_CLASSES = 5  # number of classes in `covariance` and `correlation` of a prediction over all classes


@dataclass(frozen=True, repr=False)
class Prediction:
    """Averaged probabilities of a batch [...] and their uncertainty.

    The last dimension of `probs`, `log_probs` and `logit_variance` covers all K classes, or with `top_k` the k most
    probable ones in descending order, with their ids in `indices`.

    Attributes:
        probs: [..., K] or [..., k]
        log_probs: like `probs`, finite where a probability underflows.
        indices: [..., k] class ids, or None for a prediction over all classes. With `classes`, those in their order.
        entropy: [...] entropy of the averaged probabilities, in nats; for the sigmoid link summed over the labels.
        expected_entropy: [...] mean entropy of the single samples.
        left_out: [...] with `top_k`, the estimated total probability of the classes that were not sampled one by one,
            which `probs` takes into account (sigmoid: the largest probability of any of them); None if every class was
            sampled.
        temperature: τ
        logits: the Gaussian over the logits, before the temperature. `logit_variance`, `covariance` and `correlation`
            are computed from it when first read, with the weights that the head has then.
        method: method of `predict`.
        num_samples: S, or None for a method without samples.
        distance: [...] distance to the features of the training rows, by the density of the head; None without a
            density.
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
        """Return the probabilities, so that `values` and `indices` match the result of torch.topk."""
        return self.probs

    @property
    def top_class(self) -> Tensor:
        """Return the most probable class of each example, [...]; with `classes`, of those."""
        if self.indices is None:
            return self.classes[..., 0]
        return self.indices.gather(-1, self.probs.argmax(-1, keepdim=True)).squeeze(-1)

    @property
    def labels(self) -> Tensor:
        """Return `top_class`; its name until 0.2, deprecated because a label is part of the data, not a prediction."""
        warnings.warn("Prediction.labels is renamed to top_class", DeprecationWarning, stacklevel=2)
        return self.top_class

    @cached_property
    def classes(self) -> Tensor:
        """Return the ids of the top classes, [..., k], most probable first; k ≤ 5 for a prediction over all classes."""
        if self.indices is not None:
            return self.indices
        return self.probs.topk(min(TOP_CLASSES, self.probs.shape[-1])).indices

    @property
    def mutual_information(self) -> Tensor:
        """Return the part of the entropy that the noise explains, [...]: entropy − expected_entropy."""
        return self.entropy - self.expected_entropy

    @property
    def novelty(self) -> Tensor:
        """Return how far each example is from the training data, [...]; larger means further.

        With `head.density` this is the distance to the nearest class mean; otherwise `expected_entropy`, the entropy
        that noise does not explain, which detects less (lab/docs/experiments.md). Do not compare values of different
        heads."""
        return self.expected_entropy if self.distance is None else self.distance

    @cached_property
    def logit_variance(self) -> Tensor:
        """Compute the variance of the logits before the temperature, shaped like `probs`."""
        with torch.no_grad():
            if self.indices is None:
                return self.logits.variance
            return self.covariance.diagonal(dim1=-2, dim2=-1)

    @cached_property
    def covariance(self) -> Tensor:
        """Compute the covariance of the logits among the top `classes`, [..., k, k]."""
        with torch.no_grad():
            return self.logits.covariance(self.classes)

    @cached_property
    def correlation(self) -> Tensor:
        """Compute the correlation of the logits among the top `classes`, [..., k, k].

        Near +1, the noise raises and lowers two classes together, and only their mean logits separate them. Near −1, it
        raises one and lowers the other: the model is undecided between the two.
        """
        return correlation(self.covariance)

    def describe(self, example: int = 0, names: Sequence[str] | None = None, top: int = 3) -> str:
        """Describe one example in one line: its top classes, its entropy, and its most correlated pair of top classes.

        Args:
            example: index into the flattened batch.
            names: class names [default: ids].
            top: number of classes to show.
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
