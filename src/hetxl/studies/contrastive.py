"""`hetxl study contrastive`: DET and HET-XL on pairs, clean and with swapped texts, and the paper's two ablations.

Every head is trained with the same seeds: of a seed, towers, order and swaps are the same. The texts of 0, 20 and 40 %
of the training pairs are swapped. The ablations are those of the paper: when embeddings are normalised, and whether
zero-shot classification needs draws of the noise. What is finished is kept, so that a study that was stopped goes on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl.contrastive.config import LABELS, ContrastiveConfig
from hetxl.contrastive.train import train
from hetxl.studies.contrastive_page import page
from hetxl.studies.runs import results_in
from hetxl.training.files import write_bytes, write_json
from hetxl.training.progress import Narrator

SWAPS = (0.0, 0.2, 0.4)
PLACEMENTS = ("before", "after", "both", "none")
SAMPLES = 22
"""Draws of the sampled zero-shot evaluation, as in the paper."""

QUICK: dict[str, Any] = {"data": "icons:limit=2000", "steps": 20, "batch_size": 128}
"""A look at the whole study in a few minutes; its numbers say nothing."""

METRICS: dict[str, tuple[str, ...]] = {
    "zero_shot_top1": ("metrics", "test", "zero_shot", "top1"),
    "zero_shot_top5": ("metrics", "test", "zero_shot", "top5"),
    "unseen_top1": ("metrics", "test", "zero_shot", "unseen_top1"),
    "sampled_top1": ("metrics", "test", "zero_shot_sampled", "top1"),
    "sampled_top5": ("metrics", "test", "zero_shot_sampled", "top5"),
    **{
        f"{split}_{way}@{k}": ("metrics", split, f"{way}@{k}")
        for split in ("validation", "test")
        for way in ("image_to_text", "text_to_image")
        for k in (1, 5, 10)
    },
    "noise_auroc": ("swaps", "noise_auroc"),
    "distance_auroc": ("swaps", "distance_auroc"),
    "train_seconds": ("train_seconds",),
    "scale": ("scale",),
}
"""Where each is in result.json."""


def variants(base: ContrastiveConfig) -> dict[str, ContrastiveConfig]:
    """Every training of the study for one seed, by name.

    Args:
        base: what they have in common.
    """
    found = {}
    for swap in SWAPS:
        for head in ("det", "het-xl"):
            found[f"{head}-swap{round(100 * swap)}"] = dataclasses.replace(base, head=head, swap=swap)
    for placement in PLACEMENTS[1:]:  # the first is there already
        found[f"het-xl-normalize-{placement}"] = dataclasses.replace(base, head="het-xl", normalize=placement)
    return found


def study(
    data: str | None = None,
    *,
    seeds: Sequence[int] = tuple(range(5)),
    out: Path = Path("runs/study-contrastive"),
    quick: bool = False,
    options: Mapping[str, Any] | None = None,
    narrator: Narrator | None = None,
) -> Path:
    """Train everything, each once for a seed, and write the tables.

    Args:
        data: as for `hetxl contrastive train`; None for icons.
        seeds: of the runs.
        out: directory.
        quick: a short look instead.
        options: of all trainings.
        narrator: tells how far it is.

    Returns:
        summary.json; study.md is beside it.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, found {list(seeds)}")
    narrator = narrator or Narrator()
    values: dict[str, Any] = {"eval_samples": SAMPLES} | (QUICK if quick else {}) | dict(options or {})
    if data is not None:
        values["data"] = data
    base = ContrastiveConfig(**values)
    wanted = variants(base)
    total = len(wanted) * len(seeds)
    narrator.say(f"{total} trainings ({len(wanted)} settings, {len(seeds)} seeds) into {out}")
    number = 0
    for seed in seeds:  # all settings with the first seed: a study that is stopped has something to show
        for name, config in wanted.items():
            number += 1
            place = out / "runs" / f"{name}-seed{seed}"
            narrator.say(f"[{number}/{total}] {name}, seed {seed}")
            one = dataclasses.replace(config, seed=seed, data_seed=seed, out=str(place))
            train(one, narrator=narrator, label=LABELS[config.head])
    summary = summarise(base, list(wanted), seeds, out)
    write_json(out / "summary.json", summary)
    write_bytes(out / "study.md", page(summary).encode())
    return out / "summary.json"


def summarise(base: ContrastiveConfig, names: Sequence[str], seeds: Sequence[int], out: Path) -> dict[str, Any]:
    """What was found: of every setting its metrics, as lists in the order of the seeds.

    Args:
        base: what the trainings have in common.
        names: of the settings.
        seeds: of the runs.
        out: directory of the study.
    """
    results = results_in(out / "runs")
    runs: dict[str, dict[str, list[float]]] = {}
    for name in names:
        found = [results[f"{name}-seed{seed}"] for seed in seeds]
        values = {metric: [_at(result, keys) for result in found] for metric, keys in METRICS.items()}
        runs[name] = {metric: list(value) for metric, value in values.items() if None not in value}
    first = results[f"{names[0]}-seed{seeds[0]}"]
    return {
        "data": base.data,
        "config": base.to_dict(),
        "seeds": list(seeds),
        "rows": first["data"]["rows"],
        "classes": first["metrics"]["test"]["zero_shot"]["classes"],
        "steps": first["steps"],
        "samples": base.eval_samples,
        "swaps": list(SWAPS),
        "runs": runs,
    }


def _at(result: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        result = result.get(key) if isinstance(result, Mapping) else None
    return result
