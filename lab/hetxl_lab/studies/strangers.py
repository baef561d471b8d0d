"""`hetxl study strangers`: do the defaults win on data that was not used for tuning?

Every setting is data as a user would bring it, trained with the defaults and no other option; benchmarks also have
options for speed. DET and HET-XL are compared over the seeds, on test labels that are right;
`HetXLClassifier()` with scikit-learn's `LogisticRegression()`; the defaults with a grid of learning rates and numbers
of steps; and, where rows have several labels, the start of the bias with fixed ones.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetxl._checks import one_of
from hetxl._files import read_json, write_json
from hetxl.metrics.summary import summarise
from hetxl.optim import DEFAULTS
from hetxl.registry import HEAD_LABELS
from hetxl_lab.datasets.vectors import Vectors, load_vectors, with_wrong_labels, write_vectors
from hetxl_lab.studies.charts import plot_differences
from hetxl_lab.studies.runs import StudyRun, over_seeds
from hetxl_lab.studies.study import Lab, Study, Summary, names_in
from hetxl_lab.studies.verdicts import (
    against,
    count_verdicts,
    difference_text,
    judge,
    markdown,
    mean_text,
    p_text,
    verdict_table,
)
from hetxl_train.config import TrainConfig
from hetxl_train.data.open import open_data
from hetxl_train.evaluate import evaluate_split
from hetxl_train.presets import preset_for
from hetxl_train.report.statistics import mean
from hetxl_train.runs import load_run

HEADS = ("det", "het-xl")
RATE = 0.3
NOT_SPEED = ("learning_rate", "weight_decay")
"""Options of presets that are more than what makes runs fast."""
RATES, LENGTHS = (1 / 3, 1.0, 3.0), (0.5, 1.0, 2.0)
"""The grid, in multiples of the default learning rate and number of steps."""
PARTS: dict[str, dict[str, Any]] = {
    "without standardisation": {"standardize": False},
    "weight decay 0.01, no prior": {"weight_decay": 0.01},
    "noise from the first step": {"noise_start": 0.0},
    "without ε": {"flip_rate": 0.0},
}
"""What the defaults are compared without, one part at a time."""
STARTS = (None, -1.0, -2.0, -4.0, -6.0, -10.0)
"""Initial biases of several labels; None is the default, the log-odds of each class."""


@dataclass(frozen=True)
class Setting:
    """Data of one row of the table."""

    name: str
    source: str  # one of `hetxl_lab.datasets.vectors.SETS`, or data as for `hetxl train`
    noise: str = "none"
    rate: float = RATE
    options: Mapping[str, Any] = field(default_factory=dict)
    vectors: bool = True  # whether it is of `SETS`
    fast: bool = False  # whether to use the preset's options for speed; the data is the same for every seed

    def arrays(self, seed: int) -> Vectors:
        """Return the rows of a seed."""
        return with_wrong_labels(load_vectors(self.source, seed=seed), self.noise, self.rate, seed)

    def config(self, directory: Path, seed: int, **more: Any) -> TrainConfig:
        """Return the options of a run; vectors are written into the directory as files."""
        values: dict[str, Any] = {"seed": seed, **self.options}
        if self.vectors:
            stem = f"{self.name}-{seed}"
            names = directory / f"{stem}.npz", directory / f"{stem}-test.npz"
            paths = names if all(map(Path.exists, names)) else write_vectors(directory, stem, self.arrays(seed))
            values |= {"data": str(paths[0]), "test": str(paths[1])}
        else:
            preset = preset_for(self.source) if self.fast else {"data_seed": seed}
            fast = {name: value for name, value in preset.items() if name not in NOT_SPEED}
            noise = {} if self.noise == "none" else {"label_noise": self.noise, "label_noise_rate": self.rate}
            values = {**fast, **noise, **values, "data": self.source}
        return TrainConfig(**{**values, **more})


def _benchmarks(*names: str) -> list[Setting]:
    return [
        Setting(f"{name}{suffix}", name, noise, vectors=False, fast=True)
        for name in names
        for suffix, noise in (("", "none"), ("-noisy", "confusable"))
    ]


def _several_labels(classes: int, **options: Any) -> Setting:
    """Return 5,400 synthetic training rows with about three of the labels each; the seed draws another true model."""
    source = f"synthetic:rows=6000,features=32,multi_label=true,classes={classes}"
    return Setting(f"labels-{classes}", source, options=options, vectors=False)


_NETWORK = {"backbone": "mlp", "width": 64}
_FULL = [
    Setting("fashion", "fashion"),
    Setting("fashion-twins", "fashion", "twins"),
    Setting("fashion-next", "fashion", "next"),
    Setting("fashion-symmetric", "fashion", "symmetric"),
    Setting("glosses", "glosses"),
    Setting("glosses-symmetric", "glosses", "symmetric", 0.25),
    Setting("digits", "digits"),
    Setting("digits-symmetric", "digits", "symmetric"),
    Setting("digits-network", "digits", options=_NETWORK),
    Setting("digits-symmetric-network", "digits", "symmetric", options=_NETWORK),
    Setting("wine", "wine"),
    Setting("breast-cancer", "breast-cancer"),
    Setting("overlap", "overlap"),
    _several_labels(20),
    _several_labels(40),
    _several_labels(400),
    _several_labels(4000, train_samples=4, eval_samples=64),
    *_benchmarks("pycode", "words", "glyphs", "wordnet"),
]
_SMALL: dict[str, Any] = {"batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 4}
SETTINGS: dict[str, dict[str, Setting]] = {
    "full": {setting.name: setting for setting in _FULL},
    "quick": {setting.name: setting for setting in _FULL if setting.source in ("digits", "wine", "breast-cancer")},
    "miniature": {
        setting.name: setting
        for setting in (
            Setting("wine", "wine", options=_SMALL | {"steps": 6}),
            Setting("wine-symmetric", "wine", "symmetric", options=_SMALL | {"steps": 6}),
            Setting(
                "synthetic",
                "synthetic:rows=400,classes=8,features=6",
                options=_SMALL | {"steps": 4},
                vectors=False,
                fast=True,
            ),
            Setting(
                "labels",
                "synthetic:rows=400,classes=8,features=6,multi_label=true",
                options=_SMALL | {"steps": 4},
                vectors=False,
            ),
        )
    },
}
"""By profile and name, in the order of the tables."""
GRID = {"full": ("digits", "wine", "breast-cancer", "overlap", "fashion", "fashion-twins"), "miniature": ("wine",)}
ABLATED = {"full": ("digits", "digits-symmetric", "wine", "breast-cancer"), "miniature": ("wine-symmetric",)}
STARTED = {"full": ("labels-20", "labels-40", "labels-400", "labels-4000"), "miniature": ("labels",)}
"""Settings of the grid, of the parts that are taken away and of the fixed starts, by profile; none in the quick one."""


class Strangers(Study):
    """DET and HET-XL with their defaults."""

    name = "strangers"
    question = "Do the defaults win on data that nothing was tuned on?"

    def check(self, lab: Lab) -> None:
        """Raise if a setting is unknown."""
        for name in self._settings(lab):
            one_of("settings", name, SETTINGS[lab.profile.name])

    def _settings(self, lab: Lab) -> tuple[str, ...]:
        return names_in(lab.options.get("settings"), tuple(SETTINGS[lab.profile.name]))

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Train and measure each setting; return all that this directory has, also those of earlier calls."""
        settings, chosen = SETTINGS[lab.profile.name], self._settings(lab)
        for name in chosen:
            lab.console.say(name)
            write_json(lab.directory / name / "summary.json", _measure(lab, settings[name], lab.directory / name))
        for part, names, work in (("ablation", ABLATED, _ablate), ("grid", GRID, _search), ("starts", STARTED, _start)):
            for name in names.get(lab.profile.name, ()) if lab.options.get("ablations", True) else ():
                if name in chosen:
                    lab.console.say(f"{name}, {part}")
                    write_json(lab.directory / name / f"{part}.json", work(lab, settings[name], lab.directory))
        return {
            "settings": _stored(lab, "summary"),
            "grids": _stored(lab, "grid"),
            "ablations": _stored(lab, "ablation"),
            "starts": _stored(lab, "starts"),
            "missing": [name for name in settings if not (lab.directory / name / "summary.json").exists()],
        }

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the NLL of HET-XL less that of DET."""
        return plot_differences(summary["settings"], path, {"HET-XL less DET": [("HET-XL", "DET")]})

    def text(self, summary: Summary) -> str:
        """Return verdicts, answers for clean labels, scikit-learn, the grid and the parts."""
        parts = [
            f"# {self.entry.title}",
            ABOUT,
            verdict_table(summary["settings"]),
            count_verdicts(summary["settings"]),
            _rows_text(summary["settings"]),
        ]
        parts += [_twins_text(summary["settings"]), self.image_link]
        if summary["missing"]:
            parts.append(f"Not run yet: {', '.join(summary['missing'])}. Rerun the same command to run them.")
        if "note" in summary:  # a remark on runs of an older version
            parts.append(summary["note"])
        for title, table in (("Right labels", clean_table), ("scikit-learn", sklearn_table)):
            rows = table(summary["settings"])
            parts += [f"## {title}", rows] if rows else []
        if summary["grids"]:
            parts += ["## The defaults in a grid", GRID_TEXT, grid_table(summary["grids"])]
        if summary["ablations"]:
            parts += ["## Each part by itself", PARTS_TEXT, ablation_table(summary["ablations"])]
        if summary.get("starts"):
            parts += ["## The start of the bias", STARTS_TEXT, starts_table(summary["starts"])]
        return "\n\n".join(part.strip() for part in parts if part)


def _stored(lab: Lab, part: str) -> list[Any]:
    paths = [lab.directory / name / f"{part}.json" for name in SETTINGS[lab.profile.name]]
    return [read_json(path) for path in paths if path.exists()]


def _runs(lab: Lab, setting: Setting, head: str, seeds: Sequence[int], directory: Path, **more: Any) -> list[StudyRun]:
    """Return the runs of a head with the defaults, except for `more`."""
    return [StudyRun(setting.config(directory / "data", seed, head=head, **more)) for seed in seeds]


def _measure(lab: Lab, setting: Setting, directory: Path) -> dict[str, Any]:
    """Return the summary of a setting: both heads over the seeds, for labels as they are given and for right ones."""
    runs = {head: _runs(lab, setting, head, lab.seeds, lab.directory) for head in HEADS}
    lab.run([run for pair in zip(*runs.values(), strict=True) for run in pair])
    results = {head: [lab.cache.finite_result(run) for run in own] for head, own in runs.items()}
    dataset = open_data(runs["det"][0].config)
    summary: dict[str, Any] = {
        "setting": setting.name,
        "noise": setting.noise,
        "rate": 0.0 if setting.noise == "none" else setting.rate,
        "num_classes": dataset.num_classes,
        "training_rows": len(dataset.splits["train"]),
        "options": ", ".join(f"{name}={value}" for name, value in setting.options.items()),
        "seeds": list(lab.seeds),
        "heads": {HEAD_LABELS[head]: over_seeds(own) for head, own in results.items()},
        "flip_rate": {HEAD_LABELS[head]: [_stored_flip_rate(lab, run) for run in own] for head, own in runs.items()},
        "noise_kept": [result["noise_kept"] for result in results["het-xl"]],
    }
    if setting.vectors:
        summary["clean"] = {HEAD_LABELS[head]: [_clean(lab, run) for run in own] for head, own in runs.items()}
    if setting.vectors and "backbone" not in setting.options:  # both are linear
        summary["sklearn"] = [_with_sklearn(setting, seed, directory / f"sklearn-{seed}.json") for seed in lab.seeds]
    return summary


def _stored_flip_rate(lab: Lab, run: StudyRun) -> float:
    return read_json(lab.cache.directory(run) / "model.json").get("flip_rate", 0.0)


def _clean(lab: Lab, run: StudyRun) -> dict[str, float | None]:
    """Return the metrics of a run that predicts the class and not the label that would be given."""
    path = lab.cache.directory(run) / "clean.json"
    if not path.exists():
        trained = load_run(lab.cache.directory(run))
        evaluation = evaluate_split(trained.model, open_data(run.config).splits["test"], target="clean", quiet=True)
        write_json(path, summarise(evaluation.records, np.asarray(trained.class_counts)))
    return read_json(path)


def _with_sklearn(setting: Setting, seed: int, path: Path) -> dict[str, Any]:
    """Return NLL and accuracy of `HetXLClassifier()` and `LogisticRegression()` on the test rows of a seed."""
    if path.exists():
        return read_json(path)
    from sklearn.linear_model import LogisticRegression

    from hetxl.integrations.sklearn import HetXLClassifier

    rows = setting.arrays(seed)
    # Only the limit of iterations is raised, since with 100 it warns and is worse.
    regression = LogisticRegression(max_iter=2_000).fit(rows.features, rows.labels)
    small = {
        name: setting.options[name] for name in ("rank", "train_samples", "eval_samples") if name in setting.options
    }
    small |= {"max_iter": 2} if "steps" in setting.options else {}
    model = HetXLClassifier(random_state=seed, **small).fit(rows.features, rows.labels)
    answers = {
        "LogisticRegression": regression.predict_proba(rows.test_features),
        "HetXLClassifier": model.predict_proba(rows.test_features),
        "HetXLClassifier, clean": model.predict_proba(rows.test_features, target="clean"),
    }
    result = {label: _scores(probs, rows.test_labels) for label, probs in answers.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return result


def _scores(probs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    own = np.maximum(probs[np.arange(len(labels)), labels], np.finfo(np.float64).tiny)
    return {"nll": float(-np.log(own).mean()), "precision@1": float((probs.argmax(1) == labels).mean())}


def _search(lab: Lab, setting: Setting, directory: Path) -> dict[str, Any]:
    """Return the test NLL of both heads over the grid, with the first seed."""
    seeds, grid = lab.seeds[:1], {}
    steps = setting.options.get("steps") or DEFAULTS["head"].steps
    for head in HEADS:
        runs = {}
        for rate, length in itertools.product(RATES, LENGTHS):
            more = {"learning_rate": rate * DEFAULTS["head"].learning_rate, "steps": round(length * steps)}
            # The defaults are in the middle of the grid.
            runs[rate, length] = _runs(lab, setting, head, seeds, directory, **({} if rate == length == 1 else more))[0]
        lab.run(list(runs.values()))
        losses = {key: lab.cache.finite_result(run)["metrics"]["test"]["nll"] for key, run in runs.items()}
        grid[HEAD_LABELS[head]] = [[*key, nll] for key, nll in losses.items()]
    return {"setting": setting.name, "losses": grid}


def _start(lab: Lab, setting: Setting, directory: Path) -> dict[str, Any]:
    """Return the test NLL of both heads by the initial bias, with the first seed; None is the default."""
    losses = {}
    for head in HEADS:
        runs = {
            bias: _runs(lab, setting, head, lab.seeds[:1], directory, **({} if bias is None else {"bias_init": bias}))
            for bias in STARTS
        }
        lab.run([run for own in runs.values() for run in own])
        losses[HEAD_LABELS[head]] = [
            [bias, lab.cache.finite_result(own[0])["metrics"]["test"]["nll"]] for bias, own in runs.items()
        ]
    return {"setting": setting.name, "losses": losses}


def _ablate(lab: Lab, setting: Setting, directory: Path) -> dict[str, Any]:
    """Return the results of HET-XL with one part of the defaults disabled at a time, over the seeds."""
    variants: dict[str, dict[str, Any]] = {"defaults": {}, **PARTS}
    runs = {name: _runs(lab, setting, "het-xl", lab.seeds, directory, **more) for name, more in variants.items()}
    lab.run([run for own in runs.values() for run in own])
    values = {name: over_seeds(lab.cache.finite_result(run) for run in own) for name, own in runs.items()}
    noise_kept = [lab.cache.finite_result(run)["noise_kept"] for run in runs["defaults"]]
    return {"setting": setting.name, "values": values, "noise_kept": noise_kept}


ABOUT = """
Do the defaults win on data that nothing was tuned on? DET and HET-XL with no option but the data; the benchmarks
(pycode to wordnet) have in addition what makes them fast: fewer steps, a lower rank, fewer samples; the networks
train on digits behind two hidden layers; `labels-K` are synthetic rows with about three of K labels. Wrong labels are
the twin class, the next class or any other class alike, in training and validation rows; in the noisy settings of
benchmarks near classes, in training rows. Test labels are right. Paired t-tests over the seeds, which also divide
the rows.
"""
GRID_TEXT = """
Test NLL with the learning rate × ⅓, 1 and 3 and the number of steps × ½, 1 and 2, first seed. “Behind” is how far the
defaults are from the best of the nine.
"""
PARTS_TEXT = """
HET-XL without one part of its defaults: NLL, and its difference to the defaults over the seeds. “Taken back” counts the
runs whose validation rows decided against the noise.
"""


STARTS_TEXT = """
Test NLL of several labels with a bias that starts at the log-odds of each class, the default, and at fixed values,
first seed. “Behind” is how far the default is from the best fixed start.
"""


def _rows_text(settings: Sequence[Summary]) -> str:
    """Say how many training rows each setting has, and what was changed for speed."""
    rows = "; ".join(f"{summary['setting']} {summary['training_rows']:,}" for summary in settings)
    changed = [f"{summary['setting']} ({summary['options']})" for summary in settings if summary.get("options")]
    return f"Training rows: {rows}." + (f" Options beside the defaults: {'; '.join(changed)}." if changed else "")


def _twins_text(settings: Sequence[Summary]) -> str:
    """Say how much accuracy HET-XL gains where labels are confused with one other class."""
    sentences = []
    for summary in settings:
        if summary["noise"] in ("twins", "next"):
            test = judge(summary).precision
            gain = f"{difference_text(test, 1, 100)} points of accuracy (p = {p_text(test.p)})"
            goal = "reached" if test.difference >= 0.03 else "not reached"
            sentences.append(f"On {summary['setting']} HET-XL is ahead by {gain}; the goal of 3 points is {goal}.")
    return " ".join(sentences)


def clean_table(settings: Sequence[Summary]) -> str:
    """Return both answers of both heads where training labels are wrong, in markdown."""
    rows = []
    for summary in settings:
        if summary["noise"] == "none" or "clean" not in summary:
            continue
        for label, values in summary["heads"].items():
            clean = summary["clean"][label]
            rates = summary["flip_rate"][label]
            cells = [mean_text(values["nll"]), f"{mean_text(values['calibration_error'], 1, 100)} %"]
            cells += [mean_text([row["nll"] for row in clean])]
            cells += [f"{mean_text([row['calibration_error'] for row in clean], 1, 100)} %", mean_text(rates, 2)]
            rows.append([summary["setting"], label, *cells])
    heading = ["setting", "head", "NLL, observed", "calibration error", "NLL, clean", "calibration error", "ε"]
    return markdown(heading, rows) if rows else ""


def sklearn_table(settings: Sequence[Summary]) -> str:
    """Return `HetXLClassifier()` against `LogisticRegression()`, in markdown."""
    rows = []
    for summary in settings:
        if "sklearn" not in summary:
            continue
        ours = "HetXLClassifier" if summary["noise"] == "none" else "HetXLClassifier, clean"
        columns = {
            label: {name: [row[label][name] for row in summary["sklearn"]] for name in ("nll", "precision@1")}
            for label in ("LogisticRegression", ours)
        }
        cells = [
            f"{mean_text(values['nll'])}, {mean_text(values['precision@1'], 1, 100)} %" for values in columns.values()
        ]
        tests = [against(columns[ours], columns["LogisticRegression"], name) for name in ("nll", "precision@1")]
        texts = [
            f"{difference_text(test, digits, factor)} (p = {p_text(test.p)})"
            for test, digits, factor in zip(tests, (3, 1), (1, 100), strict=True)
            if test is not None
        ]
        rows.append([summary["setting"], *cells, *texts])
    note = (
        "NLL and accuracy on right labels; `HetXLClassifier()` answers for clean ones where training labels are wrong."
    )
    heading = ["setting", "LogisticRegression()", "HetXLClassifier()", "NLL", "accuracy, points"]
    return f"{note}\n\n{markdown(heading, rows)}" if rows else ""


def grid_table(grids: Sequence[Summary]) -> str:
    """Return the gap between the defaults and the best of the grid, in markdown."""
    rows = []
    for grid in grids:
        for label, losses in grid["losses"].items():
            own = next(nll for rate, length, nll in losses if rate == length == 1)
            rate, length, best = min(losses, key=lambda loss: loss[2])
            where = "the defaults" if rate == length == 1 else f"rate × {rate:.2g}, steps × {length:g}"
            rows.append([grid["setting"], label, f"{own:.4f}", f"{best:.4f}", where, f"{100 * (own / best - 1):.1f} %"])
    return markdown(["setting", "head", "defaults", "best", "at", "behind"], rows)


def starts_table(starts: Sequence[Summary]) -> str:
    """Return the gap between the default initial bias and the best fixed one, in markdown."""
    rows = []
    for summary in starts:
        for label, losses in summary["losses"].items():
            own = next(nll for bias, nll in losses if bias is None)
            best = min(nll for bias, nll in losses if bias is not None)
            cells = [f"{nll:.3f}" for bias, nll in losses]
            rows.append([summary["setting"], label, *cells, f"{100 * (own / best - 1):+.1f} %".replace("-", "−")])
    names = ["log-odds" if bias is None else f"{bias:g}".replace("-", "−") for bias in STARTS]
    return markdown(["setting", "head", *names, "behind"], rows)


def ablation_table(ablations: Sequence[Summary]) -> str:
    """Return the results with one part of the defaults disabled at a time, in markdown."""
    rows = []
    for ablation in ablations:
        values = ablation["values"]
        cells = []
        for name in PARTS:
            test = against(values[name], values["defaults"])
            cells.append("–" if test is None else f"{mean(values[name]['nll']).value:.3f} ({difference_text(test, 3)})")
        back = ablation["noise_kept"].count(False)
        count = f"{back} of {len(ablation['noise_kept'])}"
        rows.append([ablation["setting"], mean_text(values["defaults"]["nll"]), *cells, count])
    return markdown(["setting", "defaults", *PARTS, "taken back"], rows)


STUDIES = (Strangers(),)
