"""`hetxl study defaults`: is HET-XL with its defaults ever worse than DET, and where is it better?

In every setting, a benchmark with clean labels or noisy ones, DET's learning rate and weight decay are tuned first on
the validation split, and all heads use the values that are best for DET. Then every head is trained for as many steps
with the same seeds; DET also for the time that HET-XL takes. The test split is used once, at the end of each run.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hetxl._checks import one_of
from hetxl._files import read_json, write_json
from hetxl.metrics.ensemble import Ensemble
from hetxl.metrics.summary import summarise
from hetxl.registry import HEAD_NAMES, METRIC_NAMES
from hetxl_lab.presets import PUBLISHED
from hetxl_lab.studies.charts import plot_differences
from hetxl_lab.studies.runs import StudyRun, over_seeds
from hetxl_lab.studies.study import Lab, Study, Summary, head_run, names_in
from hetxl_lab.studies.verdicts import WORSE, count_verdicts, heads_table, judge, markdown, verdict_table
from hetxl_train.checkpoint import Checkpoints
from hetxl_train.comparison import VARIANTS
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.dataset import Dataset, UnreadableExamples
from hetxl_train.data.open import open_data
from hetxl_train.distributed import World
from hetxl_train.evaluate import evaluate
from hetxl_train.loaders import reader
from hetxl_train.loop import Trainer
from hetxl_train.presets import preset_for
from hetxl_train.process_pool import one_thread
from hetxl_train.report.statistics import mean
from hetxl_train.rescale import SCALED, SCALED_XL
from hetxl_train.runs import load_run
from hetxl_train.tasks.classification import ClassificationTask

SAMPLES = 4
"""S in training, the same in all settings: one set of defaults, and what `hetxl train` takes for data of one's own."""
RATE = 0.3  # share of the training labels that are flipped to a near class in the noisy settings


@dataclass(frozen=True)
class Setting:
    """Data, and whether its training labels are flipped."""

    name: str  # in tables, and of its directory
    data: str  # as for `hetxl train`
    noisy: bool = False  # `RATE` of the training labels are flipped to a near class; validation and test stay clean
    options: dict[str, Any] = field(default_factory=dict)  # beyond the preset of the data

    def config(self, **more: Any) -> TrainConfig:
        """The options of its runs: those of the data's preset, its own, then `more`."""
        noise = {"label_noise": "confusable", "label_noise_rate": RATE} if self.noisy else {}
        return TrainConfig(**{**PUBLISHED, **preset_for(self.data), **self.options, **noise, **more, "data": self.data})


def _all_settings(*names: str, **options: Any) -> dict[str, Setting]:
    """Return data by their names, each with clean labels and with noisy ones."""
    pairs = [(f"{data.partition(':')[0]}{suffix}", data, suffix) for data in names for suffix in ("", "-noisy")]
    return {name: Setting(name, data, bool(suffix), options) for name, data, suffix in pairs}


SETTINGS: dict[str, dict[str, Setting]] = {
    "full": _all_settings("pycode", "words", "glyphs", "wordnet", train_samples=SAMPLES, temperature="auto"),
    "quick": _all_settings(
        "synthetic:rows=4000,classes=30",
        epochs=2.0,
        batch_size=128,
        temperature="auto",
        train_samples=16,
        eval_samples=32,
        evaluation_examples=500,
        test_examples=500,
    ),
    "miniature": _all_settings(
        "synthetic:rows=400,classes=8,features=6",
        steps=4,
        batch_size=32,
        temperature="auto",
        rank=2,
        train_samples=2,
        eval_samples=4,
        evaluate_every=2,
    ),
}
"""By profile and name, in the order of the tables. Those but the full ones need nothing built."""

LEARNING_RATES = (0.5, 1.0, 2.0)  # multiples of the preset's learning rate
WEIGHT_DECAYS = (0.01, 0.1, 0.5)
REACH = 8.0
"""Both searches continue beyond an end that is the best, in factors of two, up to this multiple of where they began."""
SEED = 1000  # seed of the tuning runs, unlike those of the compared runs


class Trial(NamedTuple):
    """One run of the search."""

    learning_rate: float
    weight_decay: float
    nll: float


def tune_det(lab: Lab, config: TrainConfig) -> tuple[TrainConfig, list[Trial]]:
    """Choose DET's learning rate, then the weight decay at the best of them, each by validation NLL.

    Return the options with both, and all trials. The runs do not have the test split, so no choice depends on it.
    """
    trials: dict[tuple[float, float], Trial] = {}

    def losses(options: Sequence[tuple[float, float]]) -> list[float]:
        runs = {
            (rate, decay): StudyRun(
                replace(config, head="det", seed=SEED, learning_rate=rate, weight_decay=decay), blind=True
            )
            for rate, decay in options
        }
        lab.run(list(runs.values()))
        for both, run in runs.items():
            trials[both] = Trial(*both, float(lab.cache.finite_result(run)["metrics"]["validation"]["nll"]))
        return [trials[both].nll for both in options]

    rate, decay = config.learning_rate, config.weight_decay
    if rate is None or decay is None:
        raise ValueError("a setting must state learning_rate and weight_decay")
    rates = [factor * rate for factor in LEARNING_RATES]
    rate = lowest(lambda values: losses([(value, decay) for value in values]), rates, beyond_both=True)
    decays = sorted({decay, *WEIGHT_DECAYS})
    chosen = lowest(lambda values: losses([(rate, value) for value in values]), decays, beyond_both=False)
    return replace(config, learning_rate=rate, weight_decay=chosen), list(trials.values())


def lowest(costs: Callable[[Sequence[float]], Sequence[float]], values: Sequence[float], beyond_both: bool) -> float:
    """Return the value of the lowest cost. While an end is best, the search extends beyond it, at most to `REACH`.

    The initial values are ascending; `beyond_both` also extends the search below the lowest.
    """
    tried = dict(zip(values, costs(values), strict=True))
    while True:
        best = min(tried, key=tried.__getitem__)
        beyond = best * 2 if best == max(tried) else best / 2 if beyond_both and best == min(tried) else best
        if beyond in tried or not values[0] / REACH <= beyond <= values[-1] * REACH:
            return best
        (tried[beyond],) = costs([beyond])


ROUNDS = 15  # measured steps of each head
WARM_UP = 2  # unmeasured steps of each head before them


def pace(
    config: TrainConfig,
    dataset: Dataset,
    path: Path,
    *,
    heads: Sequence[str] = HEAD_NAMES,
    rounds: int = ROUNDS,
    console: Console | None = None,
) -> dict[str, float]:
    """Return the time of a training step of each head over that of DET, the median over rounds of one step each.

    Steps of the heads alternate in one process, so that other load on the machine affects all of them alike; it would
    distort a comparison of whole runs. The JSON file at `path` keeps the result for a resumed study. The heads include
    DET and replace that of the options; `rounds` is the number of measured rounds.
    """
    if path.exists():
        return read_json(path)
    console = console or Console(quiet=True)
    trainers = {head: _trainer(replace(config, head=head), dataset, path, rounds) for head in heads}
    feeds = {head: trainer.feed() for head, trainer in trainers.items()}
    times: dict[str, list[float]] = {head: [] for head in heads}
    with torch.random.fork_rng(devices=[]), console.bar("time of a step", WARM_UP + rounds) as bar:
        for step in range(WARM_UP + rounds):
            for head, trainer in trainers.items():
                begin = time.perf_counter()
                trainer.take_step(step, feeds[head])
                times[head].append(time.perf_counter() - begin)
            bar.to(step + 1)
    ratios = {
        head: statistics.median(
            own / det for own, det in zip(times[head][WARM_UP:], times["det"][WARM_UP:], strict=True)
        )
        for head in heads
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, ratios)
    return ratios


def _trainer(config: TrainConfig, dataset: Dataset, path: Path, rounds: int) -> Trainer:
    """Return a trainer that takes steps and writes no files."""
    # τ is fixed, since learning it costs next to nothing. Steps without noise are disabled, to measure those with it.
    config = replace(config, temperature="1.0", noise_start=0.0, workers=0, steps=WARM_UP + rounds)
    quiet = Console(quiet=True)
    task = ClassificationTask(config, dataset, World(torch.device("cpu")), quiet, path.parent)
    task.model.train()
    return Trainer(task, Checkpoints(path.parent / "none"), quiet, UnreadableExamples())


ORDER = ("HET-XL", "HET-H", "HET", "DET")  # of the paper's main table, the lowest NLL first
METHOD = (
    "In every setting DET's learning rate and weight decay are tuned on the validation split first; every head takes "
    "them over, and trains for as many steps with the same seeds. In the noisy settings {rate:.0%} of the training "
    "labels are flipped to a near class; validation and test labels are as they were. Means ± standard errors over "
    "{seeds} seeds on the test split, paired t-tests. Time is that of a run over DET's, from steps that took turns.\n"
)
LONGER = "DET, equal time"
PANELS = {
    "as many steps, less DET": [(head, "DET") for head in ("HET-XL", "HET", "HET-H")],
    "rescaled: HET-XL less DET": [(SCALED_XL, SCALED)],
    "equal time: HET-XL less DET": [("HET-XL", LONGER)],
}
"""Of the image."""


def order_text(summary: Summary) -> str:
    """Return the heads of one setting by their NLL, with < where a difference counts and ≈ where it does not."""
    nll = {head: mean(summary["heads"][head]["nll"]).value for head in ORDER}
    ranked = sorted(ORDER, key=nll.__getitem__)
    parts = [ranked[0]]
    for better, worse in itertools.pairwise(ranked):
        test = judge(summary, worse, better).nll
        parts += ["<" if test.p is not None and test.p < WORSE else "≈", worse]
    return " ".join(parts)


def settings_text(summaries: Sequence[Summary]) -> str:
    """Return verdicts over all settings, the order of the heads, and every head's numbers, in markdown."""
    seeds = " or ".join(str(count) for count in sorted({len(summary["seeds"]) for summary in summaries}))
    parts = [METHOD.format(rate=RATE, seeds=seeds).replace("%", " %")]
    if all({"DET", "HET-XL"} <= set(summary["heads"]) for summary in summaries):
        parts += [verdict_table(summaries), count_verdicts(summaries) + "\n"]
        parts += [f"{summary['setting']}: {summary['note']}\n" for summary in summaries if "note" in summary]
    ordered = [summary for summary in summaries if set(ORDER) <= set(summary["heads"])]
    if ordered:
        parts.append(
            "The paper's order in NLL is HET-XL ≤ HET-H ≤ HET ≤ DET. Here, with < where the difference of neighbours "
            f"counts (p < {WORSE:g}) and ≈ where it does not:\n\n"
            + markdown(["setting", "lowest NLL first"], [[s["setting"], order_text(s)] for s in ordered])
        )
    rescaled = [summary for summary in summaries if {SCALED, SCALED_XL} <= set(summary["heads"])]
    if rescaled:
        parts.append(
            "## Rescaled on the validation split\n\nBoth heads with τ fitted to validation labels after the run, "
            "and HET-XL with the scale of its noise beside it: above 1 where noise was learned too small, 0 where "
            "it is of no use. Labels of validation and test are right in the noisy settings too.\n"
        )
        parts += [verdict_table(rescaled, SCALED_XL, SCALED), count_verdicts(rescaled, SCALED_XL, SCALED) + "\n"]
    longer = [summary for summary in summaries if {"HET-XL", LONGER} <= set(summary["heads"])]
    if longer:
        parts.append(
            "## Equal time\n\nA step of HET-XL takes longer than one of DET, most of all where the head is most "
            "of the model. Against a DET that trains for the same time, with a schedule of as many more steps:\n"
        )
        parts += [verdict_table(longer, baseline=LONGER), count_verdicts(longer, baseline=LONGER) + "\n"]
    parts += [f"## {summary['setting']}\n\n{heads_table(summary)}" for summary in summaries]
    return "\n".join(parts)


ENSEMBLE = "DET ensemble"
LABELS = ("DET", SCALED, LONGER, *(variant.label for variant in VARIANTS.values()), SCALED_XL)
"""In the order of the summary; the ensemble comes last."""


class Defaults(Study):
    """All heads with DET's best options, in every setting."""

    name = "defaults"
    question = "Is HET-XL with its defaults ever worse than DET, and where is it better?"
    seed_count = 5

    def check(self, lab: Lab) -> None:
        """Raise if a setting or a head is unknown."""
        for name in self._settings(lab):
            one_of("settings", name, SETTINGS[lab.profile.name])
        for head in _heads(lab):
            one_of("heads", head, VARIANTS)

    def _settings(self, lab: Lab) -> tuple[str, ...]:
        return names_in(lab.options.get("settings"), tuple(SETTINGS[lab.profile.name]))

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Tune, train and measure each setting; return all that this directory has, also those of earlier calls."""
        settings = SETTINGS[lab.profile.name]
        for number, name in enumerate(names := self._settings(lab), 1):
            lab.console.say(f"[{number}/{len(names)}] {name}")
            write_json(lab.directory / name / "summary.json", run_setting(lab, settings[name], lab.directory / name))
        paths = [lab.directory / name / "summary.json" for name in settings]
        return {"settings": [read_json(path) for path in paths if path.exists()]}

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the NLL of the available heads less that of DET."""
        known = {head for setting in summary["settings"] for head in setting["heads"]}
        panels = {title: [pair for pair in pairs if set(pair) <= known] for title, pairs in PANELS.items()}
        return plot_differences(summary["settings"], path, {title: pairs for title, pairs in panels.items() if pairs})

    def text(self, summary: Summary) -> str:
        """Return verdicts, tables of all heads, and the image."""
        return f"# {self.entry.title}\n\n{settings_text(summary['settings'])}\n{self.image_link}"


def _heads(lab: Lab) -> tuple[str, ...]:
    return names_in(lab.options.get("heads"), tuple(VARIANTS))


def run_setting(lab: Lab, setting: Setting, directory: Path) -> dict[str, Any]:
    """Tune, train and measure a setting; return its summary. The directory keeps the time of steps and the ensemble."""
    config, trials = tune_det(lab, setting.config())
    heads = _heads(lab)
    metrics = lab.compare(config, heads)
    dataset = open_data(config)
    summary: dict[str, Any] = {
        "setting": setting.name,
        "data": setting.data,
        "noisy": setting.noisy,
        "num_classes": dataset.num_classes,
        "training_rows": len(dataset.splits["train"]),
        "best_nll": dataset.best_nll,
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "tuning": [trial._asdict() for trial in trials],
        "steps": next(iter(metrics.values()))["steps"],
        "seeds": list(lab.seeds),
    }
    with one_thread():  # as in the runs, without other load from the study
        summary["pace"] = pace(config, dataset, directory / "pace.json", console=lab.console)
    if lab.options.get("equal_time", True) and {"det", "het-xl"} <= set(heads):
        steps = round(summary["steps"] * max(1.0, summary["pace"]["het-xl"]))
        runs = [StudyRun(replace(config, head="det", steps=steps, seed=seed)) for seed in lab.seeds]
        lab.run(runs)
        metrics[LONGER] = over_seeds(lab.cache.finite_result(run) for run in runs)
    summary["heads"] = {label: metrics[label] for label in dict.fromkeys(LABELS) if label in metrics}
    if "det" in heads and len(lab.seeds) > 1:
        runs = [head_run(config, "det", seed) for seed in lab.seeds]
        summary["heads"][ENSEMBLE] = _ensemble(lab, runs, directory / "ensemble.json", dataset)
    return summary


def _ensemble(lab: Lab, runs: Sequence[StudyRun], path: Path, dataset: Dataset) -> dict[str, Any]:
    """Return the metrics of all DET runs as one ensemble: a single value, at as many times the cost."""
    seeds = [run.config.seed for run in runs]
    if path.exists() and (before := read_json(path))["seeds"] == seeds:
        return before
    trained = [load_run(lab.cache.directory(run)) for run in runs]
    ensemble: Any = Ensemble([(run.model.backbone, run.model.head) for run in trained])
    config = trained[0].run.config
    split = dataset.splits["test"]
    evaluation = evaluate(
        lambda inputs: inputs,
        ensemble,
        split,
        limit=config.test_examples or None,
        confusions=False,
        fetch=reader(split, config.workers),
    )
    metrics = summarise(evaluation.records, np.asarray(trained[0].class_counts))
    results = [lab.cache.finite_result(run) for run in runs]
    values: dict[str, Any] = {name: [metrics[name]] for name in METRIC_NAMES}
    values["train_seconds"] = [sum(result["train_seconds"] for result in results)]
    values["parameters"] = sum(result["parameters"]["total"] for result in results)
    values["seeds"] = seeds
    write_json(path, values)
    lab.console.say(f"{ENSEMBLE} of {len(seeds)}: test NLL {metrics['nll']:.3f}")
    return values


STUDIES = (Defaults(),)
