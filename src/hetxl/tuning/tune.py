"""`hetxl tune`: choose τ in one of the ways that the paper compares, and say what it cost.

OUT/tune.json      the chosen τ, its metrics, its path over training, all trials, trainings and seconds
OUT/tune.html      the same as a picture: τ over training, and for a search the NLL over τ
OUT/trials/        the runs, as `hetxl train` writes them; of those that were not chosen the numbers alone
OUT/logs/          what their processes printed
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl.report.format import plural
from hetxl.training.config import TrainConfig
from hetxl.training.evaluation import evaluate_run
from hetxl.training.files import read_json, write_json
from hetxl.training.length import with_length
from hetxl.training.memory import jobs_for
from hetxl.training.progress import Narrator, amount, duration
from hetxl.training.recommend import recommend_for
from hetxl.training.train import open_data
from hetxl.tuning.bayes import Asked, Bayes, best_of, run_steps
from hetxl.tuning.methods import SEARCHES, Search, about, grid_trials, single_trial, trial_at
from hetxl.tuning.plot import write_plot
from hetxl.tuning.trial import Outcome, Trial, check_trial, drop_weights, outcome_of, run_trial
from hetxl.tuning.workers import Workers

FORMAT = 1


def tune(config: TrainConfig, search: Search, *, narrator: Narrator | None = None) -> Path:
    """Choose τ; a search that was stopped goes on, and trials that are finished are kept.

    Args:
        config: of all trainings; its temperature is replaced.
        search: the way.
        narrator: tells how far it is.

    Returns:
        tune.json, in `config.out` or runs/tune-DATA-HEAD-METHOD.
    """
    narrator = narrator or Narrator()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("tune starts processes of its own; run it without torchrun")
    config = dataclasses.replace(config, temperature="auto", temperature_method="train", temperature_held_out=0.0)
    directory = default_directory(config, search) if config.out is None else Path(config.out)
    path = directory / "tune.json"
    options = _options(config, search)
    if path.exists():
        _check_same(path, options)
        narrator.say(f"{directory} is done already; remove it, or choose another --out, to choose again")
        return path
    if directory.exists() and any(directory.iterdir()) and not (directory / "search.json").exists():
        raise ValueError(f"{directory} has files but no search in it; choose another --out")
    if (directory / "search.json").exists():
        _check_same(directory / "search.json", options)
    dataset = open_data(config)
    if search.needs_validation and "validation" not in dataset.splits:
        raise ValueError(f"method = {search.method} needs a validation split; give --validation, or choose train")
    if search.folds == 2 and "test" not in dataset.splits:
        raise ValueError("folds = 2 chooses on the test split, which the data does not have")
    config = with_length(config, dataset)
    del dataset  # trials open it for themselves
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "search.json", {"format": FORMAT, "options": options})
    begin = time.perf_counter()
    job = _Job(config, search, directory, narrator)
    with job.stack:
        chosen, outcomes = job.bayes() if search.method == "bayes" else job.listed()
        result = job.result(chosen, outcomes, begin, options)
    write_json(path, result)
    write_plot(result, directory / "tune.html")
    for outcome in outcomes:
        if outcome.result is not None and outcome.trial.name != chosen.trial.name:
            drop_weights(outcome)
    _tell(result, directory, narrator)
    return path


def default_directory(config: TrainConfig, search: Search) -> Path:
    """runs/tune-DATA-HEAD-METHOD"""
    name = Path(config.data.split(":")[0]).stem or "data"
    return Path("runs") / f"tune-{name}-{config.head}-{search.method}"


def recommended(config: TrainConfig, trainings: int, narrator: Narrator) -> str:
    """The method that `recommend` names for the data of a configuration and a budget of trainings."""
    found = recommend_for(config, open_data(config), trainings)
    narrator.say(f"Method {found.method}: {found.reason}")
    return found.method


def choose(outcomes: Sequence[Outcome], split: str) -> Outcome:
    """The trial with the lowest NLL on a split; an error if all failed."""
    ended = [outcome for outcome in outcomes if outcome.result is not None]
    if not ended:
        first = outcomes[0]
        raise ValueError(f"all {len(outcomes)} trainings failed; {first.trial.name}: {first.error}")
    return min(ended, key=lambda outcome: outcome.nll(split))


class _Job:
    """A search that is under way."""

    def __init__(self, config: TrainConfig, search: Search, directory: Path, narrator: Narrator):
        self.config, self.search, self.directory, self.narrator = config, search, directory, narrator
        self.trials_folder, self.logs = directory / "trials", directory / "logs"
        # The test split is looked at once, at the end; unless it is what τ is chosen on.
        self.data = "whole" if search.folds == 2 else "blind"
        self.workers: Workers | None = None
        self.stack = contextlib.ExitStack()
        self.shared: list[dict[str, Any]] | None = None

    def listed(self) -> tuple[Outcome, list[Outcome]]:
        """A grid, or a method with one training."""
        if self.search.method == "grid":
            outcomes = self.train(grid_trials(self.config, self.search, self.trials_folder, self.data))
        else:
            outcomes = self.train([single_trial(self.config, self.search, self.trials_folder, self.data)])
        return choose(outcomes, self._split(outcomes)), outcomes

    def bayes(self) -> tuple[Outcome, list[Outcome]]:
        """Steps of several trainings, each after what was found before."""
        search, found = self.search, {}
        study = Bayes(
            self.directory,
            f"{self.config.data} {self.config.head} seed {self.config.seed}",
            about(self.config) | {"split": search.split},
            storage=search.storage,
            sampler=search.sampler,
            seed=self.config.seed,
        )

        def train(asked: list[Asked]) -> list[tuple[float | None, dict[str, Any]]]:
            trials = [self._asked(one) for one in asked]
            outcomes = self.train(trials)
            found.update({outcome.trial.name: outcome for outcome in outcomes})
            return [
                (None if one.result is None else one.nll(search.split), {"seconds": one.seconds, "error": one.error})
                for one in outcomes
            ]

        run_steps(study, search.trials, search.parallel, train)
        self.shared = study.trials()
        best = best_of(self.shared)
        for one in self.shared:  # those of before this process began
            trial = self._asked(Asked(one["number"], one["temperature"]))
            if one["here"] and trial.name not in found:
                found[trial.name] = outcome_of(trial, one.get("error"))
        outcomes = sorted(found.values(), key=lambda outcome: outcome.trial.name)
        if best is None:
            return choose(outcomes, search.split), outcomes
        trial = self._asked(Asked(best["number"], best["temperature"]))
        if not best["here"]:  # another machine has its weights
            self.narrator.say(f"The best τ, {best['temperature']:.3f}, was found on another machine: training with it")
        [chosen] = self.train([trial])
        if chosen.result is None:
            raise ValueError(f"the training with the chosen τ failed: {chosen.error}")
        return chosen, outcomes

    def _asked(self, asked: Asked) -> Trial:
        return trial_at(self.config, asked.temperature, f"trial-{asked.number:03d}", self.trials_folder, self.data)

    def train(self, trials: list[Trial]) -> list[Outcome]:
        """Run trials: one in this process, several in as many as fit."""
        for trial in trials:
            check_trial(trial)
        waiting = [trial for trial in trials if not trial.finished]
        if len(waiting) == 1 and len(trials) == 1 and self.search.method not in SEARCHES:
            run_trial(trials[0], self.narrator)
            return [outcome_of(trials[0])]
        if not waiting:
            return [outcome_of(trial) for trial in trials]
        if self.workers is None:
            self.workers = self.stack.enter_context(Workers(1, self.logs))
            self._grow(waiting[0], self.search.parallel if self.search.method == "bayes" else len(trials))
        return self.workers.run(trials, self.narrator)

    def _grow(self, trial: Trial, most: int) -> None:
        """As many workers as fit, by trying how much memory one needs."""
        assert self.workers is not None
        needed = self.workers.measure(trial) if self.search.jobs != 1 and most > 1 else None
        jobs = jobs_for(most, needed, self.search.jobs, self.config.device)
        self.workers.grow(jobs)
        size = "" if needed is None else f", {amount(needed)} each"
        self.narrator.say(f"{plural(jobs, 'training')} at a time{size}")

    def retrained(self, chosen: Outcome) -> Outcome:
        """The chosen τ once more, with the validation rows among the training rows."""
        trial = trial_at(self.config, chosen.temperature, "retrained", self.trials_folder, "joined")
        [found] = self.train([trial])
        if found.result is None:
            raise ValueError(f"the last training failed: {found.error}")
        return found

    def result(self, chosen: Outcome, outcomes: list[Outcome], begin: float, options: dict[str, Any]) -> dict[str, Any]:
        """The content of tune.json."""
        search, final = self.search, chosen
        everything = [*outcomes]
        if search.retrain:
            final = self.retrained(chosen)
            everything.append(final)
        assert final.result is not None
        metrics = dict(final.result["metrics"])
        if "test" not in metrics and "test" in open_data(self.config).splits:
            metrics["test"] = evaluate_run(
                final.trial.final, split="test", limit=self.config.test_examples, device=self.config.device
            )
        return {
            "format": FORMAT,
            "options": options,
            "label": search.label,
            "method": search.method,
            "head": self.config.head,
            "seed": self.config.seed,
            "temperature": final.temperature,
            "chosen_on": search.split,
            "note": "chosen on the test split: for the paper's check only" if search.folds == 2 else None,
            "metrics": metrics,
            "single_training": search.single_training,
            "needs_validation": search.needs_validation,
            "trainings": len(everything),
            "failed": sum(outcome.result is None for outcome in everything),
            "seconds": sum(outcome.seconds for outcome in everything),
            "wall_seconds": time.perf_counter() - begin,
            "path": final.path(),
            "trials": self.shared if self.shared is not None else [_numbers(one, search) for one in outcomes],
            "run": str(final.trial.final.relative_to(self.directory)),
        }

    def _split(self, outcomes: Sequence[Outcome]) -> str:
        """On which to choose; a single training of data without validation rows has no choice to make."""
        ended = [outcome.result for outcome in outcomes if outcome.result is not None]
        if ended and self.search.split not in ended[0]["metrics"]:
            return next(iter(ended[0]["metrics"]))
        return self.search.split


def _numbers(outcome: Outcome, search: Search) -> dict[str, Any]:
    found: dict[str, Any] = {"name": outcome.trial.name, "error": outcome.error, "seconds": outcome.seconds}
    if outcome.result is not None:
        metrics = outcome.result["metrics"]
        found["temperature"] = outcome.temperature
        found["nll"] = metrics[search.split]["nll"] if search.split in metrics else None
    return found


def _options(config: TrainConfig, search: Search) -> dict[str, Any]:
    kept = dataclasses.asdict(search) | {"grid": list(search.grid)}
    kept.pop("jobs")  # which changes nothing in the result
    return {"training": about(config), "search": kept}


def _check_same(path: Path, options: dict[str, Any]) -> None:
    known = read_json(path).get("options", {})
    for part in ("training", "search"):
        there, here = known.get(part, {}), options[part]
        differing = [
            f"{key} {there.get(key)!r} there, {here.get(key)!r} here"
            for key in sorted({*there, *here})
            if there.get(key) != here.get(key)
        ]
        if differing:
            raise ValueError(
                f"{path.parent} holds a search with other options ({'; '.join(differing[:3])}); choose another --out"
            )


def _tell(result: dict[str, Any], directory: Path, narrator: Narrator) -> None:
    split = "test" if "test" in result["metrics"] else next(iter(result["metrics"]))
    failed = f", {result['failed']} failed" if result["failed"] else ""
    note = f" ({result['note']})" if result["note"] else ""
    narrator.say(
        f"{result['label']}: τ = {result['temperature']:.3f}{note}, {split} NLL {result['metrics'][split]['nll']:.3f}; "
        f"{plural(result['trainings'], 'training')}{failed}, {duration(result['seconds'])} of training; {directory}"
    )
