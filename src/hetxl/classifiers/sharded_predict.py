"""Predictions where each process has some of the classes: normalisers travel, and the best classes of each process."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetxl.classifiers.collectives import Ranks, gather_from_ranks, log_sum_exp_over_ranks
from hetxl.classifiers.sharded_labels import local_ids
from hetxl.functional import Affine, LogitDistribution, Summary, mc_log_probs, mc_predict, softmax_entropy
from hetxl.functional.engine.evaluate import Evaluation
from hetxl.functional.engine.inputs import Inputs, gather_inputs
from hetxl.functional.engine.plan import DEFAULT_BUDGET
from hetxl.functional.engine.predict import joined
from hetxl.functional.engine.setup import plan_for, product_precision
from hetxl.functional.engine.softmax import NEVER
from hetxl.nn.noisy import NoisyFeatures

LARGEST = 1024
"""Examples of one exchange, at most."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The classes of this process, and the others that have the rest.

    Attributes:
        ranks: the processes.
        affine: W and b of the classes here.
        classes: which those are.
        num_classes: K, of all processes.
    """

    ranks: Ranks
    affine: Affine
    classes: range
    num_classes: int

    @property
    def width(self) -> int:
        """The most classes that any process has."""
        return -(-self.num_classes // self.ranks.size)

    def rows(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """W at class ids [...], [..., D], with zeros for those that are elsewhere; and which are here, [...]."""
        own = local_ids(classes, self.classes)
        here = own >= 0
        if not len(self.classes):
            return self.affine.weight.new_zeros(*classes.shape, self.affine.weight.shape[-1]), here
        return torch.where(here.unsqueeze(-1), self.affine.weight[own.clamp(min=0)], 0.0), here


@torch.no_grad()
def gathered_log_probs(shard: Shard, noisy: NoisyFeatures) -> Tensor:
    """Averaged log-probabilities [..., K] of all processes' classes (sigmoid: logits of the mean probabilities)."""
    if noisy.link == "softmax":
        return gathered_summary(shard, noisy, "mc", None).log_probs
    shape = noisy.features.shape[:-1]
    if len(shard.classes):
        local = mc_log_probs(noisy.through(shard.affine), noisy.z, link=noisy.link, **noisy.evaluation_options())
    else:
        local = _empty(noisy.features, *shape, 0)
    return gather_from_ranks(shard.ranks, local, shard.num_classes)


@torch.no_grad()
def gathered_summary(shard: Shard, noisy: NoisyFeatures, method: str, top_k: int | None) -> Summary:
    """A prediction over the classes of all processes, the same on each of them.

    Args:
        shard: the classes here.
        noisy: features with noise and normals, the same everywhere.
        method: "mc" or "deterministic"
        top_k: only the k most probable classes; None gathers all K.
    """
    shape = noisy.features.shape[:-1]
    if noisy.link == "sigmoid":
        return _sigmoid_summary(shard, noisy, method, top_k)
    distribution, z = noisy.through(shard.affine), noisy.z
    if method == "deterministic" or noisy.noise is None:
        distribution, z = distribution.without_noise(), None
    inputs = gather_inputs(distribution, z, noisy.temperature)
    budget = noisy.memory_budget or DEFAULT_BUDGET
    # From numbers that are the same everywhere, so that all processes exchange equally often.
    size = max(1, min(inputs.batch, LARGEST, budget // (32 * shard.width)))
    starts = range(0, max(inputs.batch, 1), size)
    parts = [_softmax_chunk(shard, inputs.of_examples(slice(start, start + size)), noisy, top_k) for start in starts]
    return joined(parts, shape)


def _softmax_chunk(
    shard: Shard, inputs: Inputs, noisy: NoisyFeatures, top_k: int | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
    """log p̄ and class ids, [n, k] or [n, K] and None, with entropy and expected entropy, [n]: a `Summary`'s columns."""
    wide = inputs.temperature
    log_probs = wide.new_empty(inputs.batch, len(shard.classes))
    expected = wide.new_zeros(inputs.batch)
    normaliser = wide.new_full((inputs.batch, inputs.samples), NEVER)
    evaluation = None
    if len(shard.classes) and inputs.batch:
        plan = plan_for(inputs, "softmax", noisy.order, noisy.memory_budget)
        evaluation = Evaluation(inputs, plan, product_precision(inputs))
        normaliser = evaluation.log_normalisers(None)
    (normaliser,) = log_sum_exp_over_ranks(shard.ranks, normaliser)
    if evaluation is not None:
        evaluation.log_probs_given(normaliser, log_probs, expected)
    entropies = torch.stack((softmax_entropy(log_probs), expected))
    entropy, expected = shard.ranks.sum(entropies, "entropies").unbind()
    if top_k is None:
        everything = gather_from_ranks(shard.ranks, log_probs, shard.num_classes)
        return everything, None, entropy, expected, None
    values, indices = log_probs.topk(min(top_k, len(shard.classes)))
    return *_best(shard, values, indices, top_k), entropy, expected, None


def _sigmoid_summary(shard: Shard, noisy: NoisyFeatures, method: str, top_k: int | None) -> Summary:
    """Labels do not know of each other: each process predicts its own."""
    shape = noisy.features.shape[:-1]
    if len(shard.classes):
        local = mc_predict(
            noisy.through(shard.affine),
            noisy.z,
            link="sigmoid",
            method=method,
            top_k=None if top_k is None else min(top_k, len(shard.classes)),
            tolerance=0.0,
            **noisy.evaluation_options(),
        )
    else:
        none, zero = _empty(noisy.features, *shape, 0), _empty(noisy.features, *shape).zero_()
        local = Summary(none, none.long(), zero, zero, None)
    entropies = torch.stack((local.entropy, local.expected_entropy))
    entropy, expected = shard.ranks.sum(entropies, "entropies").unbind()
    if top_k is None:
        everything = gather_from_ranks(shard.ranks, local.log_probs, shard.num_classes)
        return Summary(everything, None, entropy, expected, None)
    assert local.indices is not None
    values, indices = _best(shard, local.log_probs, local.indices, top_k)
    return Summary(values, indices, entropy, expected, None)


def _best(shard: Shard, values: Tensor, indices: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k largest of all processes, [..., k], from those of this one, [..., at most k], and their class ids."""
    more = top_k - values.shape[-1]
    values = torch.nn.functional.pad(values, (0, more), value=-torch.inf)
    indices = torch.nn.functional.pad(indices + shard.classes.start, (0, more), value=-1)
    all_values = shard.ranks.gather(values, "top classes").movedim(0, -2).flatten(-2)  # [..., ranks · k]
    all_indices = shard.ranks.gather(indices, "top classes").movedim(0, -2).flatten(-2)
    found, places = all_values.topk(top_k)
    return found, all_indices.gather(-1, places)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


class ShardedLogits(LogitDistribution):
    """The Gaussian over the logits of all processes' classes.

    What it is asked for, all processes must ask for: it comes from all of them. Only the covariance of the classes that
    it was made for is there already, so that one process alone may print a prediction.

    Args:
        shard: the classes here.
        noisy: features with their noise.
        classifier: features → logits of all classes, gathered.
        classes: [..., k], those whose covariance is computed now; None for none.
    """

    def __init__(self, shard: Shard, noisy: NoisyFeatures, classifier: Any, classes: Tensor | None):
        # Without a lift, evaluations of this take it for opaque, and call the classifier, which is right if slow.
        super().__init__(noisy.features, classifier, noisy.noise)
        self._shard = shard
        self._known: tuple[Tensor, Tensor] | None = None
        if classes is not None:
            with torch.no_grad():
                self._known = classes, self.covariance(classes)

    def covariance(self, classes: Tensor) -> Tensor:
        """The covariance of the logits of some classes of each example, [..., k, k] for class ids [..., k]."""
        if self._known is not None and torch.equal(self._known[0], classes):
            return self._known[1]
        if self.noise is None:
            return self.features.new_zeros(*classes.shape, classes.shape[-1])
        rows, _ = self._shard.rows(classes)  # [..., k, D], zeros for classes that are elsewhere
        seen = self.noise.seen_by(rows)  # [..., k, Q]
        seen = seen.float() if seen.dtype in (torch.float16, torch.bfloat16) else seen
        seen = self._shard.ranks.sum(seen.contiguous(), "rows of the top classes")
        return seen @ seen.mT

    def _lifted(self, noise: Tensor) -> Tensor:
        local = torch.nn.functional.linear(noise, self._shard.affine.weight)
        return gather_from_ranks(self._shard.ranks, local, self._shard.num_classes)
