"""`hetxl contrastive evaluate`: a trained run on its own pairs, or on others."""

import dataclasses
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from hetxl.contrastive.config import LABELS
from hetxl.contrastive.evaluate import KS
from hetxl.contrastive.results import evaluate_pairs
from hetxl.contrastive.run import load_run
from hetxl.contrastive.texts import TextReader
from hetxl.contrastive.train import open_data
from hetxl.data.pairs import open_pairs
from hetxl.training.distributed import find_device


def evaluate_run(
    path: str | Path,
    data: str | None = None,
    *,
    samples: int = 0,
    templates: str | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Evaluate a run.

    Args:
        path: its directory.
        data: pairs as for training; those from files that have no splits are all evaluated. None for the run's own.
        samples: S of a second zero-shot evaluation with noise; 0 for none.
        templates: prompts with | between; None for those of the run.
        device: where to compute.

    Returns:
        "run", "label", "data", "metrics" by split, and for the run's own pairs "swaps" where texts were swapped.
    """
    trained = load_run(path, find_device(device))
    config = trained.run.config
    if templates is not None:
        config = dataclasses.replace(config, templates=templates)
    if samples and trained.model.loss.image_noise is None:
        raise ValueError(f"samples={samples} needs noise on the image side, and {path} has none; leave it out")
    texts = TextReader(config.text, config.buckets)
    seen: set[str] | None = None
    if data is None:
        pairs = open_data(config)
    else:
        size = trained.specs.image.shape[-1] if trained.specs.image.kind == "image" else config.image_size
        pairs = open_pairs(data, image_size=size, seed=config.data_seed, whole=True)
        for name, wanted, found in (
            ("pictures", trained.specs.image, pairs.image),
            ("texts", trained.specs.text, texts.spec(pairs)),
        ):
            if wanted != found:
                raise ValueError(f"{data} has {name} {_told(found)}, and the run's tower takes {_told(wanted)}")
        seen = _seen(config)
    evaluation = evaluate_pairs(trained.model, pairs, texts, config, samples=samples, seen=seen)
    return {"run": str(path), "label": LABELS[config.head], "data": pairs.name, **evaluation.result}


def as_table(result: dict[str, Any]) -> Table:
    """The metrics for a terminal: a column for each split.

    Args:
        result: from `evaluate_run`.
    """
    splits = list(result["metrics"])
    table = Table(title=f"{result['label']} on {result['data']}", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for name in splits:
        table.add_column(name, justify="right")

    def add(title: str, values: list[float | None]) -> None:
        if any(value is not None for value in values):
            table.add_row(title, *("–" if value is None else f"{value:.1%}" for value in values))

    for key, how in (("zero_shot", "without noise"), ("zero_shot_sampled", "mean over draws")):
        found = [result["metrics"][name].get(key) for name in splits]
        for top in (1, 5):
            add(f"zero-shot top-{top}, {how}", [None if one is None else one[f"top{top}"] for one in found])
            add(
                f"  names never seen, top-{top}",
                [None if one is None else one.get(f"unseen_top{top}") for one in found],
            )
        if key == "zero_shot":
            add("  chance", [None if one is None else one["chance"] for one in found])
    for way, title in (("image_to_text", "image to text"), ("text_to_image", "text to image")):
        for k in KS:
            add(f"{title}, recall@{k}", [result["metrics"][name][f"{way}@{k}"] for name in splits])
    swaps = result.get("swaps", {})
    for kind in ("noise", "distance"):
        if swaps.get(f"{kind}_auroc") is not None:
            table.add_row(f"AUROC of the {kind} for swapped pairs", f"{swaps[f'{kind}_auroc']:.3f}")
    return table


def _seen(config: Any) -> set[str] | None:
    """The texts that the run was trained on; None where they are not to be had."""
    try:
        captions = open_data(config).splits["train"].captions()
    except (OSError, ValueError, KeyError):
        return None
    return None if captions is None else set(captions)


def _told(spec: Any) -> str:
    return "as captions" if spec is None else f"as {spec.kind} {list(spec.shape)}"
