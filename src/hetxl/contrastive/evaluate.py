"""Evaluation of two towers: zero-shot classification, retrieval both ways, and finding swapped pairs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hetxl.contrastive.model import Embedded, TwoTowers, embed_pairs
from hetxl.contrastive.retrieval import auroc, pair_distance, pair_noise, retrieval_recall
from hetxl.contrastive.texts import TextReader, TextTable
from hetxl.contrastive.zero_shot import top_k, zero_shot_weights
from hetxl.data.pairs import PairSplit, Texts

KS = (1, 5, 10)
TOP = (1, 5)


@torch.no_grad()
def validate(
    model: TwoTowers, split: PairSplit, table: TextTable, limit: int = 0, batch_size: int = 256, workers: int = 0
) -> dict[str, float]:
    """Loss without noise, over batches as large as in training, and recall, of the first pairs of a random order.

    Args:
        model: in evaluation mode.
        split: of the pairs.
        table: of its texts.
        limit: at most so many pairs; 0 for all.
        batch_size: of the loss.
        workers: processes that decode pictures.
    """
    rows = np.random.default_rng(0).permutation(len(split))[: limit or len(split)]
    found = embed_pairs(model, split, table, rows, workers=workers)
    size = min(batch_size, len(found.rows))
    starts = range(0, len(found.rows) - size + 1, size)  # a smaller last batch would have a lower loss
    losses = [
        float(model.loss(found.images[at : at + size], found.texts[at : at + size], num_samples=0)) for at in starts
    ]
    return {"loss": float(np.mean(losses)), **recall_of(model, split, found)}


def recall_of(model: TwoTowers, split: PairSplit, found: Embedded) -> dict[str, float]:
    """Recall at 1, 5 and 10 both ways.

    Args:
        model: in evaluation mode.
        split: of the pairs; those with equal texts count for each other.
        found: their embeddings.
    """
    images, texts = model.loss.embed_image(found.images), model.loss.embed_text(found.texts)
    return retrieval_recall(images, texts, KS, split.groups[found.rows])


@torch.no_grad()
def zero_shot(
    model: TwoTowers,
    split: PairSplit,
    found: Embedded,
    reader: TextReader,
    templates: Sequence[str],
    *,
    seen: set[str] | None = None,
    samples: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Accuracy of naming the images of a split, where every different text is a class.

    Args:
        model: in evaluation mode.
        split: of the pairs.
        found: their embeddings.
        reader: of texts.
        templates: prompts.
        seen: texts of the training pairs; accuracy is also told for classes that are none of them.
        samples: S; 0 for the representations without noise.
        seed: of the draws.

    Returns:
        "classes", "chance", "top1", "top5", and with `seen` "unseen_classes", "unseen_top1" and "unseen_top5".
    """
    groups = split.groups[found.rows]
    _, first, labels = np.unique(groups, return_index=True, return_inverse=True)
    weights, names = class_weights(model, split, found, first, reader, templates)
    device = found.images.device
    generator = torch.Generator(device=device).manual_seed(seed)
    best, _ = top_k(model.loss, found.images, weights, max(TOP), samples, generator)
    hits = best.cpu().numpy() == labels[:, None]  # [n, 5]
    result: dict[str, Any] = {"classes": len(first), "chance": 1 / len(first), "samples": samples}
    result |= {f"top{k}": float(hits[:, :k].any(1).mean()) for k in TOP}
    if seen is not None and names is not None:
        never = np.array([name not in seen for name in names])
        chosen = never[labels]
        result["unseen_classes"] = int(never.sum())
        if chosen.any():
            result |= {f"unseen_top{k}": float(hits[chosen, :k].any(1).mean()) for k in TOP}
    return result


@torch.no_grad()
def class_weights(
    model: TwoTowers,
    split: PairSplit,
    found: Embedded,
    first: np.ndarray,
    reader: TextReader,
    templates: Sequence[str],
) -> tuple[torch.Tensor, list[str] | None]:
    """The zero-shot classifier of some pairs' texts, [K, D], and the names of its classes where they have any.

    Args:
        model: in evaluation mode.
        split: of the pairs.
        found: their embeddings.
        first: [K] places in `found`, one for each class.
        reader: of texts.
        templates: prompts; texts that are vectors take none.
    """
    rows = found.rows[first]
    if split.texts.captions is None:
        return torch.nn.functional.normalize(found.texts[first], dim=-1), None
    names = [split.texts.captions[int(place)] for place in split.sources[rows]]
    if split.texts.vectors is not None:
        return torch.nn.functional.normalize(found.texts[first], dim=-1), names
    device = found.images.device

    def encode(texts: list[str]) -> torch.Tensor:
        table = reader.once(Texts(captions=texts))
        return model.text(table.take(np.arange(len(texts))).to(device))

    return zero_shot_weights(encode, names, templates), names


@torch.no_grad()
def swap_scores(model: TwoTowers, split: PairSplit, found: Embedded) -> dict[str, Any]:
    """How well scores of single pairs find those that were swapped.

    Args:
        model: in evaluation mode.
        split: the training pairs, with their swaps.
        found: embeddings of some of them.

    Returns:
        "swapped" (their share), "distance_auroc" and, where there is noise, "noise_auroc", "noise_mean_swapped" and
        "noise_mean_kept".
    """
    if split.swaps is None:
        raise ValueError("split must have swaps, found none; make them with hetxl.data.pairs_noise.swapped")
    mask = split.swaps.mask(len(split))[found.rows]
    distance = pair_distance(model.loss, found.images, found.texts).cpu().numpy()
    result: dict[str, Any] = {"swapped": float(mask.mean()), "distance_auroc": auroc(distance, mask)}
    if model.loss.image_noise is not None or model.loss.text_noise is not None:
        noise = pair_noise(model.loss, found.images, found.texts).cpu().numpy()
        result["noise_auroc"] = auroc(noise, mask)
        if mask.any() and not mask.all():
            result["noise_mean_swapped"], result["noise_mean_kept"] = (
                float(noise[mask].mean()),
                float(noise[~mask].mean()),
            )
    return result
