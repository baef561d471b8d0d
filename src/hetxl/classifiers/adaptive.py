"""Adaptive softmax: frequent classes directly, rare classes in clusters that are computed only when needed."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetxl.functional import Affine, LogitDistribution, Summary, Targets, Weights, log_mean_exp, mc_log_normalisers
from hetxl.functional.engine.plan import DEFAULT_BUDGET
from hetxl.functional.engine.predict import joined
from hetxl.functional.targets import known_ids, reduce_losses
from hetxl.nn.classifier import Classifier, GetLogits, NoisyFeatures

COPIES = 4  # number of tensors of all sampled logits in memory during a prediction


class AdaptiveClassifier(Classifier):
    """p(k) = p(k) in the head, or p(cluster) · p(k in the cluster), computed with torch's adaptive log-softmax.

    All layers are linear, so noise passes through them as through W: the loss averages the product of both softmaxes,
    with logits divided by τ, over the samples. It computes the frequent classes for every example, and a cluster only
    for examples with a label in it. Predictions compute all classes.

    Args:
        in_features: D
        num_classes: K
        cutoffs: first class of each cluster, ascending: [1000, 10000] has 1,000 classes in the head and two clusters.
        counts: [K], frequencies of the classes, which sort them. None if class ids are already sorted by frequency.
        div_value: factor by which each further cluster has fewer features.

    >>> AdaptiveClassifier(64, 1000, cutoffs=[100, 300])(torch.randn(8, 64)).shape
    torch.Size([8, 1000])
    """

    linear = False
    complete = False
    places: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        cutoffs: Sequence[int],
        *,
        counts: Tensor | None = None,
        div_value: float = 4.0,
        head_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, num_classes)
        cuts = list(cutoffs)
        if not cuts or cuts != sorted(set(cuts)) or cuts[0] < 1 or cuts[-1] >= num_classes:
            raise ValueError(f"cutoffs must rise within 1 to {num_classes - 1}, found {cuts}")
        if in_features // div_value ** len(cuts) < 1:
            raise ValueError(
                f"div_value={div_value:g} leaves no features for the last of {len(cuts)} clusters, from {in_features}; "
                "use a smaller div_value or fewer cutoffs"
            )
        if counts is not None and counts.shape != (num_classes,):
            raise ValueError(f"counts must have shape {[num_classes]}, found {list(counts.shape)}")
        self.engine = nn.AdaptiveLogSoftmaxWithLoss(
            in_features, num_classes, cuts, div_value, head_bias, device=device, dtype=dtype
        )
        self._order = None if counts is None else counts.cpu().argsort(descending=True, stable=True)
        self.register_buffer("places", self._places().to(next(self.parameters()).device))

    def _places(self) -> Tensor:
        """Return the position of each class by frequency, [K]."""
        places = torch.arange(self.num_classes)
        if self._order is not None:
            places[self._order] = torch.arange(self.num_classes)
        return places

    def reset_parameters(self) -> None:
        """Initialise the parameters again, for instance after `to_empty`."""
        self.engine.reset_parameters()
        with torch.no_grad():
            self.places.copy_(self._places())

    def forward(self, features: Tensor) -> Tensor:
        """Compute log-probabilities [..., K] of features [..., D], which are valid logits."""
        return self._log_probs_at(features, 1.0)

    def logits_of(self, features: Tensor, classes: Tensor) -> Tensor:
        """Compute log-probabilities [..., k] of classes [..., k] from those of all classes."""
        return self.forward(features).gather(-1, classes)

    def distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """Return an opaque distribution with logits τ log p, which are the log-probabilities at τ when divided by τ."""
        logits = GetLogits(functools.partial(self._logits_at, temperature=noisy.temperature), self.num_classes)
        return LogitDistribution(noisy.features, logits, noisy.noise, None)

    def _logits_at(self, features: Tensor, temperature: Tensor | float) -> Tensor:
        """Compute τ log p(k), [..., K]."""
        return temperature * self._log_probs_at(features, temperature)

    def _log_probs_at(self, features: Tensor, temperature: Tensor | float) -> Tensor:
        """Compute log p(k) [..., K] with all logits divided by τ."""
        engine, first = self.engine, self.engine.cutoffs[0]
        head = (engine.head(features) / temperature).log_softmax(-1)
        parts = [head[..., :first]]
        for number, tail in enumerate(engine.tail):
            inside = (tail(features) / temperature).log_softmax(-1)
            parts.append(inside + head[..., first + number, None])
        return torch.cat(parts, -1).index_select(-1, self.places)

    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return −log mean_s p_s(y) without a tensor of all classes."""
        _softmax_only(noisy)
        if targets.ids is None or weights.smoothing:
            return super().nll(noisy, targets, reduction, weights)
        places, flat = self.places[known_ids(targets.ids)].flatten(), noisy.flat()
        log_p = self._log_p(flat, places)  # [B, S]
        losses = -log_mean_exp(log_p, dim=-1).view(targets.ids.shape)
        # In the dtype of the losses: half precision counts examples only up to 256.
        factor, normaliser = weights.factors(targets, targets.ids.shape, noisy.link, losses)
        return reduce_losses(losses, factor, normaliser, reduction)

    def _log_p(self, noisy: NoisyFeatures, places: Tensor) -> Tensor:
        """Compute log p_s(y), [B, S], for the positions [B] of the labels."""
        first, options = self.engine.cutoffs[0], noisy.evaluation_options()
        head = Affine(self.engine.head.weight, self.engine.head.bias)
        starts = torch.tensor(self.engine.cutoffs[:-1], device=places.device)
        cluster = torch.searchsorted(starts, places, right=True) - 1  # −1 for the head
        column = torch.where(cluster < 0, places, first + cluster)
        bias = None if head.bias is None else head.bias[column]
        log_p = noisy.logits_at(head.weight[column], bias) / noisy.temperature
        log_p = log_p - mc_log_normalisers(noisy.through(head), noisy.z, **options)
        tails: Any = self.engine.tail
        for number, tail in enumerate(tails):
            # Also without examples, because DistributedDataParallel needs a gradient of every parameter in every step.
            inside = (cluster == number).nonzero().squeeze(-1)
            few = noisy.of_examples(inside).projected(tail[0].weight)
            rows = tail[1].weight[places[inside] - self.engine.cutoffs[number]]
            within = few.logits_at(rows, None) / noisy.temperature
            within = within - mc_log_normalisers(few.through(Affine(tail[1].weight)), few.z, **options)
            log_p = log_p.index_add(0, inside, within)
        return log_p

    def predict(self, noisy: NoisyFeatures, method: str, top_k: int | None, tolerance: float) -> Summary:
        """Predict over all classes, in batches that fit the memory budget."""
        _softmax_only(noisy)
        flat, shape = noisy.flat(), noisy.features.shape[:-1]
        samples = 1 if flat.z is None else flat.z.shape[1]
        if method not in ("mc", "deterministic") and flat.noise is not None:
            samples = 1 + flat.noise.size  # these methods lift the basis of the noise to all classes
        each = COPIES * flat.features.element_size() * samples * self.num_classes
        size = max(1, (noisy.memory_budget or DEFAULT_BUDGET) // each)
        chunks = [flat.of_examples(slice(start, start + size)) for start in range(0, max(len(flat.features), 1), size)]
        return joined([Classifier.predict(self, chunk, method, top_k, tolerance) for chunk in chunks], shape)

    def log_probs(self, noisy: NoisyFeatures) -> Tensor:
        """Return averaged log-probabilities [..., K]."""
        _softmax_only(noisy)
        return super().log_probs(noisy)


def _softmax_only(noisy: NoisyFeatures) -> None:
    if noisy.link == "sigmoid":
        raise ValueError('AdaptiveClassifier is for link="softmax": its clusters share one probability')
