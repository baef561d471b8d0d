"""Runs that log to TensorBoard, Weights & Biases (offline) and MLflow (files): what each service reads back."""

import json
import subprocess
import sys

import pytest

from hetxl_train.log import Log, read_log
from hetxl_train.loggers import check_loggers, numbers, open_loggers
from hetxl_train.training import train
from support.training import QUIET, small

VALUES = {"precision@1": 0.25, "nll": None, "split": "validation", "done": True}


def test_numbers_have_names_that_every_service_takes():
    assert numbers("evaluation", {"step": 3, **VALUES}) == {"evaluation/precision_at_1": 0.25}


def test_unknown_loggers_are_refused_with_the_options():
    assert check_loggers(" wandb, mlflow,wandb,") == ["wandb", "mlflow"]
    with pytest.raises(ValueError, match=r"loggers must be one of .*found 'wandbb'; did you mean 'wandb'\?"):
        small(loggers="wandbb")


def test_tensorboard_gets_steps_and_evaluations(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(tmp_path / "log.jsonl", loggers=open_loggers(["tensorboard"], tmp_path, {}))
    log.write("step", step=3, loss=0.5)
    log.write("evaluation", step=3, **VALUES)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"step/loss", "evaluation/precision_at_1"}
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(3, 0.5)]
    assert "precision@1" in read_log(tmp_path / "log.jsonl")[1]


def test_mlflow_has_options_metrics_and_the_result_of_a_resumed_run(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    path = train(small(tmp_path / "run", loggers="mlflow"), console=QUIET).path
    client = MlflowClient((path / "mlruns").resolve().as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'hetxl'")
    (run,) = client.search_runs([experiment.experiment_id])
    result = json.loads((path / "result.json").read_text())
    assert run.info.status == "FINISHED"
    assert run.data.params["head"] == "het-xl"
    assert run.data.metrics["result/steps"] == result["steps"]
    history = client.get_metric_history(run.info.run_id, "evaluation/nll")
    logged = [line["nll"] for line in read_log(path / "log.jsonl") if line["kind"] == "evaluation"]
    assert [metric.value for metric in sorted(history, key=lambda metric: metric.step)] == logged
    open_loggers(["mlflow"], path, {}, 5)[0].write(6, {"evaluation/nll": 1.0})
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # Its service outlives a call: a process of its own ends it.
    config = small(tmp_path / "run", loggers="wandb")
    options = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in ("loggers", "steps", "out", "workers")]
    command = [sys.executable, "-c", "from hetxl_train.cli import main; main()", "train", config.data, *options]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    records = file.read_bytes()  # protocol buffers, in which names are plain text
    for name in (b"step/loss", b"evaluation/nll", b"evaluation/precision_at_1", b"hetxl", b"train_samples"):
        assert name in records
