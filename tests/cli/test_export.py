import json
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from hetxl.cli import app
from hetxl.integrations.export import exportable
from hetxl.training.run import load_run
from support.small_run import small_run


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run") / "run")


def test_onnx(run):
    result = call("export", run, "--to", "onnx", "--samples", "5", "--seed", "2")
    assert result.exit_code == 0, result.output
    assert f"{run / 'model.onnx'}: " in result.stdout
    assert "KiB, mc with 5 samples, features [B, 4] to probs [B, 6]" in result.stdout
    assert "of predict's" in result.stdout
    session = onnxruntime.InferenceSession(run / "model.onnx", providers=["CPUExecutionProvider"])
    trained, features = load_run(run), torch.randn(3, 4)
    noise = exportable(trained.model, num_samples=5, seed=2).noise
    wanted = trained.model.head.predict(features, noise=noise).probs
    (probs,) = session.run(None, {"features": features.numpy()})
    np.testing.assert_allclose(probs, wanted, rtol=0, atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == trained.class_names


def test_head(run, tmp_path):
    result = call("export", run, "--to", "head", "--out", tmp_path / "mine.safetensors")
    assert result.exit_code == 0, result.output
    assert "HetXLHead with 6 class names" in result.stdout
    assert "the same, to the bit, as predict's" in result.stdout
    assert (tmp_path / "mine.safetensors").exists()


def test_errors_are_one_line(run, tmp_path, monkeypatch):
    for words, message in (
        ((tmp_path,), "is no run"),
        ((run, "--to", "tflite"), "--to must be one of 'onnx', 'torch', 'head'"),
        ((run, "--to", "head", "--samples", "3"), "--samples: not for --to head"),
        ((run, "--method", "mean-field"), "did you mean 'mean_field'"),
        ((run, "--top-k", "7"), "top_k must be at most"),
        ((run, "--out", tmp_path / "model.pt"), "--out must end in .onnx"),
    ):
        result = call("export", *words)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    result = call("export", run)
    assert result.exit_code == 2
    assert "pip install onnx onnxruntime onnxscript" in result.stderr
