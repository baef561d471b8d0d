"""A softmax over millions of classes through an index: near classes exactly, the far ones by a sample."""

import math

import torch
from torch import Tensor

from hetxl.classifiers.active import Active, active_nll, check_few, labels_of, with_drawn
from hetxl.classifiers.candidates import predict_among
from hetxl.classifiers.index import INDEXES, ClassIndex, top_logits
from hetxl.classifiers.linear import LinearClassifier
from hetxl.classifiers.negatives import draw_classes
from hetxl.functional import IGNORE_INDEX, Summary, Targets, Weights
from hetxl.functional._checks import integer_at_least, one_of
from hetxl.functional._compile import not_compiled
from hetxl.functional.engine.inputs import gather_inputs
from hetxl.functional.engine.plan import DEFAULT_BUDGET
from hetxl.functional.engine.predict import joined
from hetxl.functional.precision import without_autocast
from hetxl.nn.noisy import NoisyFeatures


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
        index: "ivf", an inverted file, quick to build and to change; or "hnsw", a graph, slow to build and different
            from build to build with more than one thread.
        max_stale: steps after which the index is built anew; a million classes take a minute or two.
        recall_target: share of the first and of the first ten classes that a search should find; how far it has to look
            for that is found out when the index is built, on the features at hand. A loss makes do with less where it
            would take long.
        sparse: whether W and b get sparse gradients, for torch.optim.SparseAdam or SGD.
        bias: whether there is a b.
        device: of the parameters.
        dtype: of the parameters.

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
        index: str = "ivf",
        max_stale: int = 200,
        recall_target: float = 0.995,
        sparse: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        one_of("index", index, INDEXES)
        if not 0 < recall_target <= 1:
            raise ValueError(f"recall_target must be above 0 and at most 1, found {recall_target}")
        integer_at_least("max_stale", max_stale, 0)
        # Before the parameters, which when drawn anew have the index forget the old ones.
        object.__setattr__(self, "_index", ClassIndex(index, max_stale, recall_target))
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
        """Build the index from W as it is.

        Args:
            features: [..., D] such as will be searched for, which the index is tuned on; rows of W with noise without.
        """
        with without_autocast(self.weight.device):
            self._index.clear()
            self._index.build(self.weight, self.bias, self._queries(features))

    def recall(self, features: Tensor, k: int = 10) -> float:
        """Share of the k classes of largest logits that the index finds, as `predict` searches in evaluation mode.

        Args:
            features: [..., D]
            k: at most K
        """
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
        drawn = draw_classes(self.num_classes, self.others, noisy.generator, self.weight.device)
        log_q = torch.full(drawn.shape, -math.log(self.num_classes), device=drawn.device)
        return with_drawn(surely, drawn, log_q, self.others)

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
        assert inputs.features is not None
        with without_autocast(self.weight.device):
            summary = predict_among(
                inputs,
                self._candidates(inputs.features, candidates),
                self._drawn(),
                link=noisy.link,
                top_k=top_k,
                order=noisy.order,
                budget=noisy.memory_budget or DEFAULT_BUDGET,
            )
        return joined([summary], noisy.features.shape[:-1])

    def extra_repr(self) -> str:
        """The options as shown when the module is printed."""
        options = f"neighbours={self.neighbours}, others={self.others}, index={self._index.kind!r}"
        return f"{super().extra_repr()}, {options}"

    def _search(self, features: Tensor, k: int, *, thorough: bool) -> Tensor:
        """Ids [n, k] of the classes of the largest mean logits, those first; −1 where the index finds fewer."""
        queries = self._queries(features)
        strictly = not self.training
        with without_autocast(self.weight.device):
            self._index.follow(self.weight, self.bias, queries, strictly=strictly)
            return self._index.search(self.weight, self.bias, queries, k, thorough=thorough or strictly)[1]

    def _candidates(self, features: Tensor, count: int) -> Tensor:
        """[n, C] classes of the largest mean logits, each once."""
        found = self._search(features, count, thorough=True)
        short = (found < 0).any(-1).nonzero().squeeze(-1)
        if len(short):
            found[short] = top_logits(self.weight, self.bias, features[short], count)[1]
        return found

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
