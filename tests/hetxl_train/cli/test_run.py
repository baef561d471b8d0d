"""The commands that use a trained run."""

import csv
import json
import shutil
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from hetxl.integrations.export import exportable
from hetxl_train.cli.commands import app
from hetxl_train.runs import load_run
from support.small_run import small_run


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run") / "run")


def test_evaluate_uses_the_test_split_of_the_run(run):
    result = call("evaluate", run, "--json", "--examples", "40", "--device", "cpu")
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics == json.loads((run / "result.json").read_text())["metrics"]["test"]
    assert "precision@1" in call("evaluate", run, "--examples", "10").stdout


def test_errors_of_evaluate_are_one_line(run, tmp_path):
    for words, message in (
        ((tmp_path,), "is not a run directory"),
        ((run, "--split", "tset"), "did you mean 'test'"),
        ((run, "no/such/file.npy"), "no/such/file.npy"),
        ((run, "--method", "magic"), "method must be one of"),
    ):
        result = call("evaluate", *words)
        assert result.exit_code == 2
        assert message in result.stderr


def test_onnx_export_matches_predict(run):
    result = call("export", run, "--to", "onnx", "--num-samples", "5", "--seed", "2")
    assert result.exit_code == 0, result.output
    assert f"{run / 'model.onnx'}: " in result.stdout
    assert "KiB, mc with 5 samples, features [B, 4] to probs [B, 6]" in result.stdout
    assert "those of predict" in result.stdout
    session = onnxruntime.InferenceSession(run / "model.onnx", providers=["CPUExecutionProvider"])
    trained, features = load_run(run), torch.randn(3, 4)
    noise = exportable(trained.model, num_samples=5, seed=2).noise
    expected = trained.model.head.predict(features, noise=noise).probs
    probs = session.run(["probs"], {"features": features.numpy()})[0]
    np.testing.assert_allclose(probs, expected, rtol=0, atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == trained.class_names


def test_export_of_the_head_alone(run, tmp_path):
    result = call("export", run, "--to", "head", "--out", tmp_path / "mine.safetensors")
    assert result.exit_code == 0, result.output
    assert "HetXLHead with 6 class names" in result.stdout
    assert "are equal, to the bit, to those of predict" in result.stdout
    assert (tmp_path / "mine.safetensors").exists()


def test_errors_of_export_are_one_line(run, tmp_path, monkeypatch):
    for words, message in (
        ((tmp_path,), "is not a run directory"),
        ((run, "--to", "tflite"), "--to must be one of 'onnx', 'torch', 'head'"),
        ((run, "--to", "head", "--num-samples", "3"), "--num-samples: not supported by --to head"),
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


def test_predict_writes_a_table(run, tmp_path):
    np.save(tmp_path / "new.npy", np.random.default_rng(0).normal(size=(7, 4)).astype("float32"))
    result = call("predict", run, tmp_path / "new.npy", "--out", tmp_path / "out.csv", "--top-k", "2")
    assert result.exit_code == 0, result.output
    assert "7 rows" in result.stdout
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    assert 0 < float(rows[0]["probability_2"]) <= float(rows[0]["probability_1"]) <= 1
    assert rows[0]["confused_with"] == rows[0]["class_2"]


def test_errors_of_predict_are_one_line(run, tmp_path):
    np.save(tmp_path / "bad.npy", np.zeros((3, 5), dtype="float32"))
    for words, message in (
        ((run, tmp_path / "bad.npy", "--out", tmp_path / "x.csv"), "bad.npy"),
        ((run, tmp_path / "bad.npy", "--out", tmp_path / "x.xlsx"), ".parquet"),
        ((tmp_path, tmp_path / "bad.npy", "--out", tmp_path / "x.csv"), "is not a run directory"),
    ):
        result = call("predict", *words)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not (tmp_path / "x.csv").exists()


def test_report_writes_a_page_and_prints_a_table(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "HET-XL" in (tmp_path / "page.html").read_text()
    assert "NLL" in result.stdout


def test_a_report_says_which_files_are_damaged(run, tmp_path):
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "curves.json").write_text((damaged / "curves.json").read_text().replace("test", "tent"))
    result = CliRunner().invoke(app, ["report", str(damaged)])
    assert result.exit_code == 0
    assert result.stderr == f"{damaged}: curves.json could not be read: changed, cut short or not JSON\n"


def test_a_report_without_runs_is_an_error(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")


def test_rescale_writes_a_second_run(tmp_path):
    run = small_run(tmp_path / "run")
    result = call("rescale", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "run-scaled")
    result = json.loads((tmp_path / "run-scaled" / "result.json").read_text())
    assert result["derived_from"] == "run"
    assert call("evaluate", tmp_path / "run-scaled", "--examples", "10").exit_code == 0
    again = call("rescale", run)
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_errors_of_rescale_are_one_line(tmp_path):
    result = call("rescale", tmp_path)
    assert result.exit_code == 2
    assert "is not a run directory" in result.stderr
