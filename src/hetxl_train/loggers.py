"""Loggers in addition to log.jsonl: TensorBoard, Weights & Biases and MLflow, one class each with the same interface.

The environment variables of each service choose servers and projects, such as WANDB_PROJECT, WANDB_MODE and
MLFLOW_TRACKING_URI. A resumed run continues its entry.
"""

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetxl._checks import needing, one_of
from hetxl._files import read_json, write_json

PROJECT = "hetxl"
"""Default project in Weights & Biases and MLflow."""


class Logger(ABC):
    """A logger of numbers by step.

    Args:
        directory: directory of the run.
        config: all options of the run.
        after: last step with final numbers; later ones are written again.
    """

    @abstractmethod
    def __init__(self, directory: Path, config: Mapping[str, Any], after: int): ...

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step, by names such as evaluation/nll."""

    @abstractmethod
    def finish(self, result: Mapping[str, float]) -> None:
        """Log the numbers of a finished run."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection or the files."""


class TensorBoardLogger(Logger):
    """Event files in RUN/tensorboard."""

    def __init__(self, directory: Path, config: Mapping[str, Any], after: int):
        with needing("--loggers tensorboard needs more packages", "'hetxl[tensorboard]'"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=after + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, result: Mapping[str, float]) -> None:
        """Do nothing, since TensorBoard shows only curves."""

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class WandbLogger(Logger):
    """A run of Weights & Biases, with its files in RUN/wandb."""

    def __init__(self, directory: Path, config: Mapping[str, Any], after: int):
        with needing("--loggers wandb needs more packages", "'hetxl[wandb]'"):
            import wandb
        ident = hashlib.sha256(f"{directory.resolve()}{sorted(config.items())}".encode()).hexdigest()[:16]
        options: dict[str, Any] = {"dir": directory, "name": directory.name, "id": ident, "resume": "allow"}
        self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), config=dict(config), **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of a step."""
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, float]) -> None:
        """Add the numbers of a finished run to its summary."""
        self._run.summary.update(dict(result))

    def close(self) -> None:
        """Upload remaining numbers, or keep them on disk in offline mode."""
        self._run.finish()


class MlflowLogger(Logger):
    """A run of MLflow; without MLFLOW_TRACKING_URI in RUN/mlruns."""

    def __init__(self, directory: Path, config: Mapping[str, Any], after: int):
        with needing("--loggers mlflow needs more packages", "'hetxl[mlflow]'"):
            import mlflow
            from mlflow.entities import Metric, Param
        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", (directory / "mlruns").resolve().as_uri())
        if uri.startswith("file:"):
            # Newer versions prefer a database, which mlflow-skinny does not support; it writes files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(uri)
        state = directory / "mlflow.json"
        if state.exists() and read_json(state)["uri"] == uri:
            self._id = read_json(state)["run"]
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._id = self._client.create_run(experiment, run_name=directory.name).info.run_id
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in config.items()])
        write_json(state, {"uri": uri, "run": self._id})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of a step."""
        now = int(1000 * time.time())
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def finish(self, result: Mapping[str, float]) -> None:
        """Add the numbers of a finished run, and mark it as finished."""
        self.write(0, {f"result/{name}": value for name, value in result.items()})
        self._client.set_terminated(self._id)

    def close(self) -> None:
        """Do nothing, since every call is sent immediately."""


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}
"""Classes by the names of `--loggers`."""


def check_loggers(names: str) -> list[str]:
    """Return the distinct names of a list separated by commas; raise for unknown names."""
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        one_of("loggers", name, LOGGERS)
    return chosen


def open_loggers(names: Sequence[str], directory: Path, config: Mapping[str, Any], after: int = 0) -> list[Logger]:
    """Open loggers by name, for a run that continues after a step."""
    return [LOGGERS[name](directory, config, after) for name in names]


def numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among values, by names that all services accept: evaluation/precision_at_1."""
    return {
        f"{kind}/{name.replace('@', '_at_')}": float(value)
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
