"""A softmax over millions of classes with an index: near classes exactly, the others by sampling.

Predictions of the top classes compute only the candidates of each example and a uniform sample of classes that the
examples share. Under noise sample s, the other classes have the total weight R_s = Σ exp(u_sk), which

    (number of such classes) / (number of them drawn) · Σ_{k drawn, no candidate} exp(u_sk)

estimates without bias. The normaliser includes it, so probabilities refer to all classes; the same sample estimates
the other classes' part of the entropies.
"""

import torch
from torch import Tensor

from hetxl._checks import integer_at_least
from hetxl.classifiers.index import ClassIndex, top_logits
from hetxl.classifiers.linear import LinearClassifier
from hetxl.classifiers.sampled import Active, Uniform, active_nll, check_few, labels_of, with_drawn
from hetxl.functional import IGNORE_INDEX, Link, Summary, Targets, Weights
from hetxl.functional._torch import not_compiled, slices, without_autocast
from hetxl.functional.distribution import Order
from hetxl.functional.engine.blocked import mixing_of
from hetxl.functional.engine.inputs import Inputs, LinearMean, gather_inputs
from hetxl.functional.engine.plan import DEFAULT_BUDGET
from hetxl.functional.engine.predict import joined
from hetxl.functional.engine.sigmoid import mean_sigmoid_rows
from hetxl.functional.links import log_mean_exp, sigmoid_entropy, softmax_entropy
from hetxl.nn.classifier import NoisyFeatures

CHUNK = 4  # maximum number of examples per chunk, so that their logits stay in the cache
NEVER = {"softmax": -1e20, "sigmoid": -1e4}
"""Logits of weight 0, which unlike −∞ can be multiplied by 0; the sigmoid's can also be shifted."""


class RetrievedClassifier(LinearClassifier):
    """W φ + b over the classes with the largest logits, found with an index, and a sample of the others.

    In training, the active classes are the `neighbours` of each example, the labels of the batch, and `others` drawn
    uniformly to represent the rest. This estimates the sum over all classes without bias, even if the index is old or
    inexact, and with less variance than without neighbours. In evaluation mode the loss covers all classes.

    `predict(features, top_k=k)` computes the candidates that the index finds for each example, and estimates the rest
    from a fixed sample of classes. Methods other than "mc" and "deterministic", predictions without top_k,
    `tolerance=0`, and small numbers of classes compute all classes, like `LinearClassifier`.

    The index follows W (see `hetxl.classifiers.index`). In training mode, rows that no loss has read may be up to
    `max_stale` steps old; other rows are current. In evaluation mode, any change of W causes a rebuild (changes through
    `.data` only if they affect many rows). The index is not part of the state dict, copies or pickles; it is rebuilt
    when needed. In training mode, only optimiser steps should change W; call `sync` after any other change.

    Args:
        in_features: D
        num_classes: K
        neighbours: number of active classes per example.
        others: number of classes drawn to represent the rest, in training and in prediction.
        candidates: number of classes computed per example in prediction; at least four times top_k.
        max_stale: number of steps after which the index is rebuilt; for a million classes this takes a minute or two.
        recall_target: share of the top class and of the top ten classes that a search should find. The search effort
            is tuned for it when the index is built. Losses accept less if it would take long.
        sparse: whether W and b get sparse gradients, for torch.optim.SparseAdam or SGD.

    >>> RetrievedClassifier(64, 1000)(torch.randn(2, 64)).shape
    torch.Size([2, 1000])
    """

    complete = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        neighbours: int = 32,
        others: int = 1024,
        candidates: int = 256,
        max_stale: int = 200,
        recall_target: float = 0.995,
        sparse: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        if not 0 < recall_target <= 1:
            raise ValueError(f"recall_target must be above 0 and at most 1, found {recall_target}")
        integer_at_least("max_stale", max_stale, 0)
        # Before the parameters, whose initialisation clears the index.
        object.__setattr__(self, "_index", ClassIndex(max_stale, recall_target))
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.neighbours = integer_at_least("neighbours", neighbours, 1)
        self.others = integer_at_least("others", others, 1)
        self.candidates = integer_at_least("candidates", candidates, 1)
        self.sparse = sparse

    _index: ClassIndex

    def reset_parameters(self) -> None:
        """Initialise the parameters again, like nn.Linear."""
        super().reset_parameters()
        self._index.clear()

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # In training mode this change would count as a step.
        self._index.clear()

    @property
    def staleness(self) -> int | None:
        """Return the number of steps since the index was built; None without an index for the current parameters."""
        return self._index.staleness(self.weight, self.bias)

    def sync(self, features: Tensor | None = None) -> None:
        """Rebuild the index from the current W, tuned on typical features [..., D] or on rows of W."""
        with without_autocast(self.weight.device):
            self._index.clear()
            self._index.build(self.weight, self.bias, self._queries(features))

    def recall(self, features: Tensor, k: int = 10) -> float:
        """Return the share of the top k ≤ K classes that a search in evaluation mode finds for features [..., D]."""
        if integer_at_least("k", k, 1) > self.num_classes:
            raise ValueError(f"k must be at most the number of classes, {self.num_classes}, found {k}")
        queries = self._queries(features)
        with without_autocast(self.weight.device):
            self._index.follow(self.weight, self.bias, queries, strictly=not self.training)
            return self._index.recall(self.weight, self.bias, queries, k, thorough=True)

    def active(self, noisy: NoisyFeatures, targets: Targets) -> Active:
        """Return the active classes of a batch."""
        labels = labels_of(targets)
        if self.neighbours >= self.num_classes:
            surely = torch.arange(self.num_classes, device=self.weight.device)
        else:
            features = noisy.features
            if targets.ids is not None:
                features = features[targets.ids != IGNORE_INDEX]
            near = self._search(features, self.neighbours, thorough=False).flatten()
            surely = torch.cat((labels, near[near >= 0])).unique()
        proposal = Uniform(self.num_classes)
        drawn = proposal.draw(self.others, noisy.generator, self.weight.device)
        return with_drawn(surely, drawn, proposal.log_q(drawn), self.others)

    @not_compiled
    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return the loss over the active classes in training mode, and over all classes otherwise."""
        if not self.training:
            return super().nll(noisy, targets, reduction, weights)
        check_few(noisy, targets, weights)
        active = self.active(noisy, targets)
        if self._index.built is not None:
            self._index.touch(active.classes)
        return active_nll(self, noisy, targets, active, reduction, weights)

    @not_compiled
    @torch.no_grad()
    def predict(self, noisy: NoisyFeatures, method: str, top_k: int | None, tolerance: float) -> Summary:
        """Return averaged probabilities with entropies; with top_k, from the candidates of each example."""
        candidates = max(self.candidates, 4 * (top_k or 0))
        if (
            top_k is None
            or method not in ("mc", "deterministic")
            or tolerance <= 0
            or candidates + self.others >= self.num_classes
            or noisy.features.numel() == 0
            or torch.compiler.is_exporting()
        ):
            return super().predict(noisy, method, top_k, tolerance)
        distribution, z = self.distribution(noisy), noisy.z
        if method == "deterministic":
            distribution, z = distribution.without_noise(), None
        inputs = gather_inputs(distribution, z, noisy.temperature)
        options = {"link": noisy.link, "top_k": top_k, "order": noisy.order}
        with without_autocast(self.weight.device):
            # [n, C] distinct classes with the largest mean logits; the index may find fewer.
            classes = self._search(inputs.mean.first, candidates, thorough=True)
            short = (classes < 0).any(-1).nonzero().squeeze(-1)
            if len(short):
                classes[short] = top_logits(self.weight, self.bias, inputs.mean.first[short], candidates)[1]
            budget = noisy.memory_budget or DEFAULT_BUDGET
            summary = predict_among(inputs, classes, self._drawn(), budget=budget, **options)
        return joined([summary], noisy.features.shape[:-1])

    def extra_repr(self) -> str:
        """Return the options shown when the module is printed."""
        return f"{super().extra_repr()}, neighbours={self.neighbours}, others={self.others}"

    def _search(self, features: Tensor, k: int, *, thorough: bool) -> Tensor:
        """Return ids [n, k] of the classes with the largest mean logits, in descending order; −1 if missing."""
        queries, strictly = self._queries(features), not self.training
        with without_autocast(self.weight.device):
            self._index.follow(self.weight, self.bias, queries, strictly=strictly)
            return self._index.search(self.weight, self.bias, queries, k, thorough=thorough or strictly)[1]

    def _drawn(self) -> Tensor:
        """Return the fixed classes [O] that represent the rest in predictions, distinct and ascending."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randperm(self.num_classes, generator=generator)[: self.others]
        return drawn.sort().values.to(self.weight.device)

    def _queries(self, features: Tensor | None) -> Tensor:
        """Flatten [..., D] to [n, D]; n = 0 without features."""
        if features is None:
            return self.weight.new_empty(0, self.in_features)
        return features.detach().reshape(-1, self.in_features)


@torch.no_grad()
def predict_among(
    inputs: Inputs, classes: Tensor, others: Tensor, *, link: Link, top_k: int, order: Order | None, budget: int
) -> Summary:
    """Predict the top classes of a batch [B] among each example's distinct candidates, `classes` [B, C].

    The inputs belong to a linear classifier that noise goes through, or have no noise; `others` [O] is a uniform sample
    of all classes, distinct and ascending.
    """
    mean = inputs.mean
    assert isinstance(mean, LinearMean)
    weight = mean.weight[others].to(inputs.wide)
    bias = weight.new_zeros(len(others)) if mean.bias is None else mean.bias[others].to(inputs.wide)
    columns = 4 * inputs.samples * (classes.shape[1] + len(others))
    each = inputs.temperature.element_size() * (columns + classes.shape[1] * weight.shape[1])
    size = max(1, min(CHUNK, budget // each))
    parts = []
    for some in slices(inputs.batch, size):
        logits = _Logits(mean.of_examples(some), inputs.of_examples(some), order)
        # Whether each drawn class is a candidate, [n, O].
        ordered = classes[some].sort(-1).values
        drawn = others.expand(len(ordered), -1).contiguous()
        nearest = torch.searchsorted(ordered, drawn).clamp_(max=ordered.shape[1] - 1)
        known = ordered.gather(-1, nearest) == drawn
        u = logits.of_candidates(classes[some])
        v = logits.of_all(weight, torch.where(known, NEVER[link], bias))
        # Number of classes that each drawn class that is not a candidate represents, [n].
        count = (inputs.num_classes - classes.shape[1]) / (~known).sum(-1).clamp(min=1).to(u.dtype)
        log_probs, *others_and_entropies = (_softmax if link == "softmax" else _sigmoid)(u, v, count)
        values, places = log_probs.topk(top_k)
        parts.append((values, classes[some].gather(-1, places), *others_and_entropies))
    return joined(parts, torch.Size((inputs.batch,)))


class _Logits:
    """Sampled logits of a chunk of examples, [n, X, S] for X classes of each."""

    def __init__(self, mean: LinearMean, inputs: Inputs, order: Order | None):
        self.mean, self.inputs = mean, inputs
        centre = mean.features.to(inputs.wide).unsqueeze(1)  # [n, 1, D]
        self.mixing: Tensor | None = None
        noise = inputs.noise
        if noise is None or noise.z is None:
            self.rows = centre
        elif order == "samples" or (order is None and inputs.samples <= inputs.noise_size):
            self.rows = centre + noise.gaussian.draw(noise.z.to(mean.features.dtype)).to(inputs.wide)  # [n, S, D]
        else:
            basis = noise.gaussian.basis().to(inputs.wide)
            self.rows = torch.cat((centre, basis.expand(len(centre), -1, -1)), dim=1)  # [n, Q + 1, D]
            self.mixing = mixing_of(inputs, slice(None))  # [n, S, Q + 1]

    def of_candidates(self, classes: Tensor) -> Tensor:
        """Return the logits of classes [n, C]."""
        weight = self.mean.weight[classes].to(self.inputs.wide)  # [n, C, D]
        bias = None if self.mean.bias is None else self.mean.bias[classes].to(self.inputs.wide)
        return self._mixed(torch.bmm(weight, self.rows.mT), bias)

    def of_all(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the logits of the same classes for every example: weight [O, D], bias [n, O]."""
        rows = (self.rows.flatten(0, 1) @ weight.T).unflatten(0, self.rows.shape[:2]).mT  # [n, O, P]
        return self._mixed(rows, bias)

    def _mixed(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Mix rows [n, X, P] of the classes into sampled logits, divided by τ."""
        if self.mixing is None:
            return (rows if bias is None else rows + bias.unsqueeze(-1)) / self.inputs.temperature
        if bias is not None:
            rows[..., 0] += bias
        return torch.bmm(rows, self.mixing.mT)


def _softmax(u: Tensor, v: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log p̄ [n, C] of the candidates, and the entropy, expected entropy and probability of the rest, [n] each.

    u [n, C, S] are logits of the candidates and v [n, O, S] those of the drawn classes, each of which represents
    `count` [n] classes. Both are overwritten.
    """
    top = v.amax(1, keepdim=True)  # [n, 1, S]
    weights = v.sub_(top).exp()
    total = weights.sum(1, keepdim=True)
    stands_for = count.view(-1, 1, 1)
    rest = (stands_for * total).log() + top  # log R_s
    normaliser = torch.logaddexp(u.logsumexp(1, keepdim=True), rest)
    log_probs = u - normaliser
    mean = log_mean_exp(log_probs, -1)
    factor = (top - normaliser).exp()  # a drawn class has the probability factor · weights
    rest_mean = torch.bmm(weights, factor.mT).squeeze(-1) / v.shape[-1]  # [n, O]
    entropy = softmax_entropy(mean) + count * torch.special.entr(rest_mean).sum(-1)
    # −Σ weights · log p, with log p = v + top − normaliser.
    surprise = total * (normaliser - top) - v.mul_(weights).sum(1, keepdim=True)
    expected = softmax_entropy(log_probs.mT) + (stands_for * factor * surprise).squeeze(1)
    return mean, entropy, expected.mean(-1), (stands_for * factor * total).mean((1, 2))


def _sigmoid(u: Tensor, v: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same for the sigmoid link, with the largest probability of any other class as the last value.

    The candidates have the largest logits, so the other classes are hardly ever above the smallest of them.
    """
    own, drawn = (mean_sigmoid_rows(logits, False, entropy=True) for logits in (u, v))
    assert own.entropy is not None
    assert drawn.entropy is not None
    entropy = sigmoid_entropy(own.log_p, own.log_not_p) + count * sigmoid_entropy(drawn.log_p, drawn.log_not_p)
    expected = own.entropy.sum(-1) + count * drawn.entropy.sum(-1)
    return own.log_p, entropy, expected, drawn.log_p.amax(-1).maximum(own.log_p.amin(-1)).exp()
