"""`hetxl train`: from a configuration to a trained, evaluated run."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetxl.data import Description, describe, open_dataset
from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import Dataset, Split
from hetxl.data.label_noise import NoisySplit, with_label_noise
from hetxl.data.spec import split_spec
from hetxl.evaluation.metrics import summarise
from hetxl.training.config import TrainConfig
from hetxl.training.distributed import World, world
from hetxl.training.estimate import LARGE, estimate_on
from hetxl.training.features import cached_features
from hetxl.training.files import write_json
from hetxl.training.length import steps_of, told_length
from hetxl.training.loader import Parts
from hetxl.training.log import Log
from hetxl.training.loop import Trainer
from hetxl.training.model import build_model, link_of
from hetxl.training.order import derive
from hetxl.training.progress import Narrator
from hetxl.training.recommend import recommend_for
from hetxl.training.results import LABELS, evaluate_split, result_of, write_evaluation
from hetxl.training.run import Run, check_data, default_directory, describe_model, save_model, start_run
from hetxl.training.state import load_weights

LONG = 30.0
"""Seconds from which a run is worth an estimate before it starts."""


def check_labels(config: TrainConfig) -> None:
    """Raise for built-in data whose labels are no classes."""
    name, options = split_spec(config.data)
    if name == "icons" and options.get("labels", config.labels) in (None, "names"):
        raise ValueError(
            f"data {config.data!r}: nine in ten names of icons in validation and test are in no training row, and no "
            "classes; take icons:labels=categories, or the pairs: hetxl contrastive train icons"
        )


def open_data(config: TrainConfig) -> Dataset:
    """The dataset that a configuration names, with the label noise that it asks for."""
    check_labels(config)
    name, options = split_spec(config.data)
    # Options behind the name go first: `labels` may be one of them.
    given: dict[str, Any] = {"labels": config.labels, "validation": config.validation, "test": config.test} | options
    dataset = open_dataset(name, image_size=config.image_size, seed=config.data_seed, **given)
    if config.label_noise == "none":
        return dataset
    return with_label_noise(dataset, config.label_noise, config.label_noise_rate, config.data_seed)


def train(
    config: TrainConfig,
    *,
    dataset: Dataset | None = None,
    narrator: Narrator | None = None,
    label: str | None = None,
    description: Description | None = None,
) -> Run:
    """Train, evaluate on the test split, and write everything into the run's directory.

    A directory with a run of the same configuration is taken up where it stopped; a finished one is left as it is.

    Args:
        config: all options.
        dataset: opened already, label noise included; None to open what the configuration names.
        narrator: tells how far it is; None for one that prints.
        label: how a report calls the run; the head's name without.
        description: of the data, printed already; None to describe it, and print that.
    """
    if dataset is None:
        check_labels(config)
    narrator = narrator or Narrator()
    with world(config.device) as processes:
        if not processes.leads:
            narrator = Narrator(quiet=True)
        directory = default_directory(config) if config.out is None else Path(config.out)
        if dataset is None and not directory.exists():
            dataset = open_data(config)  # data that cannot be opened leaves no directory behind
        run = start_run(config, directory) if processes.leads else Run(directory, config)
        processes.wait()
        if run.finished:
            narrator.say(f"{run.path} is done; see result.json there, or hetxl report {run.path}")
            return run
        dataset = dataset or open_data(config)
        if description is None and processes.leads:
            description = describe(dataset)
            narrator.console.print(description)
            if "train" in dataset.splits:
                narrator.say(told_length(config, dataset))
        described = {} if description is None else description.as_dict()
        _Job(config, run, dataset, processes, narrator, label or LABELS[config.head], described).go()
    return run


def with_temperature(config: TrainConfig, dataset: Dataset, narrator: Narrator) -> TrainConfig:
    """The configuration with τ decided, where that was left to the data (`hetxl.training.recommend`)."""
    if config.temperature != "auto":
        return config
    found = recommend_for(config, dataset)
    if found.learned:
        narrator.say(f"τ is learned: {found.reason}")
    return dataclasses.replace(config, temperature="learned" if found.learned else "1.0")


class _Job:
    """One training, from its data to its result."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        dataset: Dataset,
        processes: World,
        narrator: Narrator,
        label: str,
        description: dict[str, Any],
    ):
        if "train" not in dataset.splits:
            raise ValueError(f"data {config.data!r} has no training split")
        config = with_temperature(config, dataset, narrator)
        self.config, self.run, self.dataset, self.processes = config, run, dataset, processes
        self.narrator, self.label, self.description = narrator, label, description
        self.link = link_of(config, dataset)
        self.model = build_model(config, dataset.input, dataset.num_classes, self.link).to(processes.device)
        self.counts = dataset.splits["train"].labels.counts(dataset.num_classes)
        self.view, self.splits = self.model, dataset.splits
        if config.frozen and config.backbone not in ("auto", "none"):
            self.view, self.splits = cached_features(run.path / "features", self.model, dataset, config, narrator)
        self.steps = steps_of(config, dataset)
        self.validated: dict[str, Any] | None = None  # the last metrics on the validation split, or in its place

    def go(self) -> None:
        """Train and evaluate."""
        leads, run, config = self.processes.leads, self.run, self.config
        broken = BrokenLimit(path=run.path / "broken.txt" if leads else None)
        trainer = Trainer(
            config,
            self.view,
            self.splits["train"],
            self.steps,
            run.checkpoints,
            self.processes,
            self.narrator,
            broken,
            self.splits.get("validation"),
        )
        checkpoint, refused = run.checkpoints.latest()
        for message in refused:
            self.narrator.say(f"Not used: {message}")
        if checkpoint is not None:
            check_data(run, self.dataset, tuple(self.dataset.splits), "train again in another --out")
            trainer.restore(checkpoint)
            self.narrator.say(f"Going on from step {checkpoint.step:,} of {self.steps:,} in {run.path}")
        self.processes.wait()
        if leads:
            run.checkpoints.discard_after(trainer.progress.step)
            describe_model(run, self.dataset, self.link, config.temperature)
            training = self.dataset.splits["train"]
            if isinstance(training, NoisySplit):
                training.noise.save(run.path / "label_noise.npz")
            if checkpoint is None:
                self._say_estimate(trainer.parts)
        log = None
        if leads:
            events = run.path / "tensorboard" if config.tensorboard else None
            log = Log(run.path / "log.jsonl", trainer.progress.step, events)
        try:
            progress = trainer.train(log, self._validate)
        finally:
            if log is not None:
                log.close()
        if broken.seen:
            broken.finish()
        self.processes.wait()
        if leads:
            self._finish(trainer, progress.seconds)
        self.processes.wait()

    def _say_estimate(self, parts: Parts) -> None:
        found = estimate_on(self.config, self.view, self.splits["train"], parts, self.steps, self.processes.device)
        if found is None:
            return
        if found.seconds_per_step * found.steps >= LONG or found.total >= LARGE:
            self.narrator.say(f"{self.label}: {found}")

    def _validate(self) -> dict[str, float]:
        name = "validation" if "validation" in self.splits else "train"
        found = self._evaluate(self.splits[name], self.config.evaluation_examples)
        self.validated = summarise(found.records, self.counts)
        shown = {key: value for key, value in self.validated.items() if value is not None}
        return {"split": name, **shown}  # pyright: ignore[reportReturnType]

    def _evaluate(self, split: Split, limit: int, confusions: bool = False):
        return evaluate_split(
            self.view,
            split,
            class_names=self.dataset.class_names,
            limit=limit,
            seed=derive(self.config.seed, 15),
            workers=self.config.workers,
            confusions=confusions,
            quiet=not confusions,
        )

    def _finish(self, trainer: Trainer, train_seconds: float) -> None:
        """The last evaluation, of the weights that are kept: the last, or with early stopping the best."""
        run, config = self.run, self.config
        step = trainer.progress.step
        if config.patience:
            checkpoint, _ = run.checkpoints.best()
            assert checkpoint is not None
            load_weights(self.view, checkpoint, averaged=bool(config.ema))
            step = checkpoint.step
            context = torch.no_grad()
        else:
            context = trainer.averaged()
        with context:
            save_model(run, self.model)
            begin = time.perf_counter()
            metrics: dict[str, Any] = {}
            if "validation" in self.splits:
                # The last step ends with an evaluation; other weights are kept only where training may stop early.
                if config.patience or self.validated is None:
                    self._validate()
                metrics["validation"] = self.validated
            name = "test" if "test" in self.splits else "validation" if "validation" in self.splits else "train"
            evaluation = self._evaluate(self.splits[name], config.test_examples, confusions=True)
            # Records count the rows of what was evaluated, which may be a file of features.
            shown = dataclasses.replace(self.dataset, splits=self.splits)
            metrics[name] = write_evaluation(run.path, evaluation, shown, name, np.asarray(self.counts))
            result = result_of(
                self.label,
                self.model,
                self.dataset,
                metrics,
                evaluation,
                head=config.head,
                seed=config.seed,
                data=self.description,
                train_seconds=train_seconds,
                evaluate_seconds=time.perf_counter() - begin,
                steps=step,
                examples=step * config.batch_size,
                stopped_early=trainer.progress.stopped,
                derived_from=None,
            )
        write_json(run.path / "result.json", result)
        found = metrics[name]
        self.narrator.say(
            f"{self.label}: {name} NLL {found['nll']:.3f}, precision@1 {found['precision@1']:.1%}, calibration error "
            f"{found['calibration_error']:.1%}; {run.path}"
        )
