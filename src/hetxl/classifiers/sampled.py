"""Sampled softmax: in training the batch's labels and some negatives, all classes otherwise."""

import torch
from torch import Tensor

from hetxl.classifiers.active import Active, active_nll, check_few, labels_of, with_drawn
from hetxl.classifiers.linear import LinearClassifier
from hetxl.classifiers.negatives import NEGATIVES, build_proposal
from hetxl.functional import IGNORE_INDEX, Targets, Weights
from hetxl.functional._checks import integer_at_least, one_of
from hetxl.nn.noisy import NoisyFeatures


class SampledClassifier(LinearClassifier):
    """W φ + b whose training loss looks at the labels of the batch and at negatives drawn for it (log-Q corrected).

    All labels of a batch stand for themselves in the loss of every example, whichever of them is its own; only the
    classes beyond them are estimated. The negatives are shared by the examples and their samples. In evaluation mode
    the loss, and predictions always, are those of all classes.

    Args:
        in_features: D
        num_classes: K
        negatives: how many are drawn for a batch.
        proposal: "uniform", "log-uniform" (for classes in the order of their frequency), "unigram" (by `counts`), or
            "in-batch": no draws, the batch's labels alone, each for as many as its frequency says.
        counts: [K], how often each class occurs; for "unigram" and "in-batch".
        power: of the counts in "unigram".
        sparse: whether W and b get sparse gradients, for torch.optim.SparseAdam or SGD: a step then costs nothing for
            the classes that it did not look at.
        bias: whether there is a b.
        device: of the parameters.
        dtype: of the parameters.

    >>> SampledClassifier(64, 100_000, negatives=1000)(torch.randn(2, 64)).shape
    torch.Size([2, 100000])
    """

    complete = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        negatives: int = 4096,
        proposal: str = "uniform",
        counts: Tensor | None = None,
        power: float = 1.0,
        sparse: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        one_of("proposal", proposal, NEGATIVES)
        self.negatives = integer_at_least("negatives", negatives, 1)
        self.proposal, self.sparse = proposal, sparse
        self.draws_from = build_proposal(proposal, num_classes, counts, power)

    def active(self, targets: Targets, generator: torch.Generator | None = None) -> Active:
        """The classes that the loss of a batch looks at."""
        labels = labels_of(targets)
        if self.proposal == "in-batch":
            ids = targets.ids if targets.lists is None else targets.lists.classes
            assert ids is not None
            if not len(labels):
                labels = labels.new_zeros(1)  # any class: nobody asks for it, and the loss is 0 of all parameters
            draws = (ids != IGNORE_INDEX).sum().clamp(min=1)
            # Each is there with this probability, so it stands for its inverse; also the example's own label, which
            # keeps the odds between classes as they are.
            there = -torch.expm1(draws * torch.log1p(-self.draws_from.log_q(labels).exp().clamp(max=1 - 1e-7)))
            return Active(labels, -there.log())
        drawn = self.draws_from.draw(self.negatives, generator, self.weight.device)
        return with_drawn(labels, drawn, self.draws_from.log_q(drawn), self.negatives)

    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """In training mode over the active classes, otherwise over all."""
        if not self.training:
            return super().nll(noisy, targets, reduction, weights)
        check_few(noisy, targets, weights)
        if self.proposal == "in-batch" and noisy.link == "sigmoid":
            raise ValueError('proposal="in-batch" is for link="softmax"; for link="sigmoid" use "uniform" or "unigram"')
        return active_nll(self, noisy, targets, self.active(targets, noisy.generator), reduction, weights)

    def extra_repr(self) -> str:
        """The options as shown when the module is printed."""
        return f"{super().extra_repr()}, negatives={self.negatives}, proposal={self.proposal!r}"
