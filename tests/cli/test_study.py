import json

import pytest
from typer.testing import CliRunner

from hetxl.cli import app
from hetxl.studies.settings import Setting


def test_defaults(tmp_path, monkeypatch):
    options = {"steps": 4, "batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 4, "evaluate_every": 2}
    setting = Setting("tiny", "synthetic:rows=400,classes=8,features=6", options=options)
    monkeypatch.setattr("hetxl.studies.defaults.QUICK", {"tiny": setting})
    monkeypatch.setattr("hetxl.studies.tune.WEIGHT_DECAYS", ())
    arguments = ["study", "defaults", "--quick", "--heads", "det,het-xl", "--seeds", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "HET-XL against DET in 1 settings" in result.stdout
    assert (tmp_path / "study.md").read_text() in result.stdout
    assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["seeds"] == [0, 1]


SMALL = {"steps": 3, "batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 4, "evaluate_every": 3}


def test_recovery(tmp_path, monkeypatch):
    monkeypatch.setattr("hetxl.studies.recovery.QUICK", SMALL | {"data": "synthetic:rows=400,classes=8,features=6"})
    result = CliRunner().invoke(app, ["study", "recovery", "--quick", "--seeds", "3,", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "study.md").read_text() in result.stdout
    assert "HET-XL closes" in result.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["seeds"] == [3]
    assert (tmp_path / "out" / "recovery.png").exists()


def test_levers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hetxl.studies.levers.preset_for", lambda data: SMALL)
    arguments = ["study", "levers", "synthetic:rows=400,classes=8,features=6", "--levers", "residual", "--seeds", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    out = tmp_path / "runs" / "study-levers-synthetic"
    assert (out / "study.md").read_text() in result.stdout
    assert list(json.loads((out / "summary.json").read_text())["levers"]) == ["residual"]
    assert (out / "levers.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recovery", "pycode"], "data must be synthetic"),
        (["recovery", "--seeds", "0"], "--seeds"),
        (["levers", "--levers", "rank,ranks"], "ranks"),
        (["levers", "no-such-file.npz"], "no-such-file.npz"),
    ],
)
def test_mistakes_of_the_other_studies(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["study", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "pycodes"], "pycodes"),
        (["--seeds", "none"], "--seeds"),
        (["--heads", "hetxl", "--quick"], "hetxl"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["study", "defaults", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
