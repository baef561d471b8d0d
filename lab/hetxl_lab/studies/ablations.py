"""`hetxl study levers`: the effect of each choice in HET-XL's defaults, by changing one at a time.

Every setting of every lever is trained with the same seeds, and compared with HET-XL as it is by default on the
validation split; the test split is removed before anything is trained.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetxl._checks import one_of
from hetxl._files import read_json, write_json
from hetxl._seeds import derive_seed
from hetxl.metrics.records import Records
from hetxl.metrics.scaling import fit_temperature
from hetxl.metrics.summary import summarise
from hetxl.nn import FixedTemperature
from hetxl_lab.presets import PUBLISHED
from hetxl_lab.studies.charts import plot_groups
from hetxl_lab.studies.runs import StudyRun, over_seeds
from hetxl_lab.studies.study import Lab, Study, Summary, names_in
from hetxl_lab.studies.verdicts import difference_text, markdown, mean_text
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.dataset import Dataset, Split
from hetxl_train.data.open import open_data
from hetxl_train.data.synthetic import FeatureSplit
from hetxl_train.evaluate import evaluate
from hetxl_train.presets import preset_for
from hetxl_train.report.statistics import PairedTest, paired_test
from hetxl_train.runs import Trained, load_run

DET = "DET"
DEFAULT = "HET-XL"


@dataclass(frozen=True)
class Variant:
    """One setting of a lever, or the reference for all of them."""

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)  # beyond those of the data; HET-XL without a head
    held_out: bool = False  # whether to fit τ afterwards, on validation rows excluded from the loss


@dataclass(frozen=True)
class Lever:
    """A choice to vary."""

    name: str
    what: str  # it is
    variants: tuple[Variant, ...]  # in addition to DET and HET-XL with the defaults
    apart: bool = False  # its losses are of another kind, so the reference is its first variant


REFERENCES = (Variant(DET, {"head": "det"}), Variant(DEFAULT))  # in every table


def _lever(
    name: str,
    what: str,
    variants: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
    apart: bool = False,
) -> Lever:
    """Return a lever of the file: its variants, and one for each value of the option that its settings name."""
    listed = [Variant(**variant) for variant in variants]
    if settings is not None:
        label, also = settings.get("label", "{}"), settings.get("also", {})
        listed += [Variant(label.format(value), {**also, settings["option"]: value}) for value in settings["values"]]
    return Lever(name, what, tuple(listed), apart)


LEVERS = {lever["name"]: _lever(**lever) for lever in read_json(Path(__file__).with_name("levers.json"))}
"""By name, in the order of the tables."""


FITTED = 1000  # rows that τ is fitted on, at most


def fitted_result(
    trained: Trained, split: Split, rows: np.ndarray, before: Mapping[str, Any], console: Console
) -> dict[str, Any]:
    """Return the result of a run with a τ that its training did not see.

    The rows are halved. τ is fitted on one half and the loss measured on the other, and the other way round, so that
    the result is of all rows [n] of the split, like `before`, that of the run itself.
    """
    model, config = trained.model, trained.run.config
    batches = list(trained.features(split, rows))
    features = torch.cat([part for part, _ in batches]).to(model.device)
    inside = FeatureSplit(features, split.labels.subset(np.concatenate([part for _, part in batches])))
    seed = derive_seed(config.seed, 15)
    halves = [np.arange(start, len(inside), 2) for start in (0, 1)]
    records, temperatures = [], []
    with console.bar("τ on held-out rows", len(inside)) as bar:
        for fitted, measured in (halves, halves[::-1]):
            rows = fitted[:: -(-len(fitted) // FITTED)]
            few = [features[torch.from_numpy(rows)]]
            temperatures.append(fit_temperature(model.head, few, inside.labels.take(rows), seed=seed))
            model.head.temperature = FixedTemperature(temperatures[-1])
            part = FeatureSplit(features[torch.from_numpy(measured)], inside.labels.subset(measured))
            options: dict[str, Any] = {"seed": seed, "device": model.device, "confusions": False}
            options["quiet"] = True  # this function shows its own bar
            records.append(evaluate(lambda inputs: inputs, model.head, part, **options).records)
            bar.to(sum(map(len, records)))
    counts = None if trained.class_counts is None else np.asarray(trained.class_counts)
    metrics = summarise(Records.concatenate(records), counts)
    return {**before, "metrics": {"validation": metrics}, "temperature": math.fsum(temperatures) / 2}


HELD_OUT = "held-out"  # subdirectory of a run, for its result with a τ fitted to held-out rows

OPTIONS: dict[str, dict[str, Any]] = {
    "miniature": {"steps": 4, "batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 8, "evaluate_every": 4}
}
"""By profile: options of all runs beyond the preset of the data."""


class Levers(Study):
    """HET-XL with its defaults, DET, and every setting of some levers."""

    name = "levers"
    question = "What is each choice that HET-XL's defaults make worth, when one at a time is changed?"
    seed_count = 3
    split = "validation"

    def check(self, lab: Lab) -> None:
        """Raise if a lever is unknown."""
        levers = _levers(lab)
        for lever in levers:
            one_of("levers", lever, LEVERS)
        if not levers:
            raise ValueError(f"levers must name at least one of {', '.join(LEVERS)}")

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train all variants, fit τ where a variant requires it, and return the metrics over the seeds."""
        base = base_config(lab)
        dataset = open_data(base).without("test")
        if "validation" not in dataset.splits:
            raise ValueError(f"data {base.data!r} has no validation split, which the levers are compared on")
        variants: dict[str, Variant] = {}
        for variant in (*REFERENCES, *(variant for name in _levers(lab) for variant in LEVERS[name].variants)):
            variants.setdefault(run_name(variant, base), variant)
        # All variants with the first seed, then with the next, so that a stopped study has partial results.
        runs = {
            (name, seed): StudyRun(dataclasses.replace(config_of(variant, base), seed=seed), blind=True)
            for seed in lab.seeds
            for name, variant in variants.items()
        }
        lab.run(list(runs.values()))
        metrics = {}
        for name, variant in variants.items():
            own = [runs[name, seed] for seed in lab.seeds]
            if variant in REFERENCES or all(lab.cache.result(run) is not None for run in own):
                results = [
                    _held_out(lab, run, dataset) if variant.held_out else lab.cache.finite_result(run) for run in own
                ]
                metrics[name] = over_seeds(results, "validation")
        return self._summary(lab, base, metrics, dataset)

    def _summary(self, lab: Lab, base: TrainConfig, runs: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
        """Return the metrics of every run once, and the runs of each lever."""
        levers: dict[str, Any] = {}
        for name in _levers(lab):
            lever = LEVERS[name]
            varied = dict.fromkeys(key for variant in lever.variants for key in variant.options if key != "head")
            levers[name] = {
                "what": lever.what,
                "apart": lever.apart,
                "defaults": {key: getattr(base, key) for key in varied},
                "variants": [
                    {"label": variant.label, "options": dict(variant.options), "run": run_name(variant, base)}
                    for variant in lever.variants
                ],
            }
        limit = base.test_examples or len(dataset.splits["validation"])
        return {
            "data": base.data,
            "config": base.to_dict(),
            "num_classes": dataset.num_classes,
            "training_rows": len(dataset.splits["train"]),
            "validation_rows": min(limit, len(dataset.splits["validation"])),
            "steps": runs["het-xl"]["steps"],
            "runs": runs,
            "levers": levers,
        }

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw differences to HET-XL with the defaults, except for levers with another kind of loss."""
        groups = [("references", [("DET", difference(summary, "det", "het-xl"))])]
        for name, lever in summary["levers"].items():
            known = [variant for variant in lever["variants"] if variant["run"] in summary["runs"]]
            if not lever["apart"]:
                groups.append(
                    (name, [(variant["label"], difference(summary, variant["run"], "het-xl")) for variant in known])
                )
        axis = "validation NLL less that of the defaults, 95 % intervals: left is better"
        return plot_groups(groups, path, axis)

    def text(self, summary: Summary) -> str:
        """Return a table for each lever, and the image."""
        seeds = len(summary["seeds"])
        parts = [
            f"# Levers on {summary['data']}",
            f"{summary['num_classes']:,} classes, {summary['training_rows']:,} training rows, {summary['steps']:,} "
            f"steps, {seeds} seed{'' if seeds == 1 else 's'}; {summary['validation_rows']:,} validation rows. "
            f"Differences are to {DEFAULT} with the defaults, seed by seed; ± is the standard error over the seeds.",
        ]
        for name, lever in summary["levers"].items():
            about = f"{lever['what'][0].upper()}{lever['what'][1:]}."
            if lever["defaults"]:
                about += f" Defaults: {', '.join(f'{key} {value}' for key, value in lever['defaults'].items())}."
            parts += [f"## {name}", about]
            labels = {variant["label"]: variant["run"] for variant in lever["variants"]}
            reference = "het-xl"
            if lever["apart"]:
                first, reference = next(iter(labels.items()))
                parts.append(f"These losses are comparable with each other alone: differences are to {first}.")
            else:
                labels = {"DET": "det", f"{DEFAULT}, defaults": "het-xl", **labels}
            rows = [[label, *_cells(summary, run, reference)] for label, run in labels.items()]
            header = ["", "validation NLL", "difference", "precision@1", "difference"]
            parts.append(markdown(header, rows).rstrip())
        return "\n\n".join([*parts, self.image_link])


def _levers(lab: Lab) -> tuple[str, ...]:
    return names_in(lab.options.get("levers"), tuple(LEVERS))


def base_config(lab: Lab) -> TrainConfig:
    """Return the options of HET-XL with its defaults."""
    data = lab.options["data"]
    return TrainConfig(
        **{
            **PUBLISHED,
            **preset_for(data),
            "temperature": "auto",
            **OPTIONS.get(lab.profile.name, {}),
            "data": data,
            "head": "het-xl",
        }
    )


def config_of(variant: Variant, base: TrainConfig) -> TrainConfig:
    """Return the options of the run of a variant."""
    return dataclasses.replace(base, **variant.options)


def run_name(variant: Variant, base: TrainConfig) -> str:
    """Return a name of the head and the options that are not those of the base: the same run has the same name."""
    config = config_of(variant, base)
    differing = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name != "head" and getattr(config, field.name) != getattr(base, field.name)
    }
    parts = [config.head, *(f"{name}={value}" for name, value in differing.items())]
    return ",".join([*parts, HELD_OUT] if variant.held_out else parts)


def _held_out(lab: Lab, run: StudyRun, dataset: Dataset) -> dict[str, Any]:
    """Return the result of a run with a τ fitted to held-out rows, stored next to it."""
    directory = lab.cache.directory(run)
    path = directory / HELD_OUT / "result.json"
    if not path.exists():
        rows = Records.load(directory / "records" / "validation.safetensors").rows
        before = lab.cache.finite_result(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        split = dataset.splits["validation"]
        write_json(path, fitted_result(load_run(directory), split, rows, before, lab.console))
    return read_json(path)


def difference(summary: Summary, run: str, reference: str, metric: str = "nll") -> PairedTest:
    """Return a metric of a run less that of another, paired over the seeds."""
    runs = summary["runs"]
    return paired_test(runs[run][metric], runs[reference][metric])


def _cells(summary: Summary, run: str, reference: str) -> list[str]:
    if run not in summary["runs"]:
        return ["not finite", "–", "–", "–"]
    values, tests = summary["runs"][run], ["–", "–"]
    if run != reference and reference in summary["runs"]:
        precision = difference_text(difference(summary, run, reference, "precision@1"), 2, 100)
        tests = [difference_text(difference(summary, run, reference), 4), f"{precision} %"]
    return [mean_text(values["nll"], 4), tests[0], f"{mean_text(values['precision@1'], 2, 100)} %", tests[1]]


STUDIES = (Levers(),)
