"""Lightning and Trainer log a head's numbers to TensorBoard, Weights & Biases (offline) and MLflow (files)."""

import os
import subprocess
import sys

import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PROGRAMS = {
    "lightning": (
        """
import lightning.pytorch as pl, torch
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from hetxl import HetXLHead
from hetxl.integrations.lightning import HeadMonitor, HetXLModule
from support.lightning_runs import D, K, backbone, examples, loader, trainer

loggers = [TensorBoardLogger("tb", ""), WandbLogger(offline=True), MLFlowLogger(tracking_uri="file:mlruns")]
module = HetXLModule(backbone(), HetXLHead(D, K, rank=2))
run = trainer(".", logger=loggers, callbacks=[HeadMonitor()])
run.fit(module, loader(*examples()), loader(*examples(32, seed=1)))
""",
        ("train_loss", "val_nll", "temperature", "noise_scale", "calibration_error"),
        ("train_loss", "val_nll", "temperature", "noise_scale", "calibration_error"),
    ),
    "trainer": (
        """
import torch, hetxl
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 5}
model = hetxl.convert(BertForSequenceClassification(BertConfig(intermediate_size=24, **sizes)), rank=2)
data = [{"input_ids": torch.randint(1, 40, (9,)), "labels": row % 5} for row in range(16)]
arguments = TrainingArguments(
    ".", max_steps=2, logging_steps=1, eval_strategy="steps", report_to=["tensorboard", "wandb", "mlflow"],
    use_cpu=True, disable_tqdm=True, save_strategy="no",
)
Trainer(model, arguments, train_dataset=data, eval_dataset=data).train()
""",
        ("train/loss", "eval/loss"),
        ("loss", "eval_loss"),  # Trainer's callback for MLflow keeps its own names
    ),
}
"""By library: a program, and numbers that it logs: to TensorBoard and Weights & Biases, and to MLflow."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_in_every_service(name, tmp_path, monkeypatch):
    program, names, mlflow_names = PROGRAMS[name]
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    places = {"MLFLOW_TRACKING_URI": "file:mlruns", "TENSORBOARD_LOGGING_DIR": "tb"}
    path = os.pathsep.join(sys.path)
    # A process of its own: the service of Weights & Biases outlives a call.
    command, environment = (
        [sys.executable, "-W", "ignore", "-c", program],
        os.environ | quiet | places | {"PYTHONPATH": path},
    )
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stderr
    (events,) = (tmp_path / "tb").rglob("events.out.tfevents.*")
    accumulated = EventAccumulator(str(events.parent))
    accumulated.Reload()
    assert set(names) <= set(accumulated.Tags()["scalars"])
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = file.read_bytes()  # protocol buffers, in which names are plain text
    assert [name for name in names if name.encode() not in records] == []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    runs = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    (metrics,) = [run.data.metrics for run in runs if run.data.metrics]
    assert set(mlflow_names) <= set(metrics)
