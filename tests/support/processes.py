"""Runs in several processes on one machine, in double precision, and what each process answers, by name."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hetxl_train.tasks.classification as classification
from hetxl.metrics.records import RecordsBuilder
from hetxl_train import contrastive_runs, parallel, runs, towers
from hetxl_train.backbones import Backbone
from hetxl_train.checkpoint import Checkpoints
from hetxl_train.config import ContrastiveConfig, TrainConfig
from hetxl_train.contrastive_runs import load_contrastive_run
from hetxl_train.data.open import open_data
from hetxl_train.distributed import LostRankError, World, world
from hetxl_train.evaluate import evaluate_split
from hetxl_train.runs import load_run
from hetxl_train.tasks.contrastive import ContrastiveTask, evaluate_pairs, validation_metrics
from hetxl_train.training import train
from support.training import QUIET

PARTS = 4
CLASSIFIER: dict[str, Any] = {
    "data": "synthetic:rows=900,classes=10,features=5",
    "backbone": "mlp",
    "width": 16,
    "features": 8,
    "dropout": 0.1,
    "rank": 3,
    "steps": 6,
    "batch_size": 24,
    "learning_rate": 0.01,
    "log_every": 2,
    "evaluate_every": 3,
    "evaluation_examples": 50,
    "test_examples": 50,
    "train_samples": 2,
    "eval_samples": 8,
    "ema": 0.9,
    "device": "cpu",
}


def _doubled(module: nn.Module) -> nn.Module:
    """A module in double precision, whatever its inputs are."""

    def cast(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs
        )

    module.double().register_forward_pre_hook(cast)
    return module


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Models that are built inside compute in double precision."""
    build_model, build_towers, forward = classification.build_model, towers.build_towers, Backbone.forward

    def model(*args: Any, **options: Any) -> Any:
        return build_model(*args, **options).double()

    def features(backbone: Backbone, inputs: Tensor) -> Tensor:
        return forward(backbone, inputs.double() if inputs.is_floating_point() else inputs)

    def two_towers(*args: Any, **options: Any) -> Any:
        built = build_towers(*args, **options).double()
        _doubled(built.image)
        _doubled(built.text)
        return built

    behind = towers.Tower.behind
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(towers.Tower, "behind", lambda tower: _doubled(behind(tower))))
        for module in (classification, runs):
            stack.enter_context(mock.patch.object(module, "build_model", model))
        for module in (towers, contrastive_runs):
            stack.enter_context(mock.patch.object(module, "build_towers", two_towers))
        stack.enter_context(mock.patch.object(Backbone, "forward", features))
        yield


def train_in_double(config: TrainConfig | ContrastiveConfig) -> None:
    """Train in double precision."""
    with in_double():
        train(config, console=QUIET)


def trained(rank: int, ranks: int, configs: list[TrainConfig | ContrastiveConfig]) -> None:
    """Train configurations, one after the other."""
    os.environ |= {"WORLD_SIZE": str(ranks)}
    for config in configs:
        train_in_double(config)


def evaluated(rank: int, ranks: int, classifier: Path, pairs: Path) -> dict[str, Any]:
    """The evaluations of two trained runs, their rows divided over the processes."""
    os.environ |= {"WORLD_SIZE": str(ranks)}
    with world("cpu", 60) as processes, in_double():
        return evaluations(processes, classifier, pairs)


def evaluations(processes: World, classifier: Path, pairs: Path) -> dict[str, Any]:
    """The evaluations of a classifier and of two towers, in the main process."""
    loaded = load_run(classifier)
    split = open_data(loaded.run.config).splits["test"]
    evaluation = evaluate_split(loaded.model, split, confusions=True, batch_size=16, quiet=True, world=processes)
    contrastive = load_contrastive_run(pairs)
    config, opened = contrastive.run.config, ContrastiveTask.open(contrastive.run.config)
    reader = towers.TextReader(config.text, config.buckets)
    validation = opened.splits["validation"]
    with mock.patch.object(towers, "BLOCK", 3):  # as many blocks as processes, and more
        result = evaluate_pairs(contrastive.model, opened, reader, config, world=processes)
        metrics = validation_metrics(contrastive.model, validation, reader.table(validation.texts), world=processes)
    return {
        "records": {name: getattr(evaluation.records, name) for name in evaluation.records.TYPES},
        "pairs": evaluation.pairs,
        "contrastive": [result.result, result.examples, metrics],
    }


def meetings(rank: int, ranks: int, longer: float) -> list[str]:
    """The errors of processes that wait for a slow one, for one that raised and for one that is lost."""
    os.environ |= {"WORLD_SIZE": str(ranks)}
    answers = []
    with world("cpu", timeout=longer / 10) as processes:
        shares = processes.gather(lambda: time.sleep(longer * (rank == 1)) or list(processes.share(range(7))))
        answers.append(str(shares))
        for work in (processes.on_main, processes.gather):
            try:
                work(lambda: [][ranks - 1 if rank == 0 else slice(0)])
            except IndexError as error:
                answers.append(f"{type(error).__name__}: {error}")
        assert processes.meeting is not None
        if rank == 1:
            processes.meeting.end()  # as if it had been killed
            time.sleep(longer / 2)
        else:
            try:
                processes.wait()
            except LostRankError as error:
                answers.append(str(error))
    return answers


def with_long_phases(rank: int, ranks: int, config: TrainConfig, seconds: float, evaluation: float) -> None:
    """Train where phases take long in one process: opening and describing the data, the model, writing, evaluating."""
    os.environ |= {"WORLD_SIZE": str(ranks)}

    def slow(function: Any, on: int, length: float) -> Any:
        left = [length]  # the first time it is called

        def call(*args: Any, **options: Any) -> Any:
            time.sleep(left.pop() if left and rank == on else 0)
            return function(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, on, length in (
            (classification.ClassificationTask, "open", 1, seconds),
            (classification, "describe", 0, seconds),
            (classification, "build_model", 0, seconds),
            (Checkpoints, "_write", 0, seconds),
            (RecordsBuilder, "add", 1, evaluation),
            (classification, "write_evaluation", 0, seconds),
        ):
            stack.enter_context(mock.patch.object(owner, name, slow(getattr(owner, name), on, length)))
        train(config, console=QUIET)


def gathered(rank: int, ranks: int) -> dict[str, Tensor]:
    """A tensor of 11 rows that half of the processes share, twice, on the main process, in blocks of two rows."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "classes"))
    values = torch.arange(33.0).view(11, 3)
    divided = {"rows": distribute_tensor(values, mesh["classes"], [Shard(0)])}
    with mock.patch.object(parallel, "BLOCK", 6):
        return parallel.whole_on_main(divided, World(torch.device("cpu"), rank, ranks))
