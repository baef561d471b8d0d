"""A softmax over millions of classes through an index: near classes exactly, the far ones by a sample.

In prediction of the top classes only the candidates of each example and a uniform sample of classes, shared by the
examples, are looked at. Under sample s of the noise
the classes that are no candidates weigh R_s = Σ exp(u_sk), which

    (number of such classes) / (how many of them were drawn) · Σ_{k drawn, no candidate} exp(u_sk)

estimates without bias. It goes into the normaliser, so that probabilities are those among all classes, and the same
sample gives the rest's part of the entropies.
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

CHUNK = 4  # examples at a time at most: their logits stay in the cache between two operations
NEVER = {"softmax": -1e20, "sigmoid": -1e4}
"""Logits of no weight at all, which unlike −∞ can be multiplied by 0; that of the sigmoid also bears to be shifted."""


class RetrievedClassifier(LinearClassifier):
    """W φ + b that looks at the classes of the largest logits, found by an index, and at a sample of the others.

    In training the active classes are the `neighbours` of each example and the labels of the batch, each for itself,
    and `others` drawn uniformly for all the rest: an estimate of the sum over all classes that has no bias, however old
    or inexact the index is, and less variance than one without neighbours. In evaluation mode the loss is that of all
    classes.

    `predict(features, top_k=k)` samples the candidates that the index finds for each example, and estimates the rest
    from classes drawn once and for all. Other methods than "mc" and "deterministic", all classes instead of top_k,
    `tolerance=0`, and so few classes that it would not pay, go through all classes as they do with `LinearClassifier`.

    The index follows W (see `hetxl.classifiers.index`). A search in training mode may be up to `max_stale` steps behind
    on rows that no loss has read, and is never behind on the others; in evaluation mode any change of W since the index
    was built has it built anew (if by way of `.data`, one of many rows). It is no part of the state dict, of copies or
    of pickles: what needs it builds it. In training mode only optimiser steps are expected to change W; call `sync`
    after any other change.

    Args:
        in_features: D
        num_classes: K
        neighbours: classes that each example of a batch makes active.
        others: classes drawn for the rest, in training and in prediction.
        candidates: classes that are sampled for each example in prediction; four times top_k if that is more.
        max_stale: steps after which the index is built anew; a million classes take a minute or two.
        recall_target: share of the first and of the first ten classes that a search should find; how far it has to look
            for that is found out when the index is built, on the features at hand. A loss makes do with less where it
            would take long.
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
        # Before the parameters, which when drawn anew have the index forget the old ones.
        object.__setattr__(self, "_index", ClassIndex(max_stale, recall_target))
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.neighbours = integer_at_least("neighbours", neighbours, 1)
        self.others = integer_at_least("others", others, 1)
        self.candidates = integer_at_least("candidates", candidates, 1)
        self.sparse = sparse

    _index: ClassIndex

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as nn.Linear does."""
        super().reset_parameters()
        self._index.clear()

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # In training mode this would pass for a step.
        self._index.clear()

    @property
    def staleness(self) -> int | None:
        """Steps since the index was built; None if there is none for the parameters as they are."""
        return self._index.staleness(self.weight, self.bias)

    def sync(self, features: Tensor | None = None) -> None:
        """Build the index from W as it is, tuned on features [..., D] such as will be searched for, or rows of W."""
        with without_autocast(self.weight.device):
            self._index.clear()
            self._index.build(self.weight, self.bias, self._queries(features))

    def recall(self, features: Tensor, k: int = 10) -> float:
        """Share of the k ≤ K classes of largest logits that a search in evaluation mode finds for features [..., D]."""
        if integer_at_least("k", k, 1) > self.num_classes:
            raise ValueError(f"k must be at most the number of classes, {self.num_classes}, found {k}")
        queries = self._queries(features)
        with without_autocast(self.weight.device):
            self._index.follow(self.weight, self.bias, queries, strictly=not self.training)
            return self._index.recall(self.weight, self.bias, queries, k, thorough=True)

    def active(self, noisy: NoisyFeatures, targets: Targets) -> Active:
        """The classes that the loss of a batch looks at."""
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
        """In training mode over the active classes, otherwise over all."""
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
        """Averaged probabilities with entropies; of the top classes from the candidates of each example."""
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
            # [n, C] classes of the largest mean logits, each once; the index may find fewer.
            classes = self._search(inputs.mean.first, candidates, thorough=True)
            short = (classes < 0).any(-1).nonzero().squeeze(-1)
            if len(short):
                classes[short] = top_logits(self.weight, self.bias, inputs.mean.first[short], candidates)[1]
            budget = noisy.memory_budget or DEFAULT_BUDGET
            summary = predict_among(inputs, classes, self._drawn(), budget=budget, **options)
        return joined([summary], noisy.features.shape[:-1])

    def extra_repr(self) -> str:
        """The options as shown when the module is printed."""
        return f"{super().extra_repr()}, neighbours={self.neighbours}, others={self.others}"

    def _search(self, features: Tensor, k: int, *, thorough: bool) -> Tensor:
        """Ids [n, k] of the classes of the largest mean logits, those first; −1 where the index finds fewer."""
        queries, strictly = self._queries(features), not self.training
        with without_autocast(self.weight.device):
            self._index.follow(self.weight, self.bias, queries, strictly=strictly)
            return self._index.search(self.weight, self.bias, queries, k, thorough=thorough or strictly)[1]

    def _drawn(self) -> Tensor:
        """Classes [O] that stand for the rest in every prediction, each once, ascending; always the same."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randperm(self.num_classes, generator=generator)[: self.others]
        return drawn.sort().values.to(self.weight.device)

    def _queries(self, features: Tensor | None) -> Tensor:
        """[n, D] from [..., D], none without features."""
        if features is None:
            return self.weight.new_empty(0, self.in_features)
        return features.detach().reshape(-1, self.in_features)


@torch.no_grad()
def predict_among(
    inputs: Inputs, classes: Tensor, others: Tensor, *, link: Link, top_k: int, order: Order | None, budget: int
) -> Summary:
    """The top classes of a batch [B] among the candidates of each example, `classes` [B, C], each once.

    The inputs are of a linear classifier that noise goes through, or without noise; `others` [O] are a uniform sample
    of all classes, each once, ascending.
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
        # Which of the drawn classes are among the candidates, [n, O].
        ordered = classes[some].sort(-1).values
        drawn = others.expand(len(ordered), -1).contiguous()
        nearest = torch.searchsorted(ordered, drawn).clamp_(max=ordered.shape[1] - 1)
        known = ordered.gather(-1, nearest) == drawn
        u = logits.of_candidates(classes[some])
        v = logits.of_all(weight, torch.where(known, NEVER[link], bias))
        # How many classes each of the drawn ones that are no candidates stands for, [n].
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
        """Those of classes [n, C]."""
        weight = self.mean.weight[classes].to(self.inputs.wide)  # [n, C, D]
        bias = None if self.mean.bias is None else self.mean.bias[classes].to(self.inputs.wide)
        return self._mixed(torch.bmm(weight, self.rows.mT), bias)

    def of_all(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Those of the same classes for every example: weight [O, D]; with bias [n, O]."""
        rows = (self.rows.flatten(0, 1) @ weight.T).unflatten(0, self.rows.shape[:2]).mT  # [n, O, P]
        return self._mixed(rows, bias)

    def _mixed(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Rows [n, X, P] of the classes as their sampled logits, divided by τ."""
        if self.mixing is None:
            return (rows if bias is None else rows + bias.unsqueeze(-1)) / self.inputs.temperature
        if bias is not None:
            rows[..., 0] += bias
        return torch.bmm(rows, self.mixing.mT)


def _softmax(u: Tensor, v: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log p̄ [n, C] of the candidates; entropy, expected entropy and the rest's probability, [n] each.

    From logits u [n, C, S] of the candidates and v [n, O, S] of the drawn classes, which are overwritten; each of those
    stands for `count` [n] classes.
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
    """As `_softmax`, with the largest probability of any other class as the last.

    The candidates are those of the largest logits, so hardly a class beyond them is above the least of them.
    """
    own, drawn = (mean_sigmoid_rows(logits, False, entropy=True) for logits in (u, v))
    assert own.entropy is not None
    assert drawn.entropy is not None
    entropy = sigmoid_entropy(own.log_p, own.log_not_p) + count * sigmoid_entropy(drawn.log_p, drawn.log_not_p)
    expected = own.entropy.sum(-1) + count * drawn.entropy.sum(-1)
    return own.log_p, entropy, expected, drawn.log_p.amax(-1).maximum(own.log_p.amin(-1)).exp()
