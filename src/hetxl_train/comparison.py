"""`hetxl compare`: the heads on the same data, from the same initial backbone, in the same order, for equal steps."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl._checks import one_of
from hetxl._files import read_json, write_json
from hetxl.registry import HEAD_ENTRIES
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import describe
from hetxl_train.data.open import open_data
from hetxl_train.formatting import rough_duration
from hetxl_train.model import link_of
from hetxl_train.num_steps import describe_length
from hetxl_train.process_pool import check_jobs
from hetxl_train.rescale import CLEAN_XL, SCALABLE
from hetxl_train.runner import PlannedRun, run_planned
from hetxl_train.runs import start_run

SMOOTHING = 0.1


@dataclass(frozen=True)
class Variant:
    """A head in a comparison, with the options that it sets."""

    name: str
    label: str
    options: dict[str, object]


_HEADS = [Variant(entry.name, entry.label, {"head": entry.name}) for entry in HEAD_ENTRIES]
_SMOOTHED = Variant("det-smoothed", "DET + label smoothing", {"head": "det", "label_smoothing": SMOOTHING})
VARIANTS = {variant.name: variant for variant in (_HEADS[0], _SMOOTHED, *_HEADS[1:])}
"""In the order of the table. Each of `SCALABLE` is also rescaled, to a row of its own."""


def compare(
    config: TrainConfig,
    *,
    heads: tuple[str, ...] = tuple(VARIANTS),
    seeds: tuple[int, ...] = (0,),
    jobs: int | None = None,
    console: Console | None = None,
) -> Path:
    """Train every head with every seed, and return the directory; finished runs are not repeated.

    The head and seed of the configuration are replaced; `jobs` as of `run_planned`.
    """
    console = console or Console()
    check_jobs(jobs)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare runs in one process; start single runs of several with torchrun … hetxl train")
    if not heads:
        raise ValueError(f"heads must name at least one of {', '.join(VARIANTS)}, found none")
    for name in heads:
        one_of("heads", name, VARIANTS)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, found {list(seeds)}")
    name = Path(config.data.split(":")[0]).stem or "data"
    directory = Path("runs") / f"compare-{name}" if config.out is None else Path(config.out)
    variants = _variants_of(heads, _link_of_runs(directory) if config.link == "auto" else config.link)
    runs = _runs(config, variants, seeds, directory)
    if (directory / "compare.json").exists() and all(_finished(path) for run in runs for path in run.directories):
        for run in runs:  # raises if its options are others
            start_run(run.config, run.directory)
        console.say(f"{directory} is done already; remove it, or choose another --out, to run again")
        return directory
    dataset = open_data(config)
    variants = _variants_of(heads, link_of(config, dataset))
    runs = _runs(config, variants, seeds, directory)
    description = describe(dataset)
    console.rich.print(description)
    length = describe_length(config, dataset)
    console.say(f"{len(runs)} runs ({', '.join(variant.label for variant in variants)}), {length}, into {directory}")
    run_planned(runs, dataset, description, jobs=jobs, console=console)
    labels = []
    for variant in variants:
        labels += [variant.label, *([CLEAN_XL] if _has_clean(config, variant) else [])]
        labels += [SCALABLE[variant.name]] if variant.name in SCALABLE else []
    write_json(directory / "compare.json", {"baseline": "DET", "heads": labels, "seeds": list(seeds)})
    results = (read_json(path / "result.json") for run in runs for path in run.directories if _finished(path))
    console.say(f"Trained for {rough_duration(sum(result.get('train_seconds') or 0 for result in results))} in all")
    return directory


def _variants_of(heads: tuple[str, ...], link: str) -> list[Variant]:
    """Return the heads that go with a link: labels are smoothed for the softmax alone."""
    variants = [VARIANTS[head] for head in heads if link != "sigmoid" or head != "det-smoothed"]
    if not variants:
        raise ValueError(
            "heads must name another than det-smoothed: labels are not smoothed for the sigmoid link, which is that of "
            "data with several labels in a row"
        )
    return variants


def _runs(config: TrainConfig, variants: list[Variant], seeds: tuple[int, ...], directory: Path) -> list[PlannedRun]:
    runs = []
    for seed in seeds:
        for variant in variants:
            out = directory / "runs" / f"{variant.name}-seed{seed}"
            scaled = out.with_name(f"{variant.name}-scaled-seed{seed}") if variant.name in SCALABLE else None
            clean = out.with_name(f"{variant.name}-clean-seed{seed}") if _has_clean(config, variant) else None
            own: dict[str, Any] = {"seed": seed, "out": str(out), **variant.options}
            runs.append(PlannedRun(variant.label, dataclasses.replace(config, **own), scaled=scaled, clean=clean))
    return runs


def _has_clean(config: TrainConfig, variant: Variant) -> bool:
    """Whether a head is also shown as it predicts clean labels: validation and test are clean, training labels not."""
    return variant.name == "het-xl" and config.label_noise != "none"


def _finished(directory: Path) -> bool:
    return (directory / "result.json").exists()


def _link_of_runs(directory: Path) -> str:
    """Return the link that "auto" was when this comparison was run before; "auto" if none of its runs has ended."""
    result = next((directory / "runs").glob("*/result.json"), None)
    return "auto" if result is None else read_json(result.with_name("model.json"))["link"]
