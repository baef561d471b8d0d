import json

import pytest
from typer.testing import CliRunner

from hetxl_train.cli.commands import app

SMALL = ["synthetic:rows=400,classes=6,features=4", "--steps", "3", "--batch-size", "32", "--rank", "2"]
SMALL += ["--train-samples", "2", "--eval-samples", "4", "--device", "cpu"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments])


def test_a_method_with_one_run(tmp_path):
    result = invoke(*SMALL, "--method", "gradient", "--held-out", "0.25", "--head", "det", "--out", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    result_json = json.loads((tmp_path / "o" / "tune.json").read_text())
    assert (result_json["method"], result_json["head"]) == ("gradient", "det")
    assert "tune.html" in result.stdout
    assert "Simple gradient (25.0 %): τ = " in result.stderr


def test_auto_reports_the_method_and_its_reason(tmp_path):
    result = invoke(*SMALL, "--out", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    assert "Method fixed: 3 steps are few" in result.stderr
    assert json.loads((tmp_path / "o" / "tune.json").read_text())["temperature"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "guess"], "method must be one of"),
        (["--method", "grid", "--grid", "1,warm"], "--grid must be numbers"),
        (["--method", "grid", "--grid", "1,-1"], "grid must hold"),
        (["--method", "train", "--folds", "2"], "folds = 2 is for grid and bayes"),
        (["--method", "grid", "--storage", "x"], "storage is for method = bayes"),
        (["--method", "bayes", "--grid", "1,2"], "grid is for method = grid, found bayes"),
        (["--method", "grid", "--trials", "3"], "trials is for method = bayes, found grid"),
        (["--method", "posthoc", "--max-runs", "3"], "--max-runs is for --method auto"),
        (["--temperature", "2"], "No such option"),
    ],
)
def test_errors_come_before_any_run(arguments, message, tmp_path):
    result = invoke(*SMALL, *arguments, "--out", str(tmp_path / "o"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "o").exists()


def test_options_of_a_method_select_it(tmp_path):
    result = invoke(*SMALL, "--grid", "0.5", "--jobs", "1", "--head", "det", "--out", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "o" / "tune.json").read_text())["method"] == "grid"
    wrong = invoke(*SMALL, "--trials", "3", "--held-out", "0.5", "--out", str(tmp_path / "p"))
    assert "held_out is for bilevel and gradient, found method = bayes" in wrong.stderr


def test_data_that_a_file_names_has_its_preset(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text(f'data = "{SMALL[0]}"\nsteps = 3\ntrain_samples = 2\neval_samples = 4\ndevice = "cpu"\n')
    result = invoke("--config", str(file), "--method", "fixed", "--out", str(tmp_path / "o"))
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "o" / "trials" / "fixed" / "config.json").read_text())
    assert (config["head"]["rank"], config["training"]["batch_size"]) == (8, 1024)
