"""The contrastive losses as the paper writes them (Section "Contrastive learning"): short, plain, with all samples at
once. `hetxl.contrastive` computes the same block by block and is tested against these.

The batch is the classifier. In the direction image → text the queries are the images, with noise, and the keys are the
texts, without; in the other direction the towers change places. The sigmoid loss has no directions: a pair is one
yes-or-no question, and noise is on both of its embeddings.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional.links import Link, mean_sigmoid, mean_softmax
from hetxl.functional.noise import GaussianNoise
from hetxl.functional.precision import accumulate

Normalize = Literal["before", "after", "both", "none"]
NORMALIZE: tuple[Normalize, ...] = get_args(Normalize)


def noise_base(embeddings: Tensor, normalize: Normalize) -> Tensor:
    """What noise is added to, and what its covariance is a function of: [B, D], of length 1 if normalised "before" the
    noise, in at least float32."""
    wide = accumulate(embeddings)
    return F.normalize(wide, dim=-1) if normalize in ("before", "both") else wide


def contrastive_keys(embeddings: Tensor, normalize: Normalize) -> Tensor:
    """Embeddings as keys, and as they are compared at test time: [B, D], of length 1 unless nothing is normalised."""
    wide = accumulate(embeddings)
    return wide if normalize == "none" else F.normalize(wide, dim=-1)


def noisy_queries(embeddings: Tensor, noise: GaussianNoise | None, z: Tensor | None, normalize: Normalize) -> Tensor:
    """Embeddings with S draws of their noise, [B, S, D].

    Args:
        embeddings: [B, D], as the tower gives them.
        noise: of `noise_base(embeddings, normalize)`; None without noise.
        z: [B, S, Q] or [S, Q] standard normals; None without noise.
        normalize: "before" the noise is added, "after" it, "both" or "none".
    """
    if noise is None or z is None:
        return contrastive_keys(embeddings, normalize).unsqueeze(1)
    drawn = noise_base(embeddings, normalize).unsqueeze(1) + noise.draw(z)
    return F.normalize(drawn, dim=-1) if normalize in ("after", "both") else drawn


def contrastive_loss(
    image_queries: Tensor,
    text_queries: Tensor,
    image_keys: Tensor,
    text_keys: Tensor,
    *,
    link: Link,
    scale: Tensor | float,
    bias: Tensor | float = 0.0,
) -> Tensor:
    """The loss of a batch of pairs.

    softmax:  1/2B Σ_n (−log p̄(text n | image n) − log p̄(image n | text n)),   noise on the query of each direction
    sigmoid:  1/B Σ_n Σ_i −log p̄(pair or not | image n, text i),              noise on both, and one direction

    with p̄ the mean over the draws.

    Args:
        image_queries: [B, S, D]
        text_queries: [B, S, D]; S may differ (softmax), or be 1.
        image_keys: [B, D] (softmax)
        text_keys: [B, D] (softmax)
        link: "softmax" or "sigmoid"
        scale: of the logits.
        bias: of the logits (sigmoid).
    """
    if link == "softmax":
        from_images = _direction(image_queries, text_keys, scale)
        from_texts = _direction(text_queries, image_keys, scale)
        return (from_images + from_texts) / 2
    logits = scale * torch.einsum("nsd,isd->nsi", *_as_many(image_queries, text_queries)) + bias
    log_p, log_not_p = mean_sigmoid(logits)
    pairs = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    return -torch.where(pairs, log_p, log_not_p).sum() / len(logits)


def _direction(queries: Tensor, keys: Tensor, scale: Tensor | float) -> Tensor:
    return -mean_softmax(scale * queries @ keys.T).diagonal().mean()  # of [B, S, B]


def _as_many(*draws: Tensor) -> tuple[Tensor, ...]:
    """Draws [B, S, D] of all sides, those without noise repeated."""
    samples = max(each.shape[1] for each in draws)
    return tuple(each.expand(-1, samples, -1) for each in draws)


def noise_scale(noise: GaussianNoise) -> Tensor:
    """√(trace Σ / N), [...]: the root mean square of the standard deviations, one number for each example."""
    variance: Tensor | None = None
    if noise.factors is not None:
        variance = noise.factors.square().sum(-2)  # [N] or [..., N]
        if noise.scale is not None:
            variance = variance * noise.scale.square()
    if noise.residual is not None:
        variance = noise.residual.square() if variance is None else variance + noise.residual.square()
    if variance is None:
        raise ValueError("noise has neither factors nor a residual")
    return variance.mean(-1).sqrt()
