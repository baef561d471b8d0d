"""Reference implementation of the primitives, with the whole [..., S, K] tensor of sampled logits and autograd.

Faster implementations are tested against these functions. The arguments are those of the same functions in
`hetxl.functional`: a distribution over logits [..., K], standard normals z [..., S, Q] or [S, Q] (None without noise),
τ and the link; for `order` see `LogitDistribution.sample`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional._torch import to_accumulation_dtype
from hetxl.functional.distribution import LogitDistribution, Order
from hetxl.functional.links import log_mean_exp, mean_sigmoid, mean_softmax, sigmoid_entropy, softmax_entropy
from hetxl.functional.targets import UNWEIGHTED, Targets, Weights, coefficients, dense_labels, known_ids, reduce_losses
from hetxl.registry import Link


def mc_log_probs(
    distribution: LogitDistribution, z: Tensor | None, *, temperature: Tensor | float, link: Link, order: Order | None
) -> Tensor:
    """Log-probabilities [..., K] averaged over samples (Eq. heteroscedastic_probs with σ_τ), differentiable.

    probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
    return probs.log()                                                   # sigmoid: logit(probs)
    """
    logits = distribution.sample(z, order) / temperature  # [..., S, K]
    if link == "softmax":
        return mean_softmax(logits)
    log_p, log_not_p = mean_sigmoid(logits)
    return log_p - log_not_p


def mc_log_normalisers(
    distribution: LogitDistribution,
    z: Tensor | None,
    *,
    temperature: Tensor | float,
    excluded: Tensor | None = None,
    order: Order | None = "samples",
) -> Tensor:
    """Return log Σ_k exp(u_k / τ) of every sample, [..., S], over all classes except `excluded` [...], −1 for none."""
    logits = distribution.sample(z, order) / temperature  # [..., S, K]
    if excluded is not None:
        classes = torch.arange(logits.shape[-1], device=logits.device)
        logits = logits.masked_fill((classes == excluded.unsqueeze(-1)).unsqueeze(-2), -torch.inf)
    return logits.logsumexp(-1)


def mc_nll(
    distribution: LogitDistribution,
    z: Tensor | None,
    targets: Targets,
    *,
    temperature: Tensor | float,
    link: Link,
    order: Order | None = "samples",
    reduction: str = "mean",
    weights: Weights = UNWEIGHTED,
) -> Tensor:
    """Negative log-likelihood of the targets under the averaged probabilities, a scalar, or [...] for reduction "none".

    probs = softmax(distribution.sample(z) / temperature, -1).mean(-2)
    return -probs.log().gather(-1, ids)                                  # sigmoid: summed binary cross-entropy
    """
    logits = distribution.sample(z, order) / temperature  # [..., S, K]
    batch_shape, classes = logits.shape[:-2], logits.shape[-1]
    if link == "sigmoid":
        log_p, log_not_p = mean_sigmoid(logits)
        labels = dense_labels(targets, batch_shape, classes, logits)
        losses = -(labels * log_p + (1 - labels) * log_not_p)
        losses = (losses if weights.classes is None else losses * weights.classes).sum(-1)
    elif targets.ids is not None and not weights.smoothing:
        index = known_ids(targets.ids)[..., None, None].expand(*logits.shape[:-1], 1)  # [..., S, 1]
        log_p = logits.gather(-1, index).squeeze(-1) - logits.logsumexp(-1)  # [..., S]
        losses = -log_mean_exp(log_p, dim=-1)
    else:
        losses = -(coefficients(targets, weights, classes, logits) * mean_softmax(logits)).sum(-1)
    factor, normaliser = weights.factors(targets, batch_shape, link, logits)
    return reduce_losses(losses, factor, normaliser, reduction)


def mc_predict(
    distribution: LogitDistribution, z: Tensor | None, *, temperature: Tensor | float, link: Link, order: Order | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p̄ [..., K], the entropy of p̄ [...] and the mean entropy of the samples [...]."""
    logits = to_accumulation_dtype(distribution.sample(z, order) / temperature)
    if link == "softmax":
        per_sample = torch.log_softmax(logits, dim=-1)
        log_probs = log_mean_exp(per_sample, dim=-2)
        return log_probs, softmax_entropy(log_probs), softmax_entropy(per_sample).mean(-1)
    log_p, log_not_p = mean_sigmoid(logits)
    expected = sigmoid_entropy(F.logsigmoid(logits), F.logsigmoid(-logits)).mean(-1)
    return log_p, sigmoid_entropy(log_p, log_not_p), expected
