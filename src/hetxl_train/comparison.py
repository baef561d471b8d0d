"""`hetxl compare`: train heads on the same data, from the same initial backbone, in the same order, for equal steps."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl._checks import one_of
from hetxl._files import read_json, write_json
from hetxl.registry import HEAD_ENTRIES
from hetxl_train.baselines import ENSEMBLE, LAPLACE, add_ensemble, add_laplace
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import describe
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import open_data
from hetxl_train.formatting import rough_duration
from hetxl_train.model import link_of
from hetxl_train.num_steps import describe_length
from hetxl_train.process_pool import check_jobs
from hetxl_train.report import advice, as_dict, compare_table, find_runs
from hetxl_train.rescale import CLEANABLE, SCALABLE, rescale
from hetxl_train.runner import PlannedRun, run_planned
from hetxl_train.runs import open_run, start_run

SMOOTHING, DROPOUT = 0.1, 0.1
MASKS = 32
"""Number of dropout masks per prediction."""


@dataclass(frozen=True)
class Variant:
    """A head in a comparison, with its options."""

    name: str
    label: str
    options: dict[str, object]


_HEADS = [Variant(entry.name, entry.label, {"head": entry.name}) for entry in HEAD_ENTRIES]
_SMOOTHED = Variant("det-smoothed", "DET + label smoothing", {"head": "det", "label_smoothing": SMOOTHING})
_DROPOUT = Variant("det-dropout", "DET + MC dropout", {"head": "det", "mc_dropout": DROPOUT, "eval_samples": MASKS})
VARIANTS = {variant.name: variant for variant in (_HEADS[0], _SMOOTHED, _DROPOUT, *_HEADS[1:])}
"""All variants, in the order of the table. Those in `SCALABLE` also have a rescaled row."""
HEADS = tuple(name for name in VARIANTS if name != "det-dropout")
"""The default variants."""
BASELINES = ("det", "det-smoothed", "det-dropout")
"""Variants that `baselines` trains, in addition to an ensemble and Laplace, which are derived from runs of DET."""


def compare(
    config: TrainConfig,
    *,
    heads: tuple[str, ...] = HEADS,
    seeds: tuple[int, ...] = (0,),
    members: int = 0,
    jobs: int | None = None,
    console: Console | None = None,
) -> Path:
    """Train every head with every seed, and return the directory; finished runs are not repeated.

    The head and seed of the configuration are replaced; for `jobs` see `run_planned`. `members`, the size of a DET
    ensemble, adds the baselines: `BASELINES`, the ensemble, and last-layer Laplace.
    """
    console = console or Console()
    check_jobs(jobs)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare runs in one process; for runs in several processes use torchrun … hetxl train")
    if not heads:
        raise ValueError(f"heads must name at least one of {', '.join(VARIANTS)}, found none")
    for name in heads:
        one_of("heads", name, VARIANTS)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, found {list(seeds)}")
    if members:
        heads = tuple(dict.fromkeys((*BASELINES, *heads)))
    name = Path(config.data.split(":")[0]).stem or "data"
    directory = Path("runs") / f"compare-{name}" if config.out is None else Path(config.out)
    variants = _variants_of(heads, _link_of_runs(directory) if config.link == "auto" else config.link)
    runs = _runs(config, variants, seeds, directory)
    baselines = _Baselines(config, directory, members)
    derived = [path for seed in seeds for path in baselines.directories(seed).values()]
    done = all(_finished(path) for path in (*derived, *(path for run in runs for path in run.directories)))
    if (directory / "compare.json").exists() and done:
        for run in runs:  # raises if its options differ
            start_run(run.config, run.directory)
        console.say(f"{directory} is done already; to run again, remove it or choose another --out")
        return directory
    dataset = open_data(config)
    variants = _variants_of(heads, link_of(config, dataset))
    runs = _runs(config, variants, seeds, directory)
    description = describe(dataset)
    console.rich.print(description)
    length = describe_length(config, dataset)
    names = [variant.label for variant in variants]
    runs += (extra := baselines.member_runs(seeds))
    names += [f"{members - 1} more of DET"] if extra else []
    console.say(f"{len(runs)} runs ({', '.join(names)}), {length}, into {directory}")
    run_planned(runs, dataset, description, jobs=jobs, console=console)
    baselines.derive(seeds, dataset, console)
    clean = _add_clean(config, variants, seeds, directory, dataset, console)
    labels = []
    for variant in variants:
        labels += [variant.label, *([CLEANABLE[variant.name]] if variant.name in clean else [])]
        labels += [SCALABLE[variant.name]] if variant.name in SCALABLE else []
        labels += baselines.directories(0) if variant is _DROPOUT else []
    facts = {"baseline": "DET", "heads": labels, "seeds": list(seeds)}
    write_json(directory / "compare.json", facts)  # the table keeps its order
    table = compare_table(find_runs([directory]))
    write_json(directory / "compare.json", {**facts, "advice": advice(table), "table": as_dict(table)})
    results = (read_json(run.directory / "result.json") for run in runs)
    console.say(f"Trained for {rough_duration(sum(result.get('train_seconds') or 0 for result in results))} in all")
    return directory


@dataclass(frozen=True)
class _Baselines:
    """The rows derived from runs of DET, an ensemble and Laplace; none without members."""

    config: TrainConfig
    directory: Path
    members: int

    def directories(self, seed: int) -> dict[str, Path]:
        """Return the directories of a seed's rows by label, in the order of the table."""
        names = {ENSEMBLE: "det-ensemble"} if self.members else {}
        if self.members and self.config.classifier == "linear":  # the posterior needs a linear layer
            names[LAPLACE] = "det-laplace"
        return {label: self.directory / "runs" / f"{name}-seed{seed}" for label, name in names.items()}

    def member_runs(self, seeds: tuple[int, ...]) -> list[PlannedRun]:
        """Return the runs of DET that the ensembles need in addition to those of the comparison."""
        options = [
            {**VARIANTS["det"].options, "seed": self._seed(seed, number), "out": str(self._member(seed, number))}
            for seed in seeds
            for number in range(1, self.members)
        ]
        return [PlannedRun("DET", dataclasses.replace(self.config, **own)) for own in options]

    def derive(self, seeds: tuple[int, ...], dataset: Dataset, console: Console) -> None:
        """Derive the rows of all seeds from finished runs."""
        for seed in seeds:
            paths, source = self.directories(seed), self.directory / "runs" / f"det-seed{seed}"
            if ENSEMBLE in paths:
                others = [self._member(seed, number) for number in range(1, self.members)]
                add_ensemble([source, *others], paths[ENSEMBLE], dataset, console)
            if LAPLACE in paths:
                add_laplace(source, paths[LAPLACE], dataset, console)

    def _member(self, seed: int, number: int) -> Path:
        return self.directory / "members" / f"det-seed{self._seed(seed, number)}"

    @staticmethod
    def _seed(seed: int, number: int) -> int:
        """Return a seed that is unique among the members of all ensembles."""
        return 1000 * (seed + 1) + number


def _variants_of(heads: tuple[str, ...], link: str) -> list[Variant]:
    """Return the variants for a link: label smoothing is only for softmax."""
    variants = [VARIANTS[head] for head in heads if link != "sigmoid" or head != "det-smoothed"]
    if not variants:
        raise ValueError(
            "heads must include more than det-smoothed: label smoothing does not support the sigmoid link, which data "
            "with several labels per row needs"
        )
    return variants


def _runs(config: TrainConfig, variants: list[Variant], seeds: tuple[int, ...], directory: Path) -> list[PlannedRun]:
    runs = []
    for seed in seeds:
        for variant in variants:
            out = directory / "runs" / f"{variant.name}-seed{seed}"
            scaled = out.with_name(f"{variant.name}-scaled-seed{seed}") if variant.name in SCALABLE else None
            own: dict[str, Any] = {"seed": seed, "out": str(out), **variant.options}
            runs.append(PlannedRun(variant.label, dataclasses.replace(config, **own), scaled=scaled))
    return runs


def _add_clean(
    config: TrainConfig, variants: list[Variant], seeds: tuple[int, ...], directory: Path, dataset: Dataset,
    console: Console,
) -> list[str]:  # fmt: skip
    """Add rows for predictions of clean labels, and return their names.

    HET-XL gets one if the training labels are known to be wrong, and both heads if a run has estimated wrong labels.
    """
    names = []
    for variant in variants:
        own = [directory / "runs" / f"{variant.name}-seed{seed}" for seed in seeds]
        estimated = any(read_json(path / "model.json").get("flip_rate") for path in own)
        known = variant.name == "het-xl" and config.label_noise != "none"
        if variant.name in CLEANABLE and (known or estimated):
            names.append(variant.name)
            for path in own:
                target = path.with_name(path.name.replace("-seed", "-clean-seed"))
                rescale(open_run(path), target, dataset, console, CLEANABLE[variant.name], clean=True)
    return names


def _finished(directory: Path) -> bool:
    return (directory / "result.json").exists()


def _link_of_runs(directory: Path) -> str:
    """Return the link that "auto" resolved to in finished runs of this comparison; "auto" if there are none."""
    result = next((directory / "runs").glob("*/result.json"), None)
    return "auto" if result is None else read_json(result.with_name("model.json"))["link"]
