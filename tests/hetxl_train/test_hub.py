"""Runs are saved, loaded and pushed by the conventions of the hub, with a model card."""

import json

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hetxl.integrations import hub as heads
from hetxl_train import hub
from hetxl_train.calibration import calibrate_run
from hetxl_train.cli.commands import app
from hetxl_train.console import Console
from hetxl_train.export_run import export_run
from hetxl_train.report.card import model_card
from hetxl_train.runs import load_run
from support.small_run import small_run

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = small_run(tmp_path_factory.mktemp("run") / "run", steps=60)
    calibrate_run(path, coverage=0.8, console=QUIET)
    return path


def test_saved_runs_predict_the_same(run, tmp_path):
    hub.save_pretrained(run, tmp_path / "saved")
    trained, saved = load_run(run), hub.from_pretrained(tmp_path / "saved")
    features = torch.randn(3, 4)
    expected = trained.model.head.predict(features).probs
    assert torch.equal(saved.model.head.predict(features).probs, expected)
    assert saved.class_names == trained.class_names
    assert torch.equal(heads.from_pretrained(tmp_path / "saved").predict(features).probs, expected)


def test_saved_runs_are_run_directories_for_the_commands(run, tmp_path):
    hub.save_pretrained(run, tmp_path / "saved")
    np.save(tmp_path / "inputs.npy", np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32))
    files = []
    for path in (run, tmp_path / "saved"):
        files.append(tmp_path / f"{path.name}.jsonl")
        arguments = ["predict", str(path), str(tmp_path / "inputs.npy"), "--out", str(files[-1]), "--coverage", "0.8"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert files[0].read_text() == files[1].read_text()
    written = export_run(tmp_path / "saved", "torch", uncertainty=True, console=QUIET)
    assert written.path == tmp_path / "saved" / "model.pt2"
    assert "prediction_set" in written.what


def test_saved_runs_leave_out_what_is_private(run, tmp_path):
    hub.save_pretrained(run, tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"README.md", "config.json", "model.json", "model.safetensors", "calibration.json"} <= names
    assert names.isdisjoint({"examples.json", "records", "log.jsonl", "checkpoints"})
    assert "data" not in json.loads((tmp_path / "saved" / "model.json").read_text())
    assert "broken" not in json.loads((tmp_path / "saved" / "result.json").read_text())
    for path in (tmp_path / "saved").glob("*.json"):
        assert str(run.parent) not in path.read_text()
    assert str(run.parent) not in (tmp_path / "saved" / "README.md").read_text()


def test_card_has_data_metrics_calibration_confusions_use_and_limits(run):
    card = ModelCard(model_card(run, license="apache-2.0"))
    assert card.data.library_name == "hetxl"
    assert card.data.license == "apache-2.0"
    result = json.loads((run / "result.json").read_text())
    metrics = result["metrics"]["test"]
    for words in (
        "# HET-XL on synthetic",
        "## Intended use",
        "- 720 training, 40 validation and 40 test examples",
        f"| accuracy | {metrics['precision@1']:.1%} |",
        "hold the label of at least 80% of new examples",
        "## Known confusions",
        "## Limits",
    ):
        assert words in card.text
    pairs = json.loads((run / "confusions.json").read_text())["pairs"]
    most = max(pairs, key=lambda pair: pair["confused"])
    assert f"| {most['first']} / {most['second']} | {most['confused']} |" in card.text


def test_command_pushes_to_a_directory(run, tmp_path):
    result = CliRunner().invoke(app, ["push", str(run), str(tmp_path / "pushed"), "--license", "mit"])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "pushed") in result.output
    assert "mit" in (tmp_path / "pushed" / "README.md").read_text()
    assert hub.from_pretrained(tmp_path / "pushed").class_names == load_run(run).class_names


def test_what_cannot_be_saved_raises(run, tmp_path):
    with pytest.raises(ValueError, match="is the run itself"):
        hub.save_pretrained(run, run)
    with pytest.raises(ValueError, match="is not a run directory"):
        hub.push_to_hub(tmp_path, str(tmp_path / "pushed"))
    assert not (tmp_path / "pushed").exists()
