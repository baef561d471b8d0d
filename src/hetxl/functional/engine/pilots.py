"""Prediction of the top classes without sampling all of them.

Pilot samples cover all classes. The likeliest classes under one half of the pilots become the candidates, and only they
are sampled in full. Of the others only the joint weight matters, R_s = Σ exp(u_sk). To second order in the normals

    log R_s = a + b₁ μ · z_s + b₂ (z_sᵀ C z_s),      μ and C mean and covariance of the factors under softmax(mean),

and a, b₁, b₂ are fitted to the other half of the pilots, which was not used to choose the candidates. A ridge pulls the
fit towards b₁ = 1 and b₂ = ½, the values of the expansion; without it the fit may explode for samples unlike the
pilots. The residuals of the fit give an error estimate. Where the error is too large, the example gets more candidates,
and finally all classes. The samples to which the fit assigns the most weight are computed exactly, as a further test.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hetxl.functional._torch import slices
from hetxl.functional.engine.inputs import Inputs
from hetxl.functional.engine.softmax import exp_columns
from hetxl.functional.links import log_mean_exp
from hetxl.registry import Link

PILOTS = 32  # samples of all classes: half choose the candidates, half fit the weight of the others
SIZES = (128, 2048)  # numbers of candidates, tried in turn; where 128 are too few, 512 seldom suffice
RIDGE = 0.3  # weight of the expansion's coefficients relative to the pilots
TAIL = 32  # samples with exact R_s: those where the fit gives the others the largest share
SURPRISE = 4.0  # largest error of the fit at the end of its tail, in tolerances, before it is rejected
SLICE = 2048  # classes per block where several operations in turn read the rows of all classes
SMALLEST = 1e-7
"""Smallest share of the others under a pilot: less is lost in float32, and is far below any tolerance."""

ERRORS = 2.0  # assumed error of the estimate of the others' probability, in standard errors


class Pilots(NamedTuple):
    """The pilot samples of all classes."""

    weights: Tensor  # exp(u − top) for softmax, σ(u) for sigmoid, [n, K, pilots]
    top: Tensor  # largest logit of each pilot, [n, 1, pilots] (softmax)
    total: Tensor  # sum of its weights, [n, 1, pilots] (softmax)
    likely: Tensor  # mean probability under the first half, [n, K]

    def of(self, examples: Tensor) -> "Pilots":
        """Select examples."""
        return Pilots(*(values[examples] for values in self))

    def mean(self, half: slice, total: Tensor) -> Tensor:
        """Average weights / total over one half of the pilots: [n, K] from [n, 1, pilots / 2] totals."""
        return torch.bmm(self.weights[..., half], 1 / total.mT).squeeze(-1).div_(total.shape[-1])


FIRST, SECOND = slice(0, PILOTS // 2), slice(PILOTS // 2, PILOTS)


def pilot_samples(rows: Tensor, mixing: Tensor, link: Link, out: Tensor | None = None) -> Pilots:
    """Draw the first samples of all classes: rows [n, K, P], mixing [n, S, P], `out` [n, K, pilots] for their weights.

    logits = rows @ mixing[:, :PILOTS].mT
    likely = logits[..., FIRST].softmax(1).mean(-1)
    """
    logits = torch.bmm(rows, mixing[:, :PILOTS].mT, out=out)
    if link == "sigmoid":
        nothing = logits.new_empty(len(logits), 1, 0)
        return Pilots(logits.sigmoid_(), nothing, nothing, logits[..., FIRST].mean(-1))
    top, total = (values.unsqueeze(1) for values in exp_columns(logits))
    pilots = Pilots(logits, top, total, top)
    return pilots._replace(likely=pilots.mean(FIRST, pilots.total[..., FIRST]))


class Candidates(NamedTuple):
    """The classes to sample for a block of examples, and the weight of the others."""

    classes: Tensor  # [n, C], in descending order of pilot probability
    weight: Tensor | None  # log R_s by the fit, [n, S] (softmax); None for sigmoid
    left_out: Tensor  # [n], estimated probability of the others (softmax), or their largest (sigmoid)
    spread: Tensor  # [n], entropy of the distribution over the others alone (softmax)
    enough: Tensor  # [n], whether these suffice for the top classes within the tolerance


def prunable(inputs: Inputs, top_k: int, budget: int) -> bool:
    """Return whether pruning can save time: many classes and samples, and an example's data fits in memory."""
    if inputs.noise is None or inputs.samples < 4 * PILOTS or not sizes_for(inputs.num_classes, top_k):
        return False
    return bytes_for(inputs) <= budget


def bytes_for(inputs: Inputs) -> int:
    """Return the working memory of one example: its rows, and a few copies of the pilots' logits."""
    return inputs.temperature.element_size() * inputs.num_classes * (inputs.noise_size + 1 + 4 * PILOTS)


def sizes_for(num_classes: int, top_k: int) -> list[int]:
    """Return the numbers of candidates to try."""
    return [size for size in SIZES if 2 * top_k <= size <= num_classes // 4]


def choose_candidates(
    rows: Tensor, mixing: Tensor, pilots: Pilots, size: int, top_k: int, tolerance: float, link: Link
) -> Candidates:
    """Choose the `size` likeliest classes of each example, weigh the others, and judge whether these suffice.

    Rows of all classes are factors-first, [n, K, P]; mixing is z̃ = [1, z] / τ of all samples, [n, S, P].
    """
    classes = pilots.likely.topk(size).indices
    if link == "sigmoid":
        # A class may be left out if its probability is well below the k-th largest.
        probs = pilots.weights[..., SECOND].mean(-1)
        outside = probs.scatter(-1, classes, 0.0).amax(-1)
        kth = probs.gather(-1, classes).topk(top_k, -1).values[:, -1]
        return Candidates(classes, None, outside, torch.zeros_like(outside), outside <= 0.5 * kth)
    top, total = pilots.top[..., SECOND], pilots.total[..., SECOND]
    chosen = classes.unsqueeze(-1).expand(-1, -1, PILOTS // 2)
    inside = pilots.weights[..., SECOND].gather(1, chosen).sum(1, keepdim=True)
    rest = (total - inside).maximum(SMALLEST * total)  # R_s of the pilots, [n, 1, pilots / 2]
    weight, inside_weight = (values.log().add(top).squeeze(1) for values in (rest, inside))
    within = pilots.mean(SECOND, rest).scatter_(-1, classes, 0.0)  # probabilities among the others, [n, K]
    share = (rest / total).squeeze(1)  # probability of the others under each pilot
    terms = expansion(rows, mixing, classes)  # [n, S, 3]
    fit = _least_squares(terms[:, SECOND], weight, share)  # [n, 3]
    fitted = (terms @ fit.unsqueeze(-1)).squeeze(-1)  # [n, S]
    error = share - torch.sigmoid(fitted[:, SECOND] - inside_weight)
    off = error.mean(-1).abs() + ERRORS * error.std(-1) / error.shape[-1] ** 0.5
    spread = -torch.special.xlogy(within, within).sum(-1)
    return Candidates(classes, fitted, share.mean(-1), spread, off <= tolerance)


def expansion(rows: Tensor, mixing: Tensor, classes: Tensor) -> Tensor:
    """Return 1, μ · z_s and z_sᵀ C z_s of the classes other than `classes`, for every sample: [n, S, 3]."""
    per_tau = mixing[:, :1, 0]  # 1 / τ
    mean = (rows[..., 0] * per_tau).scatter_(-1, classes, -torch.inf)
    probs = mean.softmax(-1).unsqueeze(-1)  # [n, K, 1]
    # Multiply whole rows, mean and factors: a product without the first column would copy them.
    second = rows.new_zeros(len(rows), rows.shape[-1], rows.shape[-1])
    middle = rows.new_zeros(len(rows), rows.shape[-1], 1)  # μ
    for some in slices(rows.shape[1], SLICE):
        weighted = (rows[:, some] * probs[:, some]).mT
        middle += weighted.sum(-1, keepdim=True)
        second.baddbmm_(weighted, rows[:, some])
    covariance = (second - middle * middle.mT)[:, 1:, 1:]
    middle, z = middle[:, 1:], mixing[..., 1:]
    first = (z @ middle).squeeze(-1)
    return torch.stack((torch.ones_like(first), first, ((z @ covariance) * z).sum(-1)), dim=-1)


def _least_squares(terms: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Fit coefficients [n, 3] of terms [n, s, 3] to values [n, s] by least squares with weights [n, s].

    A ridge pulls them towards a, 1 and ½, the values of the expansion, where few pilots do not determine them.
    """
    expected = terms.new_tensor([0.0, 1.0, 0.5])
    weights = weights / weights.mean(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    weighted = (terms * weights.unsqueeze(-1)).double().mT  # [n, 3, s]
    gram = weighted @ terms.double()
    ridge = gram.diagonal(dim1=-2, dim2=-1) * terms.new_tensor([1e-6, RIDGE, RIDGE], dtype=gram.dtype)
    gram = gram + torch.diag_embed(ridge.clamp(min=torch.finfo(torch.float32).tiny))
    beyond = weighted @ (values - terms @ expected).double().unsqueeze(-1)  # residuals of the expansion
    return torch.linalg.solve(gram, beyond).squeeze(-1).to(terms.dtype) + expected


def weigh_exactly(rows: Tensor, mixing: Tensor, classes: Tensor, samples: Tensor) -> Tensor:
    """Compute log R_s [n, T] of the classes other than `classes` [n, C] for samples [n, T], from rows [n, K, P]."""
    some = mixing.gather(1, samples.unsqueeze(-1).expand(-1, -1, mixing.shape[-1]))
    logits = torch.bmm(rows, some.mT)  # [n, K, T]
    logits.scatter_(1, classes.unsqueeze(-1).expand(-1, -1, logits.shape[-1]), -torch.inf)
    top, total = exp_columns(logits)
    return total.log() + top


def sampled_with_others(
    logits: Tensor, weight: Tensor, top_k: int, exact: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the softmax of the candidates and the others as one more class, with one exponential for each logit.

        log_probs = torch.cat((logits, weight.unsqueeze(1)), 1).log_softmax(1)
        return log_mean_exp(log_probs[:, :-1], -1), −(log_probs.exp() * log_probs).sum(1).mean(-1), …

    Args:
        logits: logits of the candidates, [n, C, S]; overwritten.
        weight: log R_s by the fit, [n, S]
        top_k: number of the largest that must be exact however small they are; smaller ones may become 0.
        exact: exact log R_s of the samples [n, T] where the fit gives the others the largest share.

    Returns log p̄ of the candidates [n, C], and for each example [n]: the samples' mean entropy, with the others as one
    class; the mean probability of the others; the error of the fit in the last quarter of the samples with exact R_s.
    """
    top = logits.amax(1)  # [n, S]
    logits.sub_(top.unsqueeze(1))
    weights = logits.exp()
    inside = weights.sum(1)
    weight = weight - top - inside.log()  # from here on, relative to the candidates
    tail = weight.topk(min(TAIL, weight.shape[1])).indices
    known = exact(tail) - (top + inside.log()).gather(1, tail)
    # Beyond the tail the fit gives the others less weight than at its end. An error there may continue beyond it.
    end = slice(-(-3 * tail.shape[1] // 4), None)
    wrong = (torch.sigmoid(weight.gather(1, tail[:, end])) - torch.sigmoid(known[:, end])).mean(-1).abs()
    weight = weight.scatter(1, tail, known)
    share = torch.sigmoid(-weight)  # joint probability of the candidates, [n, S]
    log_probs = torch.bmm(weights, (share / inside).unsqueeze(-1)).squeeze(-1).div_(share.shape[1]).log_()
    if not log_probs.topk(top_k).values.isfinite().all():  # every sample of a requested class underflows
        log_probs = log_mean_exp(logits + (logsigmoid(-weight) - inside.log()).unsqueeze(1), -1)
    among = inside.log() - logits.mul_(weights).sum(1) / inside  # entropy of the distribution over the candidates alone
    two = -(share * logsigmoid(-weight) + (1 - share) * logsigmoid(weight))  # candidates against others
    return log_probs, (share * among + two).mean(-1), (1 - share).mean(-1), wrong


def label_entropies_outside(probs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate entropy and expected entropy of the labels that are not candidates (sigmoid) from the pilots."""
    mean = probs.mean(-1)

    def outside(values: Tensor) -> Tensor:
        return values.sum(-1) - values.gather(-1, classes).sum(-1)

    return outside(_label_entropy(mean)), outside(_label_entropy(probs).mean(-1))


def _label_entropy(probs: Tensor) -> Tensor:
    """Return the entropy of each label, in nats."""
    return -(torch.special.xlogy(probs, probs) + torch.special.xlog1py(1 - probs, -probs))
