"""Retrieval with embeddings, scores of pairs, and zero-shot classification, whose classifier consists of embeddings of
the class names in prompts."""

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
"""Maximum number of scores or logits in memory."""


@torch.no_grad()
def retrieval_recall(
    images: Tensor, texts: Tensor, ks: Sequence[int] = (1, 5, 10), groups: np.ndarray | Tensor | None = None
) -> dict[str, float]:
    """Return the share of images with their text among the k nearest texts, and of texts with their image.

    Scores are computed in blocks, never as an n × n matrix. A wrong match at equal distance counts as nearer.

    Args:
        images: [n, D], normalised if the model normalises.
        texts: [n, D]; row i belongs to row i of the images.
        ks: values of k in "recall@k".
        groups: [n], equal for pairs with equal texts, which are all correct matches. None if all texts differ.

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
    """Return the share of images with their class among the k nearest classes, and of classes with one of their images.

    Classes without images are not queries. Other arguments and the result are those of `retrieval_recall`.

    Args:
        images: [n, D], normalised if the model normalises.
        labels: [n], class of each image.
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
    """Return the number of wrong keys that are at least as near as the nearest correct key, [n]. Correct keys have the
    query's group; groups are [n] for queries and [K] for keys."""
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
    """Return the predicted noise of each pair, [n]: the square root of the mean of both sides' variances.

    High values mark pairs with an ambiguous image or text. To find pairs that do not match, use `pair_distance`. Sides
    without noise are ignored. Images and texts are outputs of the towers, [n, D].
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
    """Return one minus the similarity of each pair, [n], which also works without noise.

    Images and texts are outputs of the towers, [n, D].
    """
    return 1 - (loss.embed_image(images) * loss.embed_text(texts)).sum(-1)


@torch.no_grad()
def zero_shot_weights(
    encode_text: Callable[[list[str]], Tensor],
    class_names: Sequence[str],
    templates: Sequence[str] = ("{}",),
    block: int = 1024,
) -> Tensor:
    """Return a zero-shot classifier, [K, D]: for each class the mean embedding of its prompts.

        normalize(mean over templates of normalize(encode_text(template with the name)))

    Args:
        encode_text: function from n texts to embeddings [n, D], of any length.
        templates: prompts with {} in place of the name.
        block: number of texts encoded together.
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
    """Return log-probabilities of the classes, [n, K]; for the sigmoid link those of independent classes.

        num_samples = 0:  log_softmax(scale · embed_image(images) @ weights.T)
        num_samples = S:  log of the mean over S draws of softmax(scale · (embedding + noise) @ weights.T)

    Args:
        images: [n, D], outputs of the image tower.
        weights: [K, D], from `zero_shot_weights`.
        num_samples: S; 0 uses embeddings without noise, as in the paper.
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
    """Yield `zero_shot_log_probs` of blocks of images, without storing [n, K]."""
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
