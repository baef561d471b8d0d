"""`hetxl tune`: choose τ by one of the methods that the paper compares, and report what it cost.

OUT/tune.json      the chosen τ, its metrics, its path over the steps, all trials, the number of runs and seconds
OUT/tune.html      the same as plots: τ over the steps, and for a search the NLL over τ
OUT/trials/        the runs, as `hetxl train` writes them; those that were not chosen without weights
OUT/logs/          what their processes printed
"""

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl._files import read_json, write_json
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data.open import open_data
from hetxl_train.evaluate_runs import evaluate_run
from hetxl_train.formatting import amount, plural, rough_duration
from hetxl_train.num_steps import with_length
from hetxl_train.runner import PlannedRun, jobs_for
from hetxl_train.search.bayes import Asked, Bayes, best_of, differences, run_steps
from hetxl_train.search.methods import Search, about, grid_trials, single_trial, trial_at
from hetxl_train.search.plot import write_plot
from hetxl_train.search.trial import Outcome, TrialPool, drop_weights, outcome_of, run_trial
from hetxl_train.temperature.policy import recommend_for

FORMAT = 1


def tune(config: TrainConfig, search: Search, *, console: Console | None = None) -> Path:
    """Choose τ; a stopped search resumes and does not repeat finished trials.

    The temperature of the configuration is replaced. The result is the path of tune.json, in `config.out` or
    runs/tune-DATA-HEAD-METHOD.
    """
    console = console or Console()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("tune starts its own processes; run it without torchrun")
    config = dataclasses.replace(config, temperature="auto", temperature_method="train", temperature_held_out=0.0)
    directory = default_directory(config, search) if config.out is None else Path(config.out)
    path = directory / "tune.json"
    options = _options(config, search)
    if path.exists():
        _check_same(path, options)
        console.say(f"{directory} is done already; to search again, remove it or choose another --out")
        return path
    if directory.exists() and any(directory.iterdir()) and not (directory / "search.json").exists():
        raise ValueError(f"{directory} has files but no search.json; choose another --out")
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
    with TrialPool(directory / "logs", device=config.device) as pool:
        job = _Job(config, search, directory, console, pool)
        chosen, outcomes = job.bayes() if search.method == "bayes" else job.listed()
        result = job.result(chosen, outcomes, begin, options)
    write_json(path, result)
    write_plot(result, directory / "tune.html")
    for outcome in outcomes:
        if outcome.result is not None and outcome.trial.name != chosen.trial.name:
            drop_weights(outcome)
    console.say(_summary(result, directory))
    return path


def default_directory(config: TrainConfig, search: Search) -> Path:
    """Return runs/tune-DATA-HEAD-METHOD."""
    name = Path(config.data.split(":")[0]).stem or "data"
    return Path("runs") / f"tune-{name}-{config.head}-{search.method}"


def recommended(config: TrainConfig, runs: int, console: Console) -> str:
    """Return the method that `recommend` names for the data of a configuration and a budget of runs."""
    recommendation = recommend_for(config, open_data(config), runs)
    console.say(f"Method {recommendation.method}: {recommendation.reason}")
    return recommendation.method


def choose(outcomes: Sequence[Outcome], split: str) -> Outcome:
    """Return the trial with the lowest NLL on a split; raise if all failed."""
    ended = [outcome for outcome in outcomes if outcome.result is not None]
    if not ended:
        first = outcomes[0]
        raise ValueError(f"all {len(outcomes)} runs failed; {first.trial.name}: {first.error}")
    return min(ended, key=lambda outcome: outcome.nll(split))


class _Job:
    """A search in progress."""

    def __init__(self, config: TrainConfig, search: Search, directory: Path, console: Console, pool: TrialPool):
        self.config, self.search, self.directory, self.console, self.pool = config, search, directory, console, pool
        self.trials = directory / "trials"
        # The test split is evaluated once, at the end; unless it is what τ is chosen on.
        self.data = "whole" if search.folds == 2 else "blind"
        self.sized = False
        self.shared: list[dict[str, Any]] | None = None

    def listed(self) -> tuple[Outcome, list[Outcome]]:
        """Run a grid, or a method that takes one run."""
        arguments = (self.config, self.search, self.trials, self.data)
        outcomes = self.train(grid_trials(*arguments) if self.search.method == "grid" else [single_trial(*arguments)])
        ended = [outcome.result for outcome in outcomes if outcome.result is not None]
        split = self.search.split
        if ended and split not in ended[0]["metrics"]:  # a single run on data without validation rows has no choice
            split = next(iter(ended[0]["metrics"]))
        return choose(outcomes, split), outcomes

    def bayes(self) -> tuple[Outcome, list[Outcome]]:
        """Run steps of several trials, each suggested from the results before it."""
        search, outcomes_by_name = self.search, {}
        study = Bayes(
            self.directory,
            f"{self.config.data} {self.config.head} seed {self.config.seed}",
            about(self.config) | {"split": search.split},
            storage=search.storage,
            sampler=search.sampler,
            seed=self.config.seed,
        )

        def train(asked: list[Asked]) -> list[tuple[float | None, dict[str, Any]]]:
            outcomes = self.train([self._asked(suggestion) for suggestion in asked])
            outcomes_by_name.update({outcome.trial.name: outcome for outcome in outcomes})
            nlls = [None if outcome.result is None else outcome.nll(search.split) for outcome in outcomes]
            attributes = [{"seconds": outcome.seconds, "error": outcome.error} for outcome in outcomes]
            return list(zip(nlls, attributes, strict=True))

        run_steps(study, search.trials, search.parallel, train)
        self.shared = study.trials()
        best = best_of(self.shared)
        for row in self.shared:  # also those that ended before this process began
            trial = self._asked(Asked(row["number"], row["temperature"]))
            if row["here"] and trial.name not in outcomes_by_name:
                outcomes_by_name[trial.name] = outcome_of(trial, row.get("error"))
        outcomes = sorted(outcomes_by_name.values(), key=lambda outcome: outcome.trial.name)
        if best is None:
            return choose(outcomes, search.split), outcomes
        trial = self._asked(Asked(best["number"], best["temperature"]))
        if not best["here"]:  # another machine has its weights
            self.console.say(f"The best τ, {best['temperature']:.3f}, was found on another machine: running it here")
        [chosen] = self.train([trial])
        if chosen.result is None:
            raise ValueError(f"the run with the chosen τ failed: {chosen.error}")
        return chosen, outcomes

    def _asked(self, asked: Asked) -> PlannedRun:
        return trial_at(self.config, asked.temperature, f"trial-{asked.number:03d}", self.trials, self.data)

    def train(self, trials: list[PlannedRun]) -> list[Outcome]:
        """Run trials: the only one of a method in this process, those of a search in as many processes as fit."""
        waiting = [trial for trial in trials if not trial.finished]
        if waiting and self.search.single_training:
            run_trial(trials[0], self.console)
        elif waiting:
            if not self.sized:  # as many at a time as fit into memory, measured on one
                most = self.search.parallel if self.search.method == "bayes" else len(trials)
                needed = self.pool.measure(waiting[0]) if self.search.jobs != 1 and most > 1 else None
                self.pool.jobs = jobs_for(most, needed, self.search.jobs, self.config.device)
                self.sized = True
                size = "" if needed is None else f", {amount(needed)} each"
                self.console.say(f"{plural(self.pool.jobs, 'run')} at a time{size}")
            return self.pool.run(trials, self.console)
        return [outcome_of(trial) for trial in trials]

    def result(self, chosen: Outcome, outcomes: list[Outcome], begin: float, options: dict[str, Any]) -> dict[str, Any]:
        """Return the content of tune.json."""
        search, final, runs = self.search, chosen, outcomes
        if search.retrain:  # with the validation rows among the training rows
            [final] = self.train([trial_at(self.config, chosen.temperature, "retrained", self.trials, "joined")])
            runs = [*outcomes, final]
        if final.result is None:
            raise ValueError(f"the last run failed: {final.error}")
        metrics = dict(final.result["metrics"])
        if "test" not in metrics and "test" in open_data(self.config).splits:
            metrics["test"] = evaluate_run(
                final.trial.directories[-1], split="test", limit=self.config.test_examples, device=self.config.device
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
            "trainings": len(runs),
            "failed": sum(outcome.result is None for outcome in runs),
            "seconds": sum(outcome.seconds for outcome in runs),
            "wall_seconds": time.perf_counter() - begin,
            "path": final.path(),
            "trials": self.shared if self.shared is not None else [_numbers(outcome, search) for outcome in outcomes],
            "run": str(final.trial.directories[-1].relative_to(self.directory)),
        }


def _numbers(outcome: Outcome, search: Search) -> dict[str, Any]:
    row: dict[str, Any] = {"name": outcome.trial.name, "error": outcome.error, "seconds": outcome.seconds}
    if outcome.result is not None:
        metrics = outcome.result["metrics"]
        row["temperature"] = outcome.temperature
        row["nll"] = metrics[search.split]["nll"] if search.split in metrics else None
    return row


def _options(config: TrainConfig, search: Search) -> dict[str, Any]:
    options = dataclasses.asdict(search) | {"grid": list(search.grid)}
    options.pop("jobs")  # which changes nothing in the result
    return {"training": about(config), "search": options}


def _check_same(path: Path, options: dict[str, Any]) -> None:
    known = read_json(path).get("options", {})
    for part in ("training", "search"):
        differing = differences(known.get(part, {}), options[part])
        if differing:
            raise ValueError(
                f"{path.parent} holds a search with other options ({'; '.join(differing[:3])}); choose another --out"
            )


def _summary(result: dict[str, Any], directory: Path) -> str:
    split = "test" if "test" in result["metrics"] else next(iter(result["metrics"]))
    failed = f", {result['failed']} failed" if result["failed"] else ""
    note = f" ({result['note']})" if result["note"] else ""
    return (
        f"{result['label']}: τ = {result['temperature']:.3f}{note}, {split} NLL {result['metrics'][split]['nll']:.3f}; "
        f"{plural(result['trainings'], 'run')}{failed}, {rough_duration(result['seconds'])} in steps; {directory}"
    )
