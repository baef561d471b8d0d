"""`hetxl compare`: the heads on the same data, from the same initial backbone, in the same order, for as many steps."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from hetxl.data import describe
from hetxl.functional._checks import one_of
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json, write_json
from hetxl.training.length import told_length
from hetxl.training.model import link_of
from hetxl.training.parallel import check_jobs
from hetxl.training.progress import Narrator, duration
from hetxl.training.rescale import SCALABLE
from hetxl.training.run import start_run
from hetxl.training.tasks import Task, run_tasks
from hetxl.training.train import open_data

SMOOTHING = 0.1


@dataclass(frozen=True)
class Variant:
    """A head as it takes part in a comparison."""

    name: str
    label: str
    options: dict[str, object]


VARIANTS = {
    "det": Variant("det", "DET", {"head": "det"}),
    "det-smoothed": Variant("det-smoothed", "DET + label smoothing", {"head": "det", "label_smoothing": SMOOTHING}),
    "het": Variant("het", "HET", {"head": "het"}),
    "het-h": Variant("het-h", "HET-H", {"head": "het-h"}),
    "het-xl": Variant("het-xl", "HET-XL", {"head": "het-xl"}),
}
"""What takes part, in the order of the table. Those of `SCALABLE` bring one that is rescaled along."""


def compare(
    config: TrainConfig,
    *,
    heads: tuple[str, ...] = tuple(VARIANTS),
    seeds: tuple[int, ...] = (0,),
    jobs: int | None = None,
    narrator: Narrator | None = None,
) -> Path:
    """Train every head with every seed; what is finished already is kept.

    Args:
        config: of all runs; its head and seed are replaced.
        heads: names of `VARIANTS`.
        seeds: of the runs; one run of each head for each.
        jobs: trainings at a time, one thread each; None for one after the other, on all threads.
        narrator: tells how far it is.

    Returns:
        The directory: compare.json and runs/.
    """
    narrator = narrator or Narrator()
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
    wanted = _taking_part(heads, _link_of_runs(directory) if config.link == "auto" else config.link)
    runs = [_config_of(config, variant, seed, directory) for seed in seeds for variant in wanted]
    scaled = [_scaled_place(directory, head, seed) for seed in seeds for head in SCALABLE if head in heads]
    places = [Path(str(one.out)) for one in runs] + scaled
    if directory.exists() and (directory / "compare.json").exists() and all(map(_finished, places)):
        for one in runs:  # of the same options, or say so
            start_run(one, Path(str(one.out)))
        narrator.say(f"{directory} is done already; remove it, or choose another --out, to run again")
        return directory
    dataset = open_data(config)
    wanted = _taking_part(heads, link_of(config, dataset))
    description = describe(dataset)
    narrator.console.print(description)
    total = len(wanted) * len(seeds)
    length = told_length(config, dataset)
    narrator.say(f"{total} trainings ({', '.join(variant.label for variant in wanted)}), {length}, into {directory}")
    tasks = [
        Task(
            _config_of(config, variant, seed, directory),
            variant.label,
            scaled=_scaled_place(directory, variant.name, seed) if variant.name in SCALABLE else None,
        )
        for seed in seeds
        for variant in wanted
    ]
    run_tasks(tasks, dataset, description, jobs=jobs, narrator=narrator)
    labels = []
    for variant in wanted:
        labels += [variant.label, *([SCALABLE[variant.name]] if variant.name in SCALABLE else [])]
    write_json(directory / "compare.json", {"baseline": "DET", "heads": labels, "seeds": list(seeds)})
    spent = sum(read_json(place / "result.json").get("train_seconds") or 0 for place in places if _finished(place))
    narrator.say(f"Trained for {duration(spent)} in all")
    return directory


def _taking_part(heads: tuple[str, ...], link: str) -> list[Variant]:
    """Those of the heads that a link has: labels are smoothed for the softmax alone."""
    wanted = [VARIANTS[head] for head in heads if link != "sigmoid" or head != "det-smoothed"]
    if not wanted:
        raise ValueError(
            "heads must name another than det-smoothed: labels are not smoothed for the sigmoid link, which is that of "
            "data with several labels in a row"
        )
    return wanted


def _link_of_runs(directory: Path) -> str:
    """The link that "auto" was when this comparison was run before; "auto" where nothing of it has ended."""
    found = next((directory / "runs").glob("*/result.json"), None)
    return "auto" if found is None else read_json(found.with_name("model.json"))["link"]


def _finished(place: Path) -> bool:
    return (place / "result.json").exists()


def _scaled_place(directory: Path, head: str, seed: int) -> Path:
    return directory / "runs" / f"{head}-scaled-seed{seed}"


def _config_of(config: TrainConfig, variant: Variant, seed: int, directory: Path) -> TrainConfig:
    place = directory / "runs" / f"{variant.name}-seed{seed}"
    return dataclasses.replace(config, seed=seed, out=str(place), **variant.options)  # pyright: ignore[reportArgumentType]
