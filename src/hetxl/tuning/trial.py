"""One training of a search: in whichever process it runs, its result is in its directory."""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl.data import describe
from hetxl.data.dataset import Dataset
from hetxl.training.config import TrainConfig
from hetxl.training.files import read_json
from hetxl.training.log import read_log
from hetxl.training.progress import Narrator
from hetxl.training.rescale import rescale
from hetxl.training.results import LABELS
from hetxl.training.run import check_same
from hetxl.training.train import open_data, train
from hetxl.tuning.joined import with_validation_joined

DATA = ("blind", "whole", "joined")
"""What a trial sees: all but the test split, everything, or training and validation rows as one training split."""


@dataclass(frozen=True)
class Trial:
    """A training to be done.

    Attributes:
        name: of its directory, unlike that of any other.
        config: all options; `out` is the directory.
        data: of `DATA`.
        posthoc: whether τ is fitted on the validation split afterwards.
    """

    name: str
    config: TrainConfig
    data: str = "blind"
    posthoc: bool = False

    @property
    def path(self) -> Path:
        """Its directory."""
        return Path(str(self.config.out))

    @property
    def final(self) -> Path:
        """The directory of the run that counts."""
        return self.path.with_name(f"{self.path.name}-fitted") if self.posthoc else self.path

    @property
    def finished(self) -> bool:
        """Whether its result is there."""
        return (self.final / "result.json").exists()


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        trial: the trial.
        error: why it failed; None if it did not.
        result: content of result.json.
    """

    trial: Trial
    error: str | None = None
    result: dict[str, Any] | None = None

    @property
    def temperature(self) -> float:
        """τ of the trained model."""
        assert self.result is not None
        return float(self.result["temperature"])

    @property
    def seconds(self) -> float:
        """Spent in training steps; 0 for one that failed."""
        return 0.0 if self.result is None else float(self.result["train_seconds"] or 0.0)

    def nll(self, split: str) -> float:
        """Of a split."""
        assert self.result is not None
        return float(self.result["metrics"][split]["nll"])

    def path(self) -> list[list[float]]:
        """Steps and τ after each, as far as the log has them."""
        log = read_log(self.trial.path / "log.jsonl")
        return [[line["step"], line["temperature"]] for line in log if line.get("kind") == "step"]


def check_trial(trial: Trial) -> None:
    """Raise unless the directory of a trial is free, or holds the same run."""
    if (trial.path / "config.json").exists():
        check_same(trial.config, trial.path)


def run_trial(trial: Trial, narrator: Narrator | None = None, dataset: Dataset | None = None) -> None:
    """Train, or go on, to the end; checkpoints are removed then.

    Args:
        trial: what to do.
        narrator: tells how far it is; None for silence.
        dataset: opened already, whole; None to open it.
    """
    if trial.finished:
        return
    narrator = narrator or Narrator(quiet=True)
    dataset = dataset or open_data(trial.config)
    if trial.data == "joined":
        dataset = with_validation_joined(dataset)
    seen = dataset
    if trial.data == "blind":
        seen = dataclasses.replace(
            dataset, splits={name: split for name, split in dataset.splits.items() if name != "test"}
        )
    label = LABELS[trial.config.head]
    run = train(trial.config, dataset=seen, narrator=narrator, label=label, description=describe(seen))
    if trial.posthoc:
        rescale(run, trial.final, seen, narrator, f"{label}, τ fitted afterwards", noise=False)
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    shutil.rmtree(run.path / "features", ignore_errors=True)


def outcome_of(trial: Trial, error: str | None = None) -> Outcome:
    """What is in the directory of a trial, or why nothing is."""
    if trial.finished:
        return Outcome(trial, result=read_json(trial.final / "result.json"))
    return Outcome(trial, error=error or "it did not end")


def drop_weights(outcome: Outcome) -> None:
    """Remove the weights of a trial that was not chosen; its numbers stay."""
    for place in (outcome.trial.path, outcome.trial.final):
        (place / "model.safetensors").unlink(missing_ok=True)
