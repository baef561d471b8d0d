"""Prediction of the top classes from candidates of each example, the rest by a sample of it.

Only the candidates and a uniform sample of classes, shared by the examples, are looked at. Under sample s of the noise
the classes that are no candidates weigh R_s = Σ exp(u_sk), which

    (number of such classes) / (how many of them were drawn) · Σ_{k drawn, no candidate} exp(u_sk)

estimates without bias. It goes into the normaliser, so that probabilities are those among all classes, and the same
sample gives the rest's part of the entropies.
"""

import torch
from torch import Tensor

from hetxl.functional import Link, Summary
from hetxl.functional.distribution import Order
from hetxl.functional.engine.evaluate import mixing_of
from hetxl.functional.engine.inputs import Inputs
from hetxl.functional.engine.predict import joined
from hetxl.functional.engine.sigmoid import mean_sigmoid_rows
from hetxl.functional.links import log_mean_exp, sigmoid_entropy, softmax_entropy

CHUNK = 4
"""Examples at a time at most: their logits stay in the cache between two operations."""

NEVER = {"softmax": -1e20, "sigmoid": -1e4}
"""Logits of no weight at all, which unlike −∞ can be multiplied by 0; that of the sigmoid also bears to be shifted."""


@torch.no_grad()
def predict_among(
    inputs: Inputs, classes: Tensor, others: Tensor, *, link: Link, top_k: int, order: Order | None, budget: int
) -> Summary:
    """The top classes of a batch [B] among the candidates of each example.

    Args:
        inputs: of a linear classifier that noise goes through, or without noise.
        classes: candidates [B, C], each once for an example.
        others: [O] a uniform sample of all classes, each once, ascending.
        link: "softmax" or "sigmoid"
        top_k: at most C.
        order: "samples" or "factors" to force one.
        budget: bytes of working memory.
    """
    assert inputs.weight is not None
    weight = inputs.weight[others].to(inputs.wide)
    bias = weight.new_zeros(len(others)) if inputs.bias is None else inputs.bias[others].to(inputs.wide)
    columns = 4 * inputs.samples * (classes.shape[1] + len(others))
    each = inputs.temperature.element_size() * (columns + classes.shape[1] * weight.shape[1])
    size = max(1, min(CHUNK, budget // each))
    parts = []
    for start in range(0, inputs.batch, size):
        some = slice(start, start + size)
        logits = _Logits(inputs.of_examples(some), order)
        known = _contained(others, classes[some])  # [n, O]
        u = logits.of_candidates(classes[some])
        v = logits.of_all(weight, torch.where(known, NEVER[link], bias))
        # How many classes each of the drawn ones that are no candidates stands for, [n].
        count = (inputs.num_classes - classes.shape[1]) / (~known).sum(-1).clamp(min=1).to(u.dtype)
        finish = _softmax if link == "softmax" else _sigmoid
        log_probs, entropy, expected, left_out = finish(u, v, count)
        values, places = log_probs.topk(top_k)
        parts.append((values, classes[some].gather(-1, places), entropy, expected, left_out))
    return joined(parts, torch.Size((inputs.batch,)))


class _Logits:
    """Sampled logits of a chunk of examples, [n, X, S] for X classes of each."""

    def __init__(self, inputs: Inputs, order: Order | None):
        self.inputs = inputs
        assert inputs.features is not None
        centre = inputs.features.to(inputs.wide).unsqueeze(1)  # [n, 1, D]
        self.mixing: Tensor | None = None
        noise = inputs.noise
        if noise is None or inputs.z is None:
            self.rows = centre
        elif order == "samples" or (order is None and inputs.samples <= noise.size):
            self.rows = centre + noise.draw(inputs.z.to(inputs.features.dtype)).to(inputs.wide)  # [n, S, D]
        else:
            basis = noise.basis().to(inputs.wide)
            self.rows = torch.cat((centre, basis.expand(len(centre), -1, -1)), dim=1)  # [n, Q + 1, D]
            self.mixing = mixing_of(inputs, slice(None))  # [n, S, Q + 1]

    def of_candidates(self, classes: Tensor) -> Tensor:
        """Those of classes [n, C]."""
        inputs = self.inputs
        assert inputs.weight is not None
        weight = inputs.weight[classes].to(inputs.wide)  # [n, C, D]
        bias = None if inputs.bias is None else inputs.bias[classes].to(inputs.wide)
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

    Args:
        u: logits of the candidates, [n, C, S].
        v: of the drawn classes, [n, O, S]; overwritten.
        count: how many classes each of those stands for, [n].
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


def _contained(values: Tensor, classes: Tensor) -> Tensor:
    """Whether each of values [O] is among the classes [n, C] of an example: [n, O]."""
    ordered = classes.sort(-1).values
    wanted = values.expand(len(classes), -1).contiguous()
    places = torch.searchsorted(ordered, wanted).clamp_(max=classes.shape[1] - 1)
    return ordered.gather(-1, places) == wanted
