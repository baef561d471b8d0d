"""`hetxl study levers`: what each choice that HET-XL's defaults make is worth, by changing one at a time.

Every setting of every lever is trained with the same seeds, and compared with HET-XL as it is by default on the
validation split; the test split is taken away before anything is trained.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl.data import describe
from hetxl.data.dataset import Dataset
from hetxl.evaluation.records import Records
from hetxl.functional._checks import one_of
from hetxl.report.statistics import PairedTest, paired_test
from hetxl.studies.held_out import fitted_result
from hetxl.studies.plot import new_figure, plot_groups
from hetxl.studies.runs import over_seeds, results_in
from hetxl.studies.summary import Summary, difference_text, mean_text
from hetxl.studies.variants import DEFAULT, LEVERS, REFERENCES, Variant
from hetxl.training.config import TrainConfig
from hetxl.training.files import write_bytes, write_json
from hetxl.training.parallel import check_jobs, default_jobs
from hetxl.training.presets import preset_for
from hetxl.training.progress import Narrator
from hetxl.training.run import load_run
from hetxl.training.tasks import Task, run_tasks
from hetxl.training.train import open_data

HELD_OUT = "held-out"


def study(
    data: str = "pycode",
    *,
    levers: Sequence[str] = tuple(LEVERS),
    seeds: Sequence[int] = (0, 1, 2),
    out: Path | None = None,
    options: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    narrator: Narrator | None = None,
) -> Path:
    """Train every setting of some levers, each once for a seed, and write tables and a picture; what is done is kept.

    Args:
        data: as for `hetxl train`.
        levers: names of `LEVERS`.
        seeds: of the runs.
        out: directory; runs/study-levers-DATA without.
        options: of all trainings, beyond the preset of the data.
        jobs: trainings at a time, one thread each; one a core without.
        narrator: tells how far it is.

    Returns:
        summary.json; study.md and levers.png are beside it.
    """
    new_figure(1, 1)  # whether there is matplotlib is better known now
    check_jobs(jobs)
    for lever in levers:
        one_of("levers", lever, LEVERS)
    if not levers:
        raise ValueError(f"levers must name at least one of {', '.join(LEVERS)}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, found {list(seeds)}")
    narrator = narrator or Narrator()
    base = TrainConfig(**{**preset_for(data), **(options or {}), "data": data, "head": "het-xl"})
    directory = Path("runs") / f"study-levers-{Path(data.split(':')[0]).stem or 'data'}" if out is None else out
    dataset = open_data(base).without("test")
    if "validation" not in dataset.splits:
        raise ValueError(f"data {data!r} has no validation split, which the levers are compared on")
    wanted: dict[str, Variant] = {}
    for one in (*REFERENCES, *(variant for name in levers for variant in LEVERS[name].variants)):
        wanted.setdefault(run_name(one, base), one)
    diverged = _train(base, wanted, seeds, directory, dataset, narrator, jobs or default_jobs())
    kept = [name for name in wanted if name not in diverged]
    summary = _summarise(base, kept, levers, seeds, directory, dataset)
    write_json(directory / "summary.json", summary)
    write_bytes(directory / "study.md", page(summary).encode())
    plot_groups(
        [
            ("references", [("DET", difference(summary, "det", "het-xl"))]),
            *(
                (
                    name,
                    [
                        (one["label"], difference(summary, one["run"], "het-xl"))
                        for one in lever["variants"]
                        if one["run"] in summary["runs"]
                    ],
                )
                for name, lever in summary["levers"].items()
                if not lever["apart"]
            ),
        ],
        directory / "levers.png",
        "validation NLL less that of HET-XL with the defaults, paired over seeds, 95 % intervals (left of 0 is better)",
    )
    return directory / "summary.json"


def config_of(variant: Variant, base: TrainConfig) -> TrainConfig:
    """What is trained for a variant."""
    return dataclasses.replace(base, **variant.options)


def run_name(variant: Variant, base: TrainConfig) -> str:
    """The head and the options that are not those of the base: one name for everything that is the same training."""
    config = config_of(variant, base)
    differing = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name != "head" and getattr(config, field.name) != getattr(base, field.name)
    }
    parts = [config.head, *(f"{name}={value}" for name, value in differing.items())]
    return ",".join([*parts, HELD_OUT] if variant.held_out else parts)


def _train(
    base: TrainConfig,
    variants: Mapping[str, Variant],
    seeds: Sequence[int],
    directory: Path,
    dataset: Dataset,
    narrator: Narrator,
    jobs: int,
) -> set[str]:
    """All variants with the first seed, then with the next: a study that is stopped has something to show.

    Returns:
        The names of those whose loss did not stay finite; that is a finding, too.
    """
    description = describe(dataset)
    narrator.console.print(description)
    trained = {name: one for name, one in variants.items() if not one.held_out}
    total = len(trained) * len(seeds)
    narrator.say(f"{total} trainings ({len(trained)} settings, {len(seeds)} seeds) into {directory}")
    tasks = {
        (seed, name): Task(
            dataclasses.replace(config_of(one, base), seed=seed, out=str(directory / "runs" / f"{name}-seed{seed}")),
            one.label,
            blind=True,
            may_diverge=one not in REFERENCES,
        )
        for seed in seeds
        for name, one in trained.items()
    }
    run_tasks(list(tasks.values()), dataset, description, jobs=jobs, narrator=narrator)
    for seed in seeds:
        for name, one in variants.items():
            path = directory / HELD_OUT / f"{name}-seed{seed}" / "result.json"
            if not one.held_out or path.exists():
                continue
            source = directory / "runs" / f"{run_name(dataclasses.replace(one, held_out=False), base)}-seed{seed}"
            rows = Records.load(source / "records" / "validation.safetensors").rows
            before = results_in(source.parent)[source.name]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, fitted_result(load_run(source), dataset.splits["validation"], rows, before, narrator))
    return {name for (_, name), task in tasks.items() if task.diverged}


def _summarise(
    base: TrainConfig,
    names: Iterable[str],
    levers: Sequence[str],
    seeds: Sequence[int],
    directory: Path,
    dataset: Dataset,
) -> dict[str, Any]:
    """What was found, of every training once, and which of them each lever is about."""
    results = results_in(directory / "runs") | results_in(directory / HELD_OUT)
    runs = {name: over_seeds((results[f"{name}-seed{seed}"] for seed in seeds), "validation") for name in names}
    found: dict[str, Any] = {}
    for name in levers:
        lever = LEVERS[name]
        varied = dict.fromkeys(key for one in lever.variants for key in one.options if key != "head")
        found[name] = {
            "what": lever.what,
            "apart": lever.apart,
            "defaults": {key: getattr(base, key) for key in varied},
            "variants": [
                {"label": one.label, "options": dict(one.options), "run": run_name(one, base)} for one in lever.variants
            ],
        }
    limit = base.test_examples or len(dataset.splits["validation"])
    return {
        "data": base.data,
        "config": base.to_dict(),
        "seeds": list(seeds),
        "num_classes": dataset.num_classes,
        "training_rows": len(dataset.splits["train"]),
        "validation_rows": min(limit, len(dataset.splits["validation"])),
        "steps": runs["het-xl"]["steps"],
        "runs": runs,
        "levers": found,
    }


def difference(summary: Summary, run: str, reference: str, metric: str = "nll") -> PairedTest:
    """A metric of a run less that of another, over the seeds."""
    runs = summary["runs"]
    return paired_test(runs[run][metric], runs[reference][metric])


def page(summary: Summary) -> str:
    """The summary in markdown: a table for each lever."""
    seeds = len(summary["seeds"])
    lines = [
        f"# Levers on {summary['data']}",
        "",
        f"{summary['num_classes']:,} classes, {summary['training_rows']:,} training rows, {summary['steps']:,} steps, "
        f"{seeds} seed{'' if seeds == 1 else 's'}; {summary['validation_rows']:,} validation rows. Differences are to "
        f"{DEFAULT} with the defaults, seed by seed; ± is the standard error over the seeds.",
    ]
    for name, lever in summary["levers"].items():
        about = f"{lever['what'][0].upper()}{lever['what'][1:]}."
        if lever["defaults"]:
            about += f" Defaults: {', '.join(f'{key} {value}' for key, value in lever['defaults'].items())}."
        lines += ["", f"## {name}", "", about, ""]
        rows = [(one["label"], one["run"]) for one in lever["variants"]]
        reference = "het-xl"
        if lever["apart"]:
            reference = rows[0][1]
            lines += [f"These losses are comparable with each other alone: differences are to {rows[0][0]}.", ""]
        else:
            rows = [("DET", "det"), (f"{DEFAULT}, defaults", "het-xl"), *rows]
        lines += [
            "| | validation NLL | difference | precision@1 | difference |",
            "| --- | ---: | ---: | ---: | ---: |",
            *(_row(summary, label, run, reference) for label, run in rows),
        ]
    return "\n".join([*lines, ""])


def _row(summary: Summary, label: str, run: str, reference: str) -> str:
    if run not in summary["runs"]:
        return f"| {label} | not finite | – | – | – |"
    values = summary["runs"][run]
    precisions = mean_text(values["precision@1"], 2, 100)
    nll, precision = "–", "–"
    if run != reference and reference in summary["runs"]:
        nll = difference_text(difference(summary, run, reference), 4)
        precision = difference_text(difference(summary, run, reference, "precision@1"), 2, 100) + " %"
    return f"| {label} | {mean_text(values['nll'], 4)} | {nll} | {precisions} % | {precision} |"
