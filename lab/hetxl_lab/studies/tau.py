"""`hetxl study tau`: every way to choose τ that the paper compares, on large data and on small data.

The two tables of the paper (Table "tuning_tau", Appendix "Tuning of τ"), with our numbers beside the paper's. The
methods of a seed share runs where possible: "2 folds" chooses among the runs of the same search, by the test split.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetxl._checks import one_of
from hetxl._files import write_arrays
from hetxl.registry import HEAD_NAMES
from hetxl_lab.presets import PUBLISHED
from hetxl_lab.studies.charts import plot_groups
from hetxl_lab.studies.paper import paper_table
from hetxl_lab.studies.profiles import MINI, Profile
from hetxl_lab.studies.study import Lab, Study, Summary
from hetxl_lab.studies.verdicts import difference_text, markdown, mean_text, p_text
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import open_dataset
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import open_data
from hetxl_train.report.html import write_page
from hetxl_train.report.render import render
from hetxl_train.report.statistics import PairedTest, mean, paired_test
from hetxl_train.runner import PlannedRun, jobs_for
from hetxl_train.search import methods as search_methods
from hetxl_train.search.bayes import Asked, Bayes, require_optuna
from hetxl_train.search.methods import Search, about, grid_trials, single_trial, trial_at
from hetxl_train.search.plot import path_chart
from hetxl_train.search.trial import Outcome, TrialPool, drop_weights, outcome_of
from hetxl_train.search.tune import choose
from hetxl_train.temperature_methods import METHODS

_COMPARED = ("grid", "bayes", "bilevel", "gradient", "train", "posthoc", "fixed")
GRID, BAYES, LUKETINA, GRADIENT, SIMPLE, FITTED, ONE = (METHODS[name].title for name in _COMPARED)

COMMON: dict[str, Any] = {
    **PUBLISHED,
    "batch_size": 256,
    "rank": 10,
    "train_samples": 4,
    "eval_samples": 32,
    "evaluation_examples": 2000,
    "test_examples": 2000,
    "temperature_learning_rate": 1.0,  # τ like any other parameter, as in the paper
    "log_every": 10,
    "device": "cpu",
}


@dataclass(frozen=True)
class Setting:
    """Data and how long to train on it."""

    name: str  # in tables, and of its directory
    about: str  # one sentence for readers
    data: Callable[[Path], str]  # as for `hetxl train`; called with the directory that it may write a file into
    options: dict[str, Any] = field(default_factory=dict)
    searches: bool = True  # whether to include methods with many runs; otherwise only those that learn or fix τ

    def config(self, folder: Path, **more: Any) -> TrainConfig:
        """Return the options of its runs; data made for the study is written into the folder."""
        options = {**COMMON, **self.options, **more}
        options.setdefault("evaluate_every", options["steps"] * 2)  # only at the end
        return TrainConfig(**{**options, "data": self.data(folder)})


def commonest_classes(dataset: Dataset, count: int, path: Path, rows: int | None = None) -> Path:
    """Write the rows of the `count` commonest classes of a dataset as an .npz file, unless it exists.

    The dataset has features, all three splits and one label per row; at most `rows` training rows are written, None for
    all.
    """
    if path.exists():
        return path
    order = np.argsort(-dataset.splits["train"].labels.counts(dataset.num_classes), kind="stable")[:count]
    new_id = np.full(dataset.num_classes, -1, dtype=np.int64)
    new_id[order] = np.arange(len(order))
    arrays: dict[str, np.ndarray] = {"class_names": np.array([dataset.class_names[int(old)] for old in order])}
    for name, split in dataset.splits.items():
        ids = new_id[np.asarray(split.labels.ids)]
        chosen = np.flatnonzero(ids >= 0)
        chosen = chosen[:rows] if name == "train" and rows is not None else chosen
        arrays[f"{name}_features"] = split.fetch(chosen).inputs.numpy()
        arrays[f"{name}_labels"] = ids[chosen]
    write_arrays(path, arrays, compressed=False)
    return path


LONGER = Setting(
    "pycode, longer",
    "The same with ten times the steps, still less than half a pass: here the rule learns τ.",
    lambda folder: "pycode:classes=1024",
    {"steps": 1600, "learning_rate": 6e-3},
    searches=False,
)
"""On request: where the rule of `temperature="auto"` does something else than leave τ alone."""

_SYNTHETIC = "synthetic:rows=12000,classes=30,features=8"
_QUICK: dict[str, Any] = {
    "steps": 60,
    "batch_size": 64,
    "rank": 4,
    "learning_rate": 0.05,
    "eval_samples": 16,
    "evaluation_examples": 600,
    "test_examples": 600,
}
_MINIATURE = MINI | {"steps": 2, "learning_rate": 0.05, "evaluation_examples": 40, "test_examples": 40, "log_every": 1}


def _little_synthetic(folder: Path) -> str:
    whole = open_dataset("synthetic", rows=12000, classes=30, features=8)
    return str(commonest_classes(whole, 30, folder / "synthetic-480.npz", rows=480))


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "full": (
        Setting(
            "pycode",
            "Python's source, its commonest tokens: a twenty-fifth of one pass.",
            lambda folder: "pycode:classes=1024",
            {"steps": 160, "learning_rate": 6e-3},
        ),
        Setting(
            "wordnet-100",
            "The 100 commonest hypernyms of WordNet, frozen features: ten passes.",
            lambda folder: str(commonest_classes(open_dataset("wordnet"), 100, folder / "wordnet-100.npz")),
            {"steps": 420, "learning_rate": 3e-3},
        ),
    ),
    "quick": (
        Setting(
            "synthetic, once", "Drawn from a HET-XL model: a third of one pass.", lambda folder: _SYNTHETIC, _QUICK
        ),
        Setting("synthetic, many times", "The same with few training rows: eight passes.", _little_synthetic, _QUICK),
    ),
    "miniature": (Setting("tiny one", "Small.", lambda folder: "synthetic:rows=400,classes=6,features=4", _MINIATURE),),
}
"""By profile, in the order of the page. Those but the full ones need nothing built."""

SHARES = (0.125, 0.25)  # held-out shares of each batch
SLOW = 0.1  # the multiple of the learning rate that `hetxl train` gives a learned τ
SLOW_LABEL = "Simple training, τ ten times slower"


@dataclass(frozen=True)
class Size:
    """The number of values and trials of the methods."""

    grid: Sequence[float] = search_methods.GRID  # values of τ
    trials: int = 30  # of Bayesian optimisation
    parallel: int = 5  # of its steps


SIZES = {"full": Size(), "quick": Size((0.2, 0.8, 3.0), 6, 3), "miniature": Size((0.4, 1.5), 2, 2)}  # by profile


class Tau(Study):
    """All methods in every setting. The runs are trials that no other study shares, so they are stored with it."""

    name = "tau"
    question = "Which way to choose the temperature is right, on much data and on little?"

    def seeds(self, profile: Profile) -> tuple[int, ...]:
        """Return three seeds, or one in the miniature profile."""
        return (3,) if profile.name == "miniature" else (0, 1, 2)

    def check(self, lab: Lab) -> None:
        """Raise if optuna is missing or options do not go together."""
        require_optuna()
        one_of("head", lab.options["head"], HEAD_NAMES)
        if lab.options["longer"] and lab.profile.name != "full":
            raise ValueError("--longer needs the full profile: leave out --quick or --longer")

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Run all methods; keep what is finished, and draw τ over training beside the results."""
        settings = [*SETTINGS[lab.profile.name], *([LONGER] if lab.options["longer"] else [])]
        # Open the data first, so that missing data raises before anything is trained.
        configs = [setting.config(lab.directory / "data", head=lab.options["head"]) for setting in settings]
        summaries = []
        for number, (setting, config) in enumerate(zip(settings, configs, strict=True), 1):
            lab.console.say(f"[{number}/{len(settings)}] {setting.name}: {setting.about}")
            directory = lab.directory / setting.name.replace(", ", "-").replace(" ", "-")
            size = SIZES[lab.profile.name]
            summaries.append(_OneSetting(setting, config, lab.seeds, size, directory, lab.console).run(lab.jobs))
        write_paths(summaries, lab.directory / "tau.html")
        for methods in (summary["methods"] for summary in summaries):
            for values in methods.values():
                del values["path"]  # only the image needs τ over training, ten times as many values as the tables
        return {"head": lab.options["head"], "settings": summaries}

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw the NLL of every method less that of τ = 1."""
        return plot(summary, path)

    def text(self, summary: Summary) -> str:
        """Return our tables beside the paper's, and which of its conclusions hold here."""
        return page(summary)


def write_paths(settings: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write τ over training by method, a chart for each setting of the study of τ; methods that fix τ are left out."""
    sections = []
    for number, setting in enumerate(settings):
        moving = {
            label: list(zip(values["seeds"], values["path"], strict=True))
            for label, values in setting["methods"].items()
            if any(len({tau for _, tau in points}) > 1 for points in values["path"])
        }
        chart = path_chart(moving, f"path-{number}")
        if chart is not None:
            sections.append((str(setting["setting"]), [chart]))
    return write_page(path, render("search.html", title="τ over training", lead="", sections=sections))


class _OneSetting:
    """All methods in one setting, with all seeds at once, so that no core waits for the slowest run of a step."""

    def __init__(
        self, setting: Setting, config: TrainConfig, seeds: Sequence[int], size: Size, directory: Path, console: Console
    ):
        self.setting, self.config, self.seeds, self.size = setting, config, seeds, size
        self.directory, self.console = directory, console
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}

    def run(self, jobs: int | None) -> dict[str, Any]:
        """Train all runs and summarise them."""
        dataset = open_data(self.config)
        singles = {(seed, label): trial for seed in self.seeds for label, trial in self._singles(seed).items()}
        grids = {seed: self._grid(seed) for seed in self.seeds} if self.setting.searches else {}
        trials = [*singles.values(), *(trial for trials in grids.values() for trial in trials)]
        with TrialPool(self.directory / "logs", device=self.config.device) as workers:
            if not all(trial.finished for trial in trials):
                needed = workers.measure(trials[0]) if jobs != 1 else None
                workers.jobs = jobs_for(len(trials), needed, jobs, self.config.device)
            outcomes = dict(zip([_key(trial) for trial in trials], workers.run(trials, self.console), strict=True))
            for (seed, label), trial in singles.items():
                self._add(label, seed, outcomes[_key(trial)], 1)
            if self.setting.searches:
                by_seed = {seed: [outcomes[_key(trial)] for trial in trials] for seed, trials in grids.items()}
                self._searches({GRID: by_seed, BAYES: self._bayes(workers)}, workers)
        return {
            "setting": self.setting.name,
            "told": self.setting.about,
            "data": self.config.data if not Path(self.config.data).exists() else Path(self.config.data).name,
            "num_classes": dataset.num_classes,
            "training_rows": len(dataset.splits["train"]),
            "steps": self.config.steps,
            "batch_size": self.config.batch_size,
            "methods": {label: self._summary(rows) for label, rows in self.rows.items()},
        }

    def _config(self, seed: int, **more: Any) -> TrainConfig:
        return dataclasses.replace(self.config, seed=seed, **more)

    def _seed_directory(self, seed: int) -> Path:
        return self.directory / f"seed-{seed}"

    def _grid(self, seed: int) -> list[PlannedRun]:
        search = Search("grid", grid=tuple(self.size.grid))
        trials = grid_trials(self._config(seed), search, self._seed_directory(seed), "whole")
        return [_named(trial, seed) for trial in trials]

    def _singles(self, seed: int) -> dict[str, PlannedRun]:
        """Return the methods with one run, by their labels."""
        directory, config = self._seed_directory(seed), self._config(seed)
        searches = [Search("train")]
        if self.setting.searches:
            following = [Search(name, held_out=share) for name in ("bilevel", "gradient") for share in (0.0, *SHARES)]
            searches = [*following, *searches]
        trials = {search.label: single_trial(config, search, directory, "whole") for search in searches}
        slow_config = self._config(seed, temperature_learning_rate=SLOW)
        slow = single_trial(slow_config, Search("train"), directory / "slow", "whole")
        trials[SLOW_LABEL] = dataclasses.replace(slow, name="train-slow")
        trials[Search("posthoc").label] = single_trial(config, Search("posthoc"), directory, "whole")
        return {label: _named(trial, seed) for label, trial in trials.items()}

    def _bayes(self, workers: TrialPool) -> dict[int, list[Outcome]]:
        """Run one search per seed, all at the same time, one round of proposals after the other."""
        outcomes_of: dict[int, list[Outcome]] = {seed: [] for seed in self.seeds}
        studies = {
            seed: Bayes(self._seed_directory(seed), "tau", about(self._config(seed)), seed=seed) for seed in self.seeds
        }
        ended = {
            seed: [Asked(proposal["number"], proposal["temperature"]) for proposal in search.trials()]
            for seed, search in studies.items()
        }
        before = [self._asked(seed, proposal) for seed, proposals in ended.items() for proposal in proposals]
        self._sort(workers.run(before, Console(quiet=True)), outcomes_of)
        while True:
            asked: dict[int, list[Asked]] = {}
            for seed, search in studies.items():
                missing = self.size.trials - search.count()
                waiting = search.unfinished()
                if waiting or missing > 0:
                    asked[seed] = waiting or search.ask(min(self.size.parallel, missing))
            if not asked:
                return outcomes_of
            trials = [self._asked(seed, proposal) for seed, proposals in asked.items() for proposal in proposals]
            outcomes = {outcome.trial.directory: outcome for outcome in workers.run(trials, self.console)}
            for seed, proposals in asked.items():
                for proposal in proposals:
                    outcome = outcomes[self._asked(seed, proposal).directory]
                    nll = None if outcome.result is None else outcome.nll("validation")
                    studies[seed].tell(proposal.number, nll, seconds=outcome.seconds, error=outcome.error)
            self._sort(list(outcomes.values()), outcomes_of)

    def _asked(self, seed: int, asked: Asked) -> PlannedRun:
        name = f"trial-{asked.number:03d}"
        return _named(trial_at(self._config(seed), asked.temperature, name, self._seed_directory(seed), "whole"), seed)

    def _sort(self, outcomes: Sequence[Outcome], outcomes_of: dict[int, list[Outcome]]) -> None:
        for outcome in outcomes:
            outcomes_of[outcome.trial.config.seed].append(outcome)

    def _searches(self, searched: Mapping[str, dict[int, list[Outcome]]], workers: TrialPool) -> None:
        """Add the rows of the searches: chosen by validation, chosen by test, and trained again."""
        again: dict[tuple[str, int], PlannedRun] = {}
        for label, by_seed in searched.items():
            for seed, outcomes in by_seed.items():
                best = choose(outcomes, "validation")
                self._add(label, seed, best, len(outcomes), outcomes)
                self._add(f"{label} (2 folds)", seed, choose(outcomes, "test"), len(outcomes), outcomes)
                name = f"retrained-{label.split()[0].lower()}"
                trial = trial_at(self._config(seed), best.temperature, name, self._seed_directory(seed), "joined")
                again[label, seed] = _named(trial, seed)
        done = workers.run(list(again.values()), self.console)
        for (label, seed), outcome in zip(again, done, strict=True):
            before = searched[label][seed]
            self._add(f"{label} (+ retrain)", seed, outcome, len(before) + 1, [*before, outcome])
        for by_seed in searched.values():
            for outcomes in by_seed.values():
                for outcome in outcomes:
                    drop_weights(outcome)

    def _add(
        self, label: str, seed: int, outcome: Outcome, trainings: int, everything: Sequence[Outcome] | None = None
    ) -> None:
        """Add one replication to a row; report and omit a failed one."""
        if outcome.result is None:
            self.console.say(f"{self.setting.name}, {label}, seed {seed} is left out: {outcome.error}")
            return
        test = outcome.result["metrics"]["test"]
        self.rows.setdefault(label, {})[seed] = {
            "nll": test["nll"],
            "precision@1": test["precision@1"],
            "temperature": outcome.temperature,
            "trainings": trainings,
            "seconds": sum(other.seconds for other in everything or [outcome]),
            "path": outcome.path(),
        }
        if outcome.trial.scaled:  # the same run without the fit is τ = 1
            before = outcome_of(dataclasses.replace(outcome.trial, scaled=None))
            self._add(Search("fixed").label, seed, before, 1)

    def _summary(self, rows: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        seeds = sorted(rows)
        names = ("nll", "precision@1", "temperature", "trainings", "seconds", "path")
        return {"seeds": seeds} | {name: [rows[seed][name] for seed in seeds] for name in names}


def _key(trial: PlannedRun) -> str:
    return str(trial.directories[-1])


def _named(trial: PlannedRun, seed: int) -> PlannedRun:
    """Return the run with a name that includes its seed."""
    return dataclasses.replace(trial, name=f"seed{seed}-{trial.name}")


class Paper(NamedTuple):
    """A row of the paper's table: NLL and precision@1, each with its standard error."""

    nll: float
    nll_error: float
    precision: float
    precision_error: float


def _paper() -> dict[str, Paper]:
    """Return the rows of Table "app_tuning_tau" by our labels: ResNet50x2 on ImageNet-21k, 7 epochs."""
    rows = {}
    for row in paper_table("tab:app_tuning_tau").rows:
        label = row.label.replace("%)", " %)").replace(" (as in HET-XL)", "")
        rows[label] = Paper(*(number for cell in row.cells if isinstance(cell, tuple) for number in cell))
    return rows


PAPER = _paper()  # in the paper's order
OURS = (f"{SIMPLE}, τ ten times slower", FITTED, ONE)  # rows that the paper does not have
MAIN = (GRID, BAYES, LUKETINA, SIMPLE)
"""Those of its first table (Table "tuning_tau")."""
NEEDS_NO_VALIDATION = ("12.5 %", "25.0 %", SIMPLE, ONE)
SIGNIFICANT = 0.05


def table(methods: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Return our numbers and the paper's in markdown, without methods that were not run."""
    rows = []
    for label in labels:
        if label in methods:
            values, paper = methods[label], PAPER.get(label)
            ours = [mean_text(values[metric]) for metric in ("nll", "precision@1")]
            once = not label.startswith(("Grid", "Bayesian"))
            alone = any(part in label for part in NEEDS_NO_VALIDATION)
            marks = ["✓" if yes else "×" for yes in (once, alone)]
            cost = [mean_text(values["temperature"], 2), f"{mean(values['seconds']).value:.0f} s"]
            theirs = ["–", "–"]
            if paper is not None:
                precision = f"{paper.precision:.3f} ± {paper.precision_error:.3f}"
                theirs = [f"{paper.nll:.2f} ± {paper.nll_error:.2f}", precision]
            rows.append([label, *ours, *marks, *cost, *theirs])
    asked = ["single training?", "no validation set needed?", "τ", "training"]
    return markdown(["method", "NLL", "precision@1", *asked, "paper: NLL", "paper: precision@1"], rows)


class Claim(NamedTuple):
    """A conclusion of the paper about two methods: whether the first has a higher NLL."""

    text: str  # in the paper's words, shortened
    first: str
    second: str
    worse: bool = False  # whether the paper finds the first worse, or no worse


CLAIMS = (
    Claim("Simple training costs nothing against grid search", SIMPLE, GRID),
    Claim("Simple training costs nothing against Bayesian optimization", SIMPLE, BAYES),
    Claim("Simple training costs nothing against Luketina et al.", SIMPLE, LUKETINA),
    Claim("Choosing on the test split (grid) gains nothing", GRID, f"{GRID} (2 folds)"),
    Claim("Choosing on the test split (Bayes) gains nothing", BAYES, f"{BAYES} (2 folds)"),
    Claim("Training once more on all rows (grid) does not help", GRID, f"{GRID} (+ retrain)"),
    Claim("Training once more on all rows (Bayes) does not help", BAYES, f"{BAYES} (+ retrain)"),
    Claim("The simple gradient is worse than Luketina et al.", f"{GRADIENT} (val)", LUKETINA, True),
    Claim("Luketina et al. suffers from a held-out share of the batch", f"{LUKETINA} (25.0 %)", LUKETINA, True),
    Claim("and is then worse than the simple gradient", f"{LUKETINA} (25.0 %)", f"{GRADIENT} (25.0 %)", True),
)


def compared(methods: Mapping[str, Mapping[str, Any]], first: str, second: str) -> PairedTest | None:
    """Return one method's NLL less another's over the seeds that both have; None if they share no seed."""
    if first not in methods or second not in methods:
        return None
    left, right = (dict(zip(methods[name]["seeds"], methods[name]["nll"], strict=True)) for name in (first, second))
    seeds = sorted(set(left) & set(right))
    return paired_test([left[seed] for seed in seeds], [right[seed] for seed in seeds]) if seeds else None


def holds(claim: Claim, test: PairedTest) -> str:
    """Say in a word or two whether a difference confirms a claim."""
    sure = test.p is not None and test.p < SIGNIFICANT
    if claim.worse:
        return "holds" if sure and test.difference > 0 else "the contrary" if sure else "not seen"
    if not sure:
        return "no difference seen"
    return "does not hold" if test.difference > 0 else "holds, and better"


def claims_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return every conclusion in every setting, in markdown."""
    rows = []
    for claim in CLAIMS:
        tests = [compared(setting["methods"], claim.first, claim.second) for setting in settings]
        texts = [t and f"{holds(claim, t)}: {difference_text(t, 3)}, p {p_text(t.p)}" for t in tests]
        rows.append([claim.text, *(text or "–" for text in texts)])
    return markdown(["the paper", *(str(setting["setting"]) for setting in settings)], rows)


SEARCHES = (GRID, BAYES)
ONCE = (LUKETINA, f"{GRADIENT} (val)", SIMPLE, *OURS)
"""Ways with one training that `hetxl tune` has as they are, of which a user will ask which to take."""


def conclusion(setting: Mapping[str, Any]) -> str:
    """Summarise a setting in a few sentences."""
    methods = setting["methods"]
    sentences = [f"**{setting['setting']}.** {setting['told']}"]
    known = {label: mean(methods[label]["nll"]).value for label in (*SEARCHES, *ONCE) if label in methods}
    search = min((label for label in SEARCHES if label in known), key=known.__getitem__, default=None)
    test = None if search is None else compared(methods, SIMPLE, search)
    if search is not None and test is not None:
        verdict = {
            "does not hold": "the paper's conclusion, that learning τ with the rest costs nothing, does not hold",
            "holds, and better": "the paper's conclusion, that learning τ with the rest costs nothing, holds: it gains",
            "no difference seen": "as in the paper no difference is seen",
        }[holds(CLAIMS[0], test)]
        ends = [mean_text(methods[label]["temperature"], 2) for label in (SIMPLE, search)]
        sentences.append(
            f"τ learned with the rest ends at {ends[0]}, with an NLL of {known[SIMPLE]:.3f}; the better "
            f"search, {search.replace('Grid', 'grid')}, chooses {ends[1]}, with {known[search]:.3f} after "
            f"{mean(methods[search]['trainings']).value:.0f} runs: {verdict} ({difference_text(test, 3)}, "
            f"p {p_text(test.p)})."
        )
    once = sorted((label for label in ONCE if label in known), key=known.__getitem__)
    if len(once) > 1:
        sentences.append(
            f"Of the methods with one run, the best first: {'; '.join(_against_one(methods, x) for x in once)}."
        )
    return " ".join(sentences)


def _against_one(methods: Mapping[str, Mapping[str, Any]], label: str) -> str:
    """Return a method with its NLL less that of τ = 1."""
    test = compared(methods, label, ONE) if label != ONE else None
    return label if test is None else f"{label} ({difference_text(test, 3)}, p {p_text(test.p)})"


def plot(summary: Mapping[str, Any], path: Path) -> Path:
    """Draw the NLL of every method less that of τ = 1, with 95 % intervals."""
    groups = []
    for setting in summary["settings"]:
        methods = setting["methods"]
        tests = ((label, compared(methods, label, ONE)) for label in (*PAPER, *OURS) if label != ONE)
        groups.append((str(setting["setting"]), [(label, test) for label, test in tests if test is not None]))
    return plot_groups(groups, path, "test NLL less that of τ = 1, with 95 % intervals: left is better")


def page(summary: Mapping[str, Any]) -> str:
    """Return the page of the study in markdown."""
    settings, seeds = summary["settings"], len(summary["seeds"])
    parts = [
        f"# Choosing τ of {str(summary['head']).upper()}",
        f"Means ± standard errors over {seeds} {'replication' if seeds == 1 else 'replications'}, on the test split. "
        "The paper's columns are of a ResNet50x2 on ImageNet-21k, 7 passes, HET-XL. `training` is the time of all "
        "runs that a method takes, in seconds of one worker.",
        *(conclusion(setting) for setting in settings),
        "![NLL of every way less that of τ = 1](tau.svg)",
    ]
    for setting in settings:
        methods = setting["methods"]
        parts += [
            f"## {setting['setting']}",
            f"{setting['told']} {setting['num_classes']:,} classes, {setting['training_rows']:,} training rows, "
            f"{setting['steps']:,} steps of {setting['batch_size']:,}.",
        ]
        if any(label in methods for label in SEARCHES):
            parts += ['The first table of the paper ("tuning_tau"):', table(methods, MAIN)]
            parts += ['The second ("app_tuning_tau"), and three rows of our own:']
        parts.append(table(methods, (*PAPER, *OURS)))
    parts += [
        "## Which conclusions of the paper hold here",
        "Differences of NLL, paired over the replications; a difference counts below p = 0.05. With three replications "
        "only large ones do.",
        claims_table([setting for setting in settings if SEARCHES[0] in setting["methods"]]),
        "“2 folds” chooses on the test split among the runs of the same search: for the paper's check only.",
    ]
    return "\n\n".join(part.rstrip() for part in parts)


STUDIES = (Tau(),)
