"""Reference implementation of the paper's contrastive losses (Section "Contrastive learning"), with all samples at
once. `hetxl.contrastive` computes the same losses block by block and is tested against these.

The batch is the classifier. In the direction image → text, the queries are the images, with noise, and the keys are the
texts, without noise; the other direction swaps them. The sigmoid loss has no directions: each pair is a binary
decision, with noise on both embeddings.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.functional._torch import to_accumulation_dtype
from hetxl.functional.links import mean_sigmoid, mean_softmax
from hetxl.functional.noise import GaussianNoise
from hetxl.registry import Link

Normalize = Literal["before", "after", "both", "none"]
NORMALIZE: tuple[Normalize, ...] = get_args(Normalize)


def noise_base(embeddings: Tensor, normalize: Normalize) -> Tensor:
    """Return the embeddings that noise is added to and that determine its covariance, [B, D], in at least float32. They
    have length 1 if they are normalised "before" the noise."""
    wide = to_accumulation_dtype(embeddings)
    return F.normalize(wide, dim=-1) if normalize in ("before", "both") else wide


def contrastive_keys(embeddings: Tensor, normalize: Normalize) -> Tensor:
    """Return embeddings as keys and for comparison at test time, [B, D], of length 1 unless `normalize` is "none"."""
    wide = to_accumulation_dtype(embeddings)
    return wide if normalize == "none" else F.normalize(wide, dim=-1)


def noisy_queries(embeddings: Tensor, noise: GaussianNoise | None, z: Tensor | None, normalize: Normalize) -> Tensor:
    """Return embeddings [B, D] of a tower with S samples of their noise, [B, S, D].

    `noise` belongs to `noise_base(embeddings, normalize)`, and z [B, S, Q] or [S, Q] are its normals; both are None
    without noise.
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
    """Return the loss of a batch of pairs.

    softmax:  1/2B Σ_n (−log p̄(text n | image n) − log p̄(image n | text n)),   noise on the query of each direction
    sigmoid:  1/B Σ_n Σ_i −log p̄(pair or not | image n, text i),              noise on both, and one direction

    with p̄ the mean over the draws.

    Args:
        image_queries: [B, S, D]
        text_queries: [B, S, D]; S may differ (softmax), or be 1.
        image_keys: [B, D] (softmax)
        text_keys: [B, D] (softmax)
        bias: of the logits (sigmoid).
    """
    if link == "softmax":
        return (_direction(image_queries, text_keys, scale) + _direction(text_queries, image_keys, scale)) / 2
    samples = max(image_queries.shape[1], text_queries.shape[1])  # sides without noise are repeated
    images, texts = (queries.expand(-1, samples, -1) for queries in (image_queries, text_queries))
    logits = scale * torch.einsum("nsd,isd->nsi", images, texts) + bias
    log_p, log_not_p = mean_sigmoid(logits)
    pairs = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    return -torch.where(pairs, log_p, log_not_p).sum() / len(logits)


def _direction(queries: Tensor, keys: Tensor, scale: Tensor | float) -> Tensor:
    return -mean_softmax(scale * queries @ keys.T).diagonal().mean()  # of [B, S, B]


def noise_scale(noise: GaussianNoise) -> Tensor:
    """Return √(trace Σ / N), [...]: the root mean square of an example's standard deviations."""
    return noise.variance().mean(-1).sqrt()
