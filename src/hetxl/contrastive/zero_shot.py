"""Zero-shot classification: the classifier's rows are embeddings of the classes' names, put into prompts."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl.contrastive.loss import ContrastiveLoss
from hetxl.functional._checks import integer_at_least
from hetxl.functional.contrastive import noisy_queries

PROMPTS = ("{}", "{} icon", "an icon of {}")
"""For icons, where the model was trained with them."""

LOGITS = 2**24
"""Logits that exist at a time."""


@torch.no_grad()
def zero_shot_weights(
    encode_text: Callable[[list[str]], Tensor],
    class_names: Sequence[str],
    templates: Sequence[str] = ("{}",),
    block: int = 1024,
) -> Tensor:
    """The classifier of some classes, [K, D]: for each the mean of its prompts' embeddings.

        normalize(mean over templates of normalize(encode_text(template with the name)))

    Args:
        encode_text: gives the embeddings [n, D] of n texts, of any length.
        class_names: K
        templates: prompts with {} where the name goes.
        block: texts encoded at a time.

    Returns:
        [K, D], rows of length 1.
    """
    if not class_names or not templates:
        raise ValueError(f"class_names and templates must not be empty, found {len(class_names)} and {len(templates)}")
    for template in templates:
        if template.count("{}") != 1:
            raise ValueError(f"templates must hold {{}} once each, where the name goes, found {template!r}")
    total = None
    for template in templates:
        texts = [template.replace("{}", name) for name in class_names]
        parts = [encode_text(texts[start : start + block]) for start in range(0, len(texts), block)]
        found = F.normalize(torch.cat(parts), dim=-1)
        total = found if total is None else total + found
    assert total is not None
    return F.normalize(total, dim=-1)


@torch.no_grad()
def zero_shot_log_probs(
    loss: ContrastiveLoss,
    images: Tensor,
    weights: Tensor,
    samples: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Log-probabilities of the classes, [n, K]; under the sigmoid link those of each class by itself.

        samples = 0:  log_softmax(scale · embed_image(images) @ weights.T)
        samples = S:  log of the mean over S draws of softmax(scale · (embedding + noise) @ weights.T)

    Args:
        loss: of the training, with a `scale`.
        images: [n, D], as the image tower gives them.
        weights: [K, D], from `zero_shot_weights`.
        samples: S; 0 for the representations without noise, as in the paper.
        generator: of the draws.
    """
    integer_at_least("samples", samples, 0)
    if samples and loss.image_noise is None:
        raise ValueError(f"samples={samples} needs noise on the image side, and this loss has none; use samples=0")
    return torch.cat(list(log_prob_blocks(loss, images, weights, samples, generator)))


def log_prob_blocks(
    loss: ContrastiveLoss, images: Tensor, weights: Tensor, samples: int = 0, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """`zero_shot_log_probs` block by block of the images, so that [n, K] need not exist.

    Args:
        loss: as in `zero_shot_log_probs`.
        images: as in `zero_shot_log_probs`.
        weights: as in `zero_shot_log_probs`.
        samples: as in `zero_shot_log_probs`.
        generator: as in `zero_shot_log_probs`.
    """
    if weights.dim() != 2 or images.dim() != 2 or images.shape[1] != weights.shape[1]:
        raise ValueError(
            f"images must be [n, D] and weights [K, D], found {list(images.shape)} and {list(weights.shape)}"
        )
    scale, bias = loss.scale(), loss.bias
    step = max(1, LOGITS // (max(1, samples) * max(1, len(weights))))
    for start in range(0, max(1, len(images)), step):
        queries = _queries(loss, images[start : start + step], samples, generator)  # [b, S, D]
        logits = scale * (queries @ weights.to(queries.dtype).T)
        if bias is not None:
            logits = logits + bias
        logs = F.logsigmoid(logits) if loss.link == "sigmoid" else F.log_softmax(logits, dim=-1)
        yield torch.logsumexp(logs, dim=1) - math.log(queries.shape[1])


def _queries(loss: ContrastiveLoss, images: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """The representations [b, 1, D], or draws of them [b, S, D]."""
    if not samples or loss.image_noise is None:
        return loss.embed_image(images).unsqueeze(1)
    noise = loss.noise_of_image(images)
    z = loss.image_noise.draw(noise, samples, generator)
    return noisy_queries(images, noise, z, loss.normalize)


@torch.no_grad()
def top_k(
    loss: ContrastiveLoss,
    images: Tensor,
    weights: Tensor,
    k: int = 5,
    samples: int = 0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most probable classes of each image and their log-probabilities, [n, k] each.

    Args:
        loss: as in `zero_shot_log_probs`.
        images: as in `zero_shot_log_probs`.
        weights: as in `zero_shot_log_probs`.
        k: at most K are given.
        samples: as in `zero_shot_log_probs`.
        generator: as in `zero_shot_log_probs`.
    """
    found = [
        block.topk(min(k, len(weights)), dim=-1) for block in log_prob_blocks(loss, images, weights, samples, generator)
    ]
    return torch.cat([part.indices for part in found]), torch.cat([part.values for part in found])
