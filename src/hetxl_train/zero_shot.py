"""`hetxl contrastive zero-shot`: classify labelled images by the similarity of their class names in templates."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetxl._checks import one_of
from hetxl._files import write_json
from hetxl._seeds import derive_seed
from hetxl.contrastive.retrieval import class_retrieval, top_k, zero_shot_weights
from hetxl.registry import HEAD_LABELS
from hetxl_train.config import read_templates
from hetxl_train.contrastive_runs import load_contrastive_run
from hetxl_train.data import open_dataset
from hetxl_train.data.dataset import SPLITS, UnreadableExamples
from hetxl_train.data.label_files import read_names
from hetxl_train.data.pairs import Texts
from hetxl_train.distributed import find_device
from hetxl_train.examples import image_of
from hetxl_train.loaders import blocks, reader
from hetxl_train.report.tables import Column, Row, Table
from hetxl_train.towers import BLOCK, TextReader

KS = (1, 5, 10)
SHOWN = 24
"""Number of images in the report."""


@torch.no_grad()
def zero_shot_run(
    run: str | Path, data: str, *, split: str = "test", templates: str | None = None, names: Path | None = None,
    num_samples: int = 0, limit: int = 0, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Return the zero-shot accuracy of a run on labelled data, and store it in the run for its report.

    Args:
        data: data as for `hetxl train`, with inputs for the run's image tower; all rows if it has no splits.
        templates: prompts with {} in place of the name, separated by |, or a file of them; None for those of the run.
        names: file with the class names in the order of the data's classes; None for the data's names.
        num_samples: S of the noise on the images; 0 for no noise, as in the paper.
        limit: number of images, drawn at random; 0 for all.

    Returns:
        "top1", "top5", "mean_per_class" (top-1, averaged over classes), "image_to_text@k", "text_to_image@k" (whether
        one of the k nearest images has the class), "classes", "images", "chance", "examples", and the settings.
    """
    one_of("split", split, SPLITS)
    trained = load_contrastive_run(run, find_device(device))
    model, config, spec = trained.model, trained.run.config, trained.specs.image
    if num_samples and model.loss.image_noise is None:
        raise ValueError(f"num_samples={num_samples} needs noise on the image side, and {run} has none; leave it out")
    transform = spec.transform if spec.kind == "image" else None
    dataset = open_dataset(data, transform=transform)
    if (dataset.input.kind, dataset.input.shape) != (spec.kind, spec.shape):
        raise ValueError(
            f"{data} has {dataset.input.kind} of shape {list(dataset.input.shape)}, and the run's image tower takes "
            f"{spec.kind} of shape {list(spec.shape)}"
        )
    if split not in dataset.splits:
        raise ValueError(f"split {split!r} is not in this data, which has {', '.join(dataset.splits)}")
    class_names = list(dataset.class_names) if names is None else read_names(names)
    if len(class_names) != dataset.num_classes:
        raise ValueError(f"{names} has {len(class_names):,} names, but the data has {dataset.num_classes:,} classes")
    prompts = config.prompts if templates is None else read_templates(templates)
    texts = TextReader.of(config)

    def encode(some: list[str]) -> torch.Tensor:
        return model.text(texts.once(Texts(captions=some)).take(np.arange(len(some))).to(model.device))

    weights = zero_shot_weights(encode, class_names, prompts)
    rows = dataset.splits[split]
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[: limit or len(rows)])
    images, read = _embedded(model, rows, chosen, config.workers)
    labels = rows.labels.subset(read)
    if labels.multi:
        raise ValueError(f"{data} must have one label for each image, found lists")
    generator = torch.Generator(device=model.device).manual_seed(derive_seed(config.seed, 26))
    best, logs = top_k(model.loss, images, weights, 5, num_samples, generator)
    best, targets = best.cpu().numpy(), np.asarray(labels.ids)
    hits = best == targets[:, None]
    present = np.unique(targets)
    result: dict[str, Any] = {
        "run": str(run),
        "label": HEAD_LABELS[config.head],
        "data": dataset.name,
        "split": split,
        "templates": list(prompts),
        "num_samples": num_samples,
        "images": len(read),
        "classes": len(class_names),
        "chance": 1 / len(class_names),
        "top1": float(hits[:, 0].mean()),
        "top5": float(hits.any(1).mean()),
        "mean_per_class": float(np.mean([hits[targets == label, 0].mean() for label in present])),
        **class_retrieval(model.loss.embed_image(images), targets, weights, KS),
    }
    result["examples"] = [
        {
            "row": int(read[index]),
            "image": image_of(shown := rows.show(int(read[index]))),
            "path": shown.image,
            "label": class_names[int(targets[index])],
            "top": [[class_names[k], value] for k, value in zip(best[index, :3].tolist(), values[:3], strict=True)],
            "hit": bool(hits[index, 0]),
        }
        for index in np.random.default_rng(0).permutation(len(read))[:SHOWN].tolist()
        for values in [logs[index].exp().tolist()]
    ]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{dataset.name}-{split}")
    write_json(trained.run.path / f"zero-shot-{name}.json", result)
    return result


def _embedded(model: Any, split: Any, rows: np.ndarray, workers: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return embeddings [n, D] of the readable images, and their rows [n]."""
    unreadable, parts, read = UnreadableExamples(), [], []
    for fetched in reader(split, workers)(blocks(rows, BLOCK)):
        unreadable.add(fetched)
        if len(fetched.rows):
            parts.append(model.image(fetched.inputs.to(model.device)))
            read.append(fetched.rows)
    if not parts:
        raise ValueError(f"none of {len(rows):,} images could be read")
    return torch.cat(parts), np.concatenate(read)


def zero_shot_table(results: Sequence[dict[str, Any]]) -> Table:
    """Return results of `zero_shot_run` as a table with a column each."""
    rows = {
        "top-1": "top1",
        "top-5": "top5",
        "top-1, mean over classes": "mean_per_class",
        "chance": "chance",
        **{f"image to class, recall@{k}": f"image_to_text@{k}" for k in KS},
        **{f"class to image, recall@{k}": f"text_to_image@{k}" for k in KS},
    }
    first = results[0]
    sizes = f"{first['images']:,} images, {first['classes']:,} names"
    title = f"{first['label']} on {first['data']}, {first['split']}: {sizes}"
    cells = [Row(name, [f"{result[key]:.1%}" for result in results]) for name, key in rows.items()]
    return Table(title, [Column(Path(result["run"]).name) for result in results], cells)
