"""`hetxl study defaults`: is HET-XL with its defaults ever worse than DET, and where is it better?

In every setting DET's learning rate and weight decay are tuned first, on the validation split, and all heads take over
what is best for DET. Then every head is trained for as many steps with the same seeds; DET also for as much time as
HET-XL takes. The test split is looked at once, at the end of each run.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetxl.data import describe
from hetxl.data.dataset import Dataset
from hetxl.data.describe import Description
from hetxl.evaluation.ensemble import Ensemble
from hetxl.evaluation.evaluate import evaluate
from hetxl.evaluation.metrics import summarise
from hetxl.functional._checks import one_of
from hetxl.studies.defaults_page import LONGER
from hetxl.studies.pace import pace
from hetxl.studies.runs import METRICS, by_label, results_in
from hetxl.studies.settings import QUICK, SETTINGS, Setting
from hetxl.studies.tune import tune_det
from hetxl.training.compare import VARIANTS, compare
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json, write_json
from hetxl.training.parallel import check_jobs, default_jobs, one_thread
from hetxl.training.progress import Narrator
from hetxl.training.reading import reader
from hetxl.training.rescale import SCALED, SCALED_XL
from hetxl.training.run import load_run
from hetxl.training.tasks import Task, run_tasks
from hetxl.training.train import open_data

ENSEMBLE = "DET ensemble"
LABELS = ("DET", SCALED, LONGER, *(variant.label for variant in VARIANTS.values()), SCALED_XL)
"""In the order of the summary; the ensemble comes last."""


def study(
    names: Sequence[str] = tuple(SETTINGS),
    *,
    seeds: Sequence[int] = tuple(range(5)),
    heads: Sequence[str] = tuple(VARIANTS),
    out: Path = Path("runs/study-defaults"),
    quick: bool = False,
    equal_time: bool = True,
    jobs: int | None = None,
    narrator: Narrator | None = None,
) -> list[Path]:
    """Run the study in some settings; whatever is finished is kept.

    Args:
        names: of `SETTINGS`.
        seeds: of the runs.
        heads: names of `hetxl.training.compare.VARIANTS`.
        out: directory, one below it for each setting.
        quick: the small settings of `QUICK` instead.
        equal_time: also train DET for as much time as HET-XL takes.
        jobs: trainings at a time, one thread each; one a core without.
        narrator: tells how far it is.

    Returns:
        The summaries, one JSON file for each setting.
    """
    known = QUICK if quick else SETTINGS
    wanted = list(known) if quick else list(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"settings must be among {', '.join(known)}, found {name!r}")
    for head in heads:
        one_of("heads", head, VARIANTS)
    check_jobs(jobs)
    narrator, jobs = narrator or Narrator(), jobs or default_jobs()
    found = []
    for number, name in enumerate(wanted):
        narrator.say(f"[{number + 1}/{len(wanted)}] {name}")
        found.append(run_setting(known[name], seeds, heads, out / name, narrator, jobs, equal_time))
    return found


def run_setting(
    setting: Setting,
    seeds: Sequence[int],
    heads: Sequence[str],
    directory: Path,
    narrator: Narrator,
    jobs: int,
    equal_time: bool = True,
) -> Path:
    """Tune, train, and sum up one setting: its summary.json."""
    config = setting.config()
    dataset = open_data(config)
    description = describe(dataset)
    tuned = tune_det(config, directory / "tuning", dataset, description, narrator, jobs)
    config = dataclasses.replace(
        config,
        learning_rate=tuned.learning_rate,
        weight_decay=tuned.weight_decay,
        out=str(directory / "compare"),
    )
    compared = compare(config, heads=tuple(heads), seeds=tuple(seeds), jobs=jobs, narrator=narrator)
    results = results_in(compared / "runs")
    summary: dict[str, Any] = {
        "setting": setting.name,
        "data": setting.data,
        "noisy": setting.noisy,
        "num_classes": dataset.num_classes,
        "training_rows": len(dataset.splits["train"]),
        "best_nll": dataset.best_nll,
        "learning_rate": tuned.learning_rate,
        "weight_decay": tuned.weight_decay,
        "tuning": [trial._asdict() for trial in tuned.trials],
        "steps": next(iter(results.values()))["steps"],
        "seeds": list(seeds),
    }
    with one_thread():  # as in the trainings, and nothing of the study beside it
        summary["pace"] = pace(config, dataset, directory / "pace.json", narrator=narrator)
    if equal_time and {"det", "het-xl"} <= set(heads):
        steps = round(summary["steps"] * max(1.0, summary["pace"]["het-xl"]))
        _train_longer(config, steps, seeds, directory / "longer", dataset, description, narrator, jobs)
    results |= results_in(directory / "longer")
    summary["heads"] = by_label(results, LABELS)
    if "det" in heads and len(seeds) > 1:
        summary["heads"][ENSEMBLE] = _ensemble(compared, seeds, directory, dataset, narrator)
    path = directory / "summary.json"
    write_json(path, summary)
    return path


def _train_longer(
    config: TrainConfig,
    steps: int,
    seeds: Sequence[int],
    directory: Path,
    dataset: Dataset,
    description: Description,
    narrator: Narrator,
    jobs: int,
) -> None:
    """DET for as many steps as fit into the time that HET-XL takes."""
    known = sorted(directory.glob("*/config.json"))
    if known:  # with another pace of the same machine, say: what was begun is finished as it was begun
        steps = TrainConfig.from_dict(read_json(known[0])).steps or steps
    base = dataclasses.replace(config, head="det", steps=steps)
    tasks = [
        Task(dataclasses.replace(base, seed=seed, out=str(directory / f"det-longer-seed{seed}")), LONGER)
        for seed in seeds
    ]
    run_tasks(tasks, dataset, description, jobs=jobs, narrator=narrator)


def _ensemble(
    compared: Path, seeds: Sequence[int], directory: Path, dataset: Dataset, narrator: Narrator
) -> dict[str, Any]:
    """All DET runs as one ensemble: a single value, at as many times the cost."""
    path = directory / "ensemble.json"
    runs = [load_run(compared / "runs" / f"det-seed{seed}") for seed in seeds]
    if path.exists() and (before := read_json(path))["seeds"] == list(seeds):
        return before
    ensemble: Any = Ensemble([(run.model.backbone, run.model.head) for run in runs])
    config = runs[0].run.config
    split = dataset.splits["test"]
    found = evaluate(
        lambda inputs: inputs,
        ensemble,
        split,
        limit=config.test_examples or None,
        confusions=False,
        fetch=reader(split, config.workers),
    )
    metrics = summarise(found.records, np.asarray(runs[0].class_counts))
    results = [read_json(compared / "runs" / f"det-seed{seed}" / "result.json") for seed in seeds]
    values: dict[str, Any] = {name: [metrics[name]] for name in METRICS}
    values["train_seconds"] = [sum(result["train_seconds"] for result in results)]
    values["parameters"] = sum(result["parameters"]["total"] for result in results)
    values["seeds"] = list(seeds)
    write_json(path, values)
    narrator.say(f"{ENSEMBLE} of {len(seeds)}: test NLL {metrics['nll']:.3f}")
    return values
