"""Use of embeddings: retrieval of the other half of a pair, scores of single pairs, and zero-shot classification.

A zero-shot classifier's rows are embeddings of the classes' names, put into prompts.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl._checks import integer_at_least, renamed
from hetxl.contrastive.loss import ContrastiveLoss
from hetxl.functional.contrastive import noise_base, noisy_queries
from hetxl.metrics.summary import score_auroc as auroc

__all__ = [
    "auroc",
    "class_retrieval",
    "pair_distance",
    "pair_noise",
    "retrieval_recall",
    "top_k",
    "zero_shot_log_probs",
    "zero_shot_weights",
]

SCORES = 2**24
"""Scores, or logits, that exist at a time."""


@torch.no_grad()
def retrieval_recall(
    images: Tensor, texts: Tensor, ks: Sequence[int] = (1, 5, 10), groups: np.ndarray | Tensor | None = None
) -> dict[str, float]:
    """Return how often the right text is among the k nearest of an image, and the right image among those of a text.

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
    recalls = {}
    for name, queries, keys in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        ranks = _ranks(queries, keys, same, same)
        recalls |= {f"{name}@{k}": float((ranks < k).double().mean()) for k in ks}
    return recalls


@torch.no_grad()
def class_retrieval(
    images: Tensor, labels: np.ndarray | Tensor, weights: Tensor, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Return how often an image's class is among the k nearest, and one of a class's images is.

    Classes without images do not count as queries. Other arguments and the result are as of `retrieval_recall`.

    Args:
        images: [n, D], normalised if the model normalises.
        labels: [n], the class of each.
        weights: [K, D], from `zero_shot_weights`.
    """
    of_images = torch.as_tensor(np.asarray(labels)).to(images.device)
    classes = torch.arange(len(weights), device=images.device)
    present = of_images.unique()
    sides = {
        "image_to_text": (images, weights, of_images, classes),
        "text_to_image": (weights[present], images, present, of_images),
    }
    ranks = {name: _ranks(*side) for name, side in sides.items()}
    return {f"{name}@{k}": float((rank < k).double().mean()) for name, rank in ranks.items() for k in ks}


def _ranks(queries: Tensor, keys: Tensor, own: Tensor, of_keys: Tensor) -> Tensor:
    """Return how many wrong keys are as near as the nearest right one or nearer, [n]; right ones are of the same group,
    [n] of queries and [K] of keys."""
    step = max(1, SCORES // len(keys))
    ranks = []
    for start in range(0, len(queries), step):
        scores = queries[start : start + step] @ keys.T  # [b, n]
        right = own[start : start + step, None] == of_keys
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        ranks.append(((scores >= best) & ~right).sum(1))
    return torch.cat(ranks)


@torch.no_grad()
def pair_noise(loss: ContrastiveLoss, images: Tensor, texts: Tensor) -> Tensor:
    """Return how noisy the model finds each pair, [n]: the root of the mean of both sides' variances.

    A score for filtering pairs whose image or text is ambiguous, the highest first; pairs of a good image with
    a good text of another are found by `pair_distance`. A side without noise is left out. Images and texts are [n, D],
    as the towers give them.
    """
    variances = [
        module.scale_of(noise_base(embeddings, loss.normalize)).square()
        for module, embeddings in ((loss.image_noise, images), (loss.text_noise, texts))
        if module is not None
    ]
    if not variances:
        raise ValueError("pair_noise needs noise on a side, and this loss has none (DET); use pair_distance")
    return torch.stack(variances).mean(0).sqrt()


@torch.no_grad()
def pair_distance(loss: ContrastiveLoss, images: Tensor, texts: Tensor) -> Tensor:
    """Return one minus the similarity of each pair, [n]: the score that a model without noise has.

    Images and texts are [n, D], as the towers give them.
    """
    return 1 - (loss.embed_image(images) * loss.embed_text(texts)).sum(-1)


@torch.no_grad()
def zero_shot_weights(
    encode_text: Callable[[list[str]], Tensor],
    class_names: Sequence[str],
    templates: Sequence[str] = ("{}",),
    block: int = 1024,
) -> Tensor:
    """Return the classifier of some classes, [K, D]: for each the mean of its prompts' embeddings.

        normalize(mean over templates of normalize(encode_text(template with the name)))

    Args:
        encode_text: gives the embeddings [n, D] of n texts, of any length.
        templates: prompts with {} where the name goes.
        block: texts encoded at a time.
    """
    if not class_names or not templates:
        raise ValueError(f"class_names and templates must not be empty, found {len(class_names)} and {len(templates)}")
    for template in templates:
        if template.count("{}") != 1:
            raise ValueError(f"templates must hold {{}} once each, where the name goes, found {template!r}")
    total: Tensor | None = None
    for template in templates:
        texts = [template.replace("{}", name) for name in class_names]
        parts = [encode_text(texts[start : start + block]) for start in range(0, len(texts), block)]
        embeddings = F.normalize(torch.cat(parts), dim=-1)
        total = embeddings if total is None else total + embeddings
    assert total is not None
    return F.normalize(total, dim=-1)


@renamed(samples="num_samples")
@torch.no_grad()
def zero_shot_log_probs(
    loss: ContrastiveLoss,
    images: Tensor,
    weights: Tensor,
    num_samples: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return log-probabilities of the classes, [n, K]; under the sigmoid link those of each class by itself.

        num_samples = 0:  log_softmax(scale · embed_image(images) @ weights.T)
        num_samples = S:  log of the mean over S draws of softmax(scale · (embedding + noise) @ weights.T)

    Args:
        images: [n, D], as the image tower gives them.
        weights: [K, D], from `zero_shot_weights`.
        num_samples: S; 0 for the representations without noise, as in the paper.
    """
    integer_at_least("num_samples", num_samples, 0)
    if num_samples and loss.image_noise is None:
        raise ValueError(
            f"num_samples={num_samples} needs noise on the image side, and this loss has none; use num_samples=0"
        )
    return torch.cat(list(log_prob_blocks(loss, images, weights, num_samples, generator)))


def log_prob_blocks(
    loss: ContrastiveLoss,
    images: Tensor,
    weights: Tensor,
    num_samples: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """`zero_shot_log_probs` block by block of the images, so that [n, K] need not exist."""
    if weights.dim() != 2 or images.dim() != 2 or images.shape[1] != weights.shape[1]:
        raise ValueError(
            f"images must be [n, D] and weights [K, D], found {list(images.shape)} and {list(weights.shape)}"
        )
    scale, bias = loss.scale(), loss.bias
    step = max(1, SCORES // (max(1, num_samples) * max(1, len(weights))))
    for start in range(0, max(1, len(images)), step):
        part = images[start : start + step]
        if not num_samples or loss.image_noise is None:
            queries = loss.embed_image(part).unsqueeze(1)  # [b, 1, D]
        else:
            noise = loss.noise_of_image(part)
            z = loss.image_noise.draw(noise, num_samples, generator)
            queries = noisy_queries(part, noise, z, loss.normalize)  # [b, S, D]
        logits = scale * (queries @ weights.to(queries.dtype).T)
        if bias is not None:
            logits = logits + bias
        logs = F.logsigmoid(logits) if loss.link == "sigmoid" else F.log_softmax(logits, dim=-1)
        yield torch.logsumexp(logs, dim=1) - math.log(queries.shape[1])


@renamed(samples="num_samples")
@torch.no_grad()
def top_k(
    loss: ContrastiveLoss,
    images: Tensor,
    weights: Tensor,
    k: int = 5,
    num_samples: int = 0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k most probable classes of each image and their log-probabilities, [n, min(k, K)] each.

    Other arguments are those of `zero_shot_log_probs`.
    """
    blocks = [
        block.topk(min(k, len(weights)), dim=-1)
        for block in log_prob_blocks(loss, images, weights, num_samples, generator)
    ]
    return torch.cat([part.indices for part in blocks]), torch.cat([part.values for part in blocks])
