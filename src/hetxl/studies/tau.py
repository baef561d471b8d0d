"""`hetxl study tau`: every way to choose τ that the paper compares, on much data and on little.

The two tables of the paper (Table "tuning_tau", Appendix "Tuning of τ"), our numbers beside its own. All methods of a
seed share what they can: "2 folds" chooses among the trainings of the same search, by the test split.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl.studies.plot import new_figure
from hetxl.studies.tau_page import PICTURE, page, plot
from hetxl.studies.tau_settings import LONGER, QUICK, SETTINGS, Setting
from hetxl.training.config import TrainConfig
from hetxl.training.files import write_bytes, write_json
from hetxl.training.memory import jobs_for
from hetxl.training.progress import Narrator
from hetxl.training.train import open_data
from hetxl.tuning.bayes import Asked, Bayes, require_optuna
from hetxl.tuning.methods import GRID, Search, about, grid_trials, single_trial, trial_at
from hetxl.tuning.plot import write_paths
from hetxl.tuning.trial import Outcome, Trial, check_trial, drop_weights, outcome_of
from hetxl.tuning.tune import choose
from hetxl.tuning.workers import Workers

SHARES = (0.125, 0.25)
"""Of each batch, held out."""
SLOW = 0.1
"""The multiple of the learning rate that `hetxl train` gives a learned τ."""
SLOW_LABEL = "Simple training, τ ten times slower"


@dataclass(frozen=True)
class Size:
    """How much is tried.

    Attributes:
        grid: values of τ.
        trials: of Bayesian optimisation.
        parallel: of its steps.
    """

    grid: Sequence[float] = GRID
    trials: int = 30
    parallel: int = 5


FULL = Size()
SMALL = Size((0.2, 0.8, 3.0), 6, 3)


def study(
    *,
    seeds: Sequence[int] = (0, 1, 2),
    out: Path = Path("runs/study-tau"),
    head: str = "het-xl",
    quick: bool = False,
    longer: bool = False,
    jobs: int | None = None,
    narrator: Narrator | None = None,
) -> Path:
    """Run the study; whatever is finished is kept.

    Args:
        seeds: of the replications.
        out: directory, one below it for each setting.
        head: whose τ it is.
        quick: the small settings of `QUICK`, a grid of three and a search of six.
        longer: also the ways with one training in ten times the steps, on the first of the settings.
        jobs: trainings at a time; None for as many as there are cores and memory.
        narrator: tells how far it is.

    Returns:
        summary.json; study.md with its picture and study.html, τ over training, are beside it.
    """
    require_optuna()
    new_figure(1, 1)  # whether there is matplotlib is better known now
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, found {list(seeds)}")
    narrator, size = narrator or Narrator(), SMALL if quick else FULL
    settings = dict(QUICK if quick else SETTINGS)
    if longer and quick:
        raise ValueError("longer is of the full form: leave quick or longer out")
    if longer:
        settings[LONGER.name] = LONGER
    # Before anything is trained: data that is not built says so.
    configs = {name: setting.config(out / "data", head=head) for name, setting in settings.items()}
    found = []
    for number, (name, setting) in enumerate(settings.items()):
        narrator.say(f"[{number + 1}/{len(settings)}] {name}: {setting.told}")
        one = _OneSetting(
            setting, configs[name], seeds, size, out / name.replace(", ", "-").replace(" ", "-"), narrator
        )
        found.append(one.run(jobs))
    numbers = [_without_paths(setting) for setting in found]
    summary = {"head": head, "seeds": list(seeds), "quick": quick, "settings": numbers}
    write_json(out / "summary.json", summary)
    write_bytes(out / "study.md", page(summary).encode())
    plot(summary, out / PICTURE)
    write_paths(found, out / "study.html")
    return out / "summary.json"


def _without_paths(setting: Mapping[str, Any]) -> dict[str, Any]:
    """What tables are made of: τ over training is for the picture, and ten times as much."""
    methods = {
        label: {name: value for name, value in values.items() if name != "path"}
        for label, values in setting["methods"].items()
    }
    return {**setting, "methods": methods}


class _OneSetting:
    """All methods on one setting, over all seeds at a time: so that no core waits for the last of a step."""

    def __init__(
        self,
        setting: Setting,
        config: TrainConfig,
        seeds: Sequence[int],
        size: Size,
        directory: Path,
        narrator: Narrator,
    ):
        self.setting, self.config, self.seeds, self.size = setting, config, seeds, size
        self.directory, self.narrator = directory, narrator
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}

    def run(self, jobs: int | None) -> dict[str, Any]:
        """Train everything, and sum it up."""
        dataset = open_data(self.config)
        singles = {
            (seed, label): trial for seed in self.seeds for label, trial in self._singles(seed).items()
        }  # fmt: skip
        grids = {seed: self._grid(seed) for seed in self.seeds} if self.setting.searches else {}
        wanted = [*singles.values(), *(trial for trials in grids.values() for trial in trials)]
        for trial in wanted:
            check_trial(trial)
        logs = self.directory / "logs"
        with Workers(1, logs) as workers:
            if not all(trial.finished for trial in wanted):
                needed = workers.measure(wanted[0]) if jobs != 1 else None
                workers.grow(jobs_for(len(wanted), needed, jobs, self.config.device))
            outcomes = dict(zip([_key(trial) for trial in wanted], workers.run(wanted, self.narrator), strict=True))
            for (seed, label), trial in singles.items():
                self._add(label, seed, outcomes[_key(trial)], 1)
            if self.setting.searches:
                by_seed = {seed: [outcomes[_key(trial)] for trial in trials] for seed, trials in grids.items()}
                self._searches({"Grid search": by_seed, "Bayesian optimization": self._bayes(workers)}, workers)
        return {
            "setting": self.setting.name,
            "told": self.setting.told,
            "data": self.config.data if not Path(self.config.data).exists() else Path(self.config.data).name,
            "num_classes": dataset.num_classes,
            "training_rows": len(dataset.splits["train"]),
            "steps": self.config.steps,
            "batch_size": self.config.batch_size,
            "methods": {label: self._summary(rows) for label, rows in self.rows.items()},
        }

    def _config(self, seed: int, **more: Any) -> TrainConfig:
        return dataclasses.replace(self.config, seed=seed, **more)

    def _place(self, seed: int) -> Path:
        return self.directory / f"seed-{seed}"

    def _grid(self, seed: int) -> list[Trial]:
        search = Search("grid", grid=tuple(self.size.grid))
        return [_named(trial, seed) for trial in grid_trials(self._config(seed), search, self._place(seed), "whole")]

    def _singles(self, seed: int) -> dict[str, Trial]:
        """The methods with one training, by their labels."""
        place, config = self._place(seed), self._config(seed)
        ways = [Search("train")]
        if self.setting.searches:
            following = [Search(name, held_out=share) for name in ("bilevel", "gradient") for share in (0.0, *SHARES)]
            ways = [*following, *ways]
        found = {way.label: single_trial(config, way, place, "whole") for way in ways}
        slow = single_trial(
            self._config(seed, temperature_learning_rate=SLOW), Search("train"), place / "slow", "whole"
        )
        found[SLOW_LABEL] = dataclasses.replace(slow, name="train-slow")
        found[Search("posthoc").label] = single_trial(config, Search("posthoc"), place, "whole")
        return {label: _named(trial, seed) for label, trial in found.items()}

    def _bayes(self, workers: Workers) -> dict[int, list[Outcome]]:
        """One search for each seed, in step with one another."""
        found: dict[int, list[Outcome]] = {seed: [] for seed in self.seeds}
        studies = {
            seed: Bayes(self._place(seed), "tau", about(self._config(seed)), seed=seed) for seed in self.seeds
        }  # fmt: skip
        ended = {
            seed: [Asked(one["number"], one["temperature"]) for one in search.trials()]
            for seed, search in studies.items()
        }
        before = [self._asked(seed, one) for seed, several in ended.items() for one in several]
        self._sort(workers.run(before, Narrator(quiet=True)), found)
        while True:
            asked: dict[int, list[Asked]] = {}
            for seed, search in studies.items():
                missing = self.size.trials - search.count()
                waiting = search.unfinished()
                if waiting or missing > 0:
                    asked[seed] = waiting or search.ask(min(self.size.parallel, missing))
            if not asked:
                return found
            trials = [self._asked(seed, one) for seed, several in asked.items() for one in several]
            outcomes = {outcome.trial.path: outcome for outcome in workers.run(trials, self.narrator)}
            for seed, several in asked.items():
                for one in several:
                    outcome = outcomes[self._asked(seed, one).path]
                    nll = None if outcome.result is None else outcome.nll("validation")
                    studies[seed].tell(one.number, nll, seconds=outcome.seconds, error=outcome.error)
            self._sort(list(outcomes.values()), found)

    def _asked(self, seed: int, asked: Asked) -> Trial:
        name = f"trial-{asked.number:03d}"
        return _named(trial_at(self._config(seed), asked.temperature, name, self._place(seed), "whole"), seed)

    def _sort(self, outcomes: Sequence[Outcome], found: dict[int, list[Outcome]]) -> None:
        for outcome in outcomes:
            found[outcome.trial.config.seed].append(outcome)

    def _searches(self, searched: Mapping[str, dict[int, list[Outcome]]], workers: Workers) -> None:
        """The rows of the searches: chosen by validation, by test, and trained once more."""
        again: dict[tuple[str, int], Trial] = {}
        for label, by_seed in searched.items():
            for seed, outcomes in by_seed.items():
                best = choose(outcomes, "validation")
                self._add(label, seed, best, len(outcomes), outcomes)
                self._add(f"{label} (2 folds)", seed, choose(outcomes, "test"), len(outcomes), outcomes)
                name = f"retrained-{label.split()[0].lower()}"
                trial = trial_at(self._config(seed), best.temperature, name, self._place(seed), "joined")
                again[label, seed] = _named(trial, seed)
        done = workers.run(list(again.values()), self.narrator)
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
        """One replication of a row; one that failed is told and left out."""
        if outcome.result is None:
            self.narrator.say(f"{self.setting.name}, {label}, seed {seed} is left out: {outcome.error}")
            return
        test = outcome.result["metrics"]["test"]
        self.rows.setdefault(label, {})[seed] = {
            "nll": test["nll"],
            "precision@1": test["precision@1"],
            "temperature": outcome.temperature,
            "trainings": trainings,
            "seconds": sum(one.seconds for one in everything or [outcome]),
            "path": outcome.path(),
        }
        if outcome.trial.posthoc:  # the same training without the fit is τ = 1
            self._add(Search("fixed").label, seed, _before_fit(outcome), 1)

    def _summary(self, rows: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        seeds = sorted(rows)
        names = ("nll", "precision@1", "temperature", "trainings", "seconds", "path")
        return {"seeds": seeds} | {name: [rows[seed][name] for seed in seeds] for name in names}


def _key(trial: Trial) -> str:
    return str(trial.final)


def _named(trial: Trial, seed: int) -> Trial:
    """Under a name that no other seed has."""
    return dataclasses.replace(trial, name=f"seed{seed}-{trial.name}")


def _before_fit(outcome: Outcome) -> Outcome:
    return outcome_of(dataclasses.replace(outcome.trial, posthoc=False))
