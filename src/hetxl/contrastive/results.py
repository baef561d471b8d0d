"""What a finished contrastive run writes: metrics of its evaluation, and examples that a report shows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hetxl.contrastive.config import ContrastiveConfig
from hetxl.contrastive.evaluate import class_weights, recall_of, swap_scores, zero_shot
from hetxl.contrastive.model import Embedded, TwoTowers, embed_pairs
from hetxl.contrastive.retrieval import pair_noise
from hetxl.contrastive.texts import TextReader
from hetxl.contrastive.zero_shot import top_k
from hetxl.data.pairs import Pairs, PairSplit
from hetxl.evaluation.examples import embedded, thumbnail
from hetxl.training.order import derive

EXAMPLES = 24
"""Never-seen pictures that are shown, and at most half as many pairs of each other kind."""

SCORED = 8000
"""Training pairs whose noise is scored, at most."""


class Evaluation(NamedTuple):
    """Of a trained model.

    Attributes:
        result: "metrics" by split and, where texts were swapped, "swaps"; for JSON.
        examples: "zero_shot", and "noisiest" and "calmest" pairs; for JSON.
    """

    result: dict[str, Any]
    examples: dict[str, Any]


@torch.no_grad()
def evaluate_pairs(
    model: TwoTowers,
    pairs: Pairs,
    texts: TextReader,
    config: ContrastiveConfig,
    *,
    samples: int | None = None,
    splits: Sequence[str] = ("validation", "test"),
    seen: set[str] | None = None,
) -> Evaluation:
    """Retrieval on the validation and test pairs, zero-shot classification on the test pairs, scores of swapped pairs.

    Args:
        model: in evaluation mode.
        pairs: all splits.
        texts: reads texts for the model.
        config: of the run.
        samples: S of a second zero-shot evaluation; None for the configuration's, 0 for none.
        splits: to evaluate, of those that there are.
        seen: texts that were trained on; None for those of the training split, where there is one.
    """
    train = pairs.splits.get("train")
    if seen is None and train is not None and (captions := train.captions()) is not None:
        seen = set(captions)
    samples = config.eval_samples if samples is None else samples
    if model.loss.image_noise is None:
        samples = 0
    metrics: dict[str, Any] = {}
    examples: dict[str, Any] = {}
    for name in splits:
        if name not in pairs.splits:
            continue
        split = pairs.splits[name]
        table = texts.table(split.texts)
        found = embed_pairs(model, split, table, workers=config.workers)
        metrics[name] = recall_of(model, split, found)
        if name == "test" or "test" not in pairs.splits:
            options: dict[str, Any] = {"seen": seen, "seed": derive(config.seed, 26)}
            metrics[name]["zero_shot"] = zero_shot(model, split, found, texts, config.prompts, **options)
            if samples:
                metrics[name]["zero_shot_sampled"] = zero_shot(
                    model, split, found, texts, config.prompts, samples=samples, **options
                )
            examples["zero_shot"] = _named(model, split, found, texts, config, seen)
    result: dict[str, Any] = {"metrics": metrics}
    if train is not None and "test" in splits:
        rows = np.sort(np.random.default_rng(0).permutation(len(train))[:SCORED])
        found = embed_pairs(model, train, texts.table(train.texts), rows, workers=config.workers)
        if train.swaps is not None:
            result["swaps"] = swap_scores(model, train, found)
        examples |= _noisy(model, train, found)
    return Evaluation(result, examples)


def summary_line(result: dict[str, Any]) -> str:
    """What a result says, in one line.

    Args:
        result: with "metrics".
    """
    parts = []
    for name, metrics in result["metrics"].items():
        if "zero_shot" in metrics:
            found = metrics["zero_shot"]
            parts.append(
                f"{name} zero-shot top-1 {found['top1']:.1%}, top-5 {found['top5']:.1%} of {found['classes']:,} names"
            )
        parts.append(f"{name} recall@1 {metrics['image_to_text@1']:.1%} / {metrics['text_to_image@1']:.1%}")
    swaps = result.get("swaps", {})
    parts += [
        f"AUROC of the {kind} for swapped pairs {swaps[f'{kind}_auroc']:.3f}"
        for kind in ("noise", "distance")
        if swaps.get(f"{kind}_auroc") is not None
    ]
    return "; ".join(parts)


def _named(
    model: TwoTowers,
    split: PairSplit,
    found: Embedded,
    texts: TextReader,
    config: ContrastiveConfig,
    seen: set[str] | None,
) -> list[dict[str, Any]]:
    """Some pictures with the three names that the model finds most probable; first those with names never seen."""
    _, first, labels = np.unique(split.groups[found.rows], return_index=True, return_inverse=True)
    weights, names = class_weights(model, split, found, first, texts, config.prompts)
    if names is None:
        return []
    order = np.random.default_rng(0).permutation(len(found.rows))
    if seen is not None:
        never = np.array([names[label] not in seen for label in labels[order]])
        order = np.concatenate((order[never], order[~never]))
    chosen = order[:EXAMPLES]
    best, logs = top_k(model.loss, found.images[torch.from_numpy(chosen)], weights, 3)
    entries = []
    for place, ids, values in zip(chosen, best.tolist(), logs.exp().tolist(), strict=True):
        label = names[int(labels[place])]
        entry = _shown(split, int(found.rows[place])) | {
            "label": label,
            "top": [[names[number], value] for number, value in zip(ids, values, strict=True)],
            "hit": names[ids[0]] == label,
        }
        if seen is not None:
            entry["unseen"] = label not in seen
        entries.append(entry)
    return entries


def _noisy(model: TwoTowers, split: PairSplit, found: Embedded) -> dict[str, list[dict[str, Any]]]:
    """The pairs with the most noise, and those with the least; none for a model without noise."""
    if model.loss.image_noise is None and model.loss.text_noise is None:
        return {}
    scores = pair_noise(model.loss, found.images, found.texts).cpu().numpy()
    mask = None if split.swaps is None else split.swaps.mask(len(split))[found.rows]
    order = np.argsort(-scores, kind="stable")

    def entries(places: np.ndarray) -> list[dict[str, Any]]:
        return [
            _shown(split, int(found.rows[place]))
            | {
                "label": split.caption(int(found.rows[place])) or "",
                "noise": float(scores[place]),
                "swapped": None if mask is None else bool(mask[place]),
            }
            for place in places
        ]

    half = EXAMPLES // 2
    return {"noisiest": entries(order[:half]), "calmest": entries(order[::-1][:half])}


def _shown(split: PairSplit, row: int) -> dict[str, Any]:
    """A picture as a data: address, where there is one."""
    shown = split.images.show(row)
    image = None
    if shown.pixels is not None:
        image = embedded(shown.pixels)
    elif shown.image is not None:
        image = thumbnail(shown.image)
    return {"row": row, "image": image, "path": shown.image}
