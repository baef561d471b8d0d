"""Retrieval of the other half of a pair, and scores of single pairs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hetxl.contrastive.loss import ContrastiveLoss
from hetxl.functional.contrastive import noise_base

SCORES = 2**24
"""Scores that exist at a time."""


@torch.no_grad()
def retrieval_recall(
    images: Tensor, texts: Tensor, ks: Sequence[int] = (1, 5, 10), groups: np.ndarray | Tensor | None = None
) -> dict[str, float]:
    """How often the right text is among the k nearest of an image, and the right image among those of a text.

    In blocks: the n × n scores never exist at once. A wrong one that is as near as the right one counts as nearer.

    Args:
        images: [n, D], normalised if the model normalises.
        texts: [n, D], row i belongs to row i of the images.
        ks: as in "recall@k".
        groups: [n], pairs whose texts are equal have the same: any of them is right. None for all different.

    Returns:
        "image_to_text@1", … and "text_to_image@1", …, from 0 to 1.
    """
    if images.dim() != 2 or images.shape != texts.shape or not len(images):
        raise ValueError(
            f"images and texts must both be [n, D], n from 1, found {list(images.shape)} and {list(texts.shape)}"
        )
    for name, values in (("images", images), ("texts", texts)):
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name} must be finite, found NaN or infinite embeddings")
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must be numbers from 1, found {list(ks)}")
    same = torch.arange(len(images)) if groups is None else torch.as_tensor(np.asarray(groups))
    if same.shape != (len(images),):
        raise ValueError(f"groups must have one entry for each of {len(images)} pairs, found {list(same.shape)}")
    same = same.to(images.device)
    found = {}
    for name, queries, keys in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        ranks = _ranks(queries, keys, same)
        found |= {f"{name}@{k}": float((ranks < k).double().mean()) for k in ks}
    return found


def _ranks(queries: Tensor, keys: Tensor, same: Tensor) -> Tensor:
    """How many wrong keys are as near as the nearest right one or nearer, [n]."""
    step = max(1, SCORES // len(keys))
    ranks = []
    for start in range(0, len(queries), step):
        scores = queries[start : start + step] @ keys.T  # [b, n]
        right = same[start : start + step, None] == same
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        ranks.append(((scores >= best) & ~right).sum(1))
    return torch.cat(ranks)


@torch.no_grad()
def pair_noise(loss: ContrastiveLoss, images: Tensor, texts: Tensor) -> Tensor:
    """How noisy the model finds each pair, [n]: the root of the mean of both sides' variances.

    A score for filtering pairs whose picture or text is hard to place, the highest first; pairs of a good picture with
    a good text of another are found by `pair_distance`. A side without noise is left out.

    Args:
        loss: of the training.
        images: [n, D], as the image tower gives them.
        texts: [n, D], as the text tower gives them.
    """
    found = []
    for module, embeddings in ((loss.image_noise, images), (loss.text_noise, texts)):
        if module is not None:
            found.append(module.scale_of(noise_base(embeddings, loss.normalize)).square())
    if not found:
        raise ValueError("pair_noise needs noise on a side, and this loss has none (DET); use pair_distance")
    return torch.stack(found).mean(0).sqrt()


@torch.no_grad()
def pair_distance(loss: ContrastiveLoss, images: Tensor, texts: Tensor) -> Tensor:
    """One minus the similarity of each pair, [n]: the score that a model without noise has.

    Args:
        loss: of the training.
        images: [n, D], as the image tower gives them.
        texts: [n, D], as the text tower gives them.
    """
    return 1 - (loss.embed_image(images) * loss.embed_text(texts)).sum(-1)


def auroc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """The probability that a positive has a higher score than a negative, ties half; None unless there are both.

    Args:
        scores: [n]
        positive: [n] bool
    """
    scores, positive = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    if scores.shape != positive.shape or scores.ndim != 1:
        raise ValueError(f"scores and positive must both be [n], found {list(scores.shape)}, {list(positive.shape)}")
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    _, places, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    ranks = (last - (sizes - 1) / 2)[places]  # from 1, ties share the mean
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))
