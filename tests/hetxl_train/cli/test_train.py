import json

import pytest
from typer.testing import CliRunner

from hetxl_train.cli.commands import app

DATA = "synthetic:rows=600,classes=6,features=4"
FLAGS = ["--steps", "4", "--batch-size", "16", "--rank", "2", "--train-samples", "2", "--eval-samples", "4"]
FLAGS += ["--evaluation-examples", "20", "--test-examples", "20", "--device", "cpu"]


def call(*words, **options):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"}, **options)


def test_train_writes_a_run(tmp_path):
    result = call("train", DATA, *FLAGS, "--head", "het", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["label"] == "HET"
    assert "hetxl predict" in result.stdout


def test_compare_prints_a_table_and_writes_a_report(tmp_path):
    words = ["compare", DATA, *FLAGS, "--heads", "det,het-xl", "--seeds", "2", "--out", tmp_path / "out"]
    result = call(*words)
    assert result.exit_code == 0, result.output
    for text in ("DET + temperature scaling", "HET-XL", "true model", "calibration"):
        assert text in result.stdout
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    again = call(*words)
    assert again.exit_code == 0
    assert "done already" in again.stderr


@pytest.mark.parametrize("by", ["flag", "file"])
def test_compare_with_baselines(tmp_path, by):
    file = tmp_path / "options.toml"
    file.write_text("[comparison]\nbaselines = true\nmembers = 2\n")
    how = ["--baselines", "--members", "2"] if by == "flag" else ["--config", file]
    result = call("compare", DATA, *FLAGS, "--heads", "det", *how, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = (tmp_path / "out" / "report.html").read_text()
    for label in ("DET + label smoothing", "DET + MC dropout", "DET ensemble", "DET + Laplace"):
        assert label in result.stdout
        assert label in report
    assert "× DET" in result.stdout
    assert "× DET" in report
    assert "averages 2 runs of DET" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "no/such/path"], "no/such/path"),
        (["train", DATA, "--head", "het-lx"], "did you mean 'het-xl'"),
        (["train", DATA, "--batch-size", "0"], "batch_size must be at least 1"),
        (["compare", DATA, "--seeds", "x"], "--seeds must be a number"),
        (["compare", DATA, "--heads", "dte"], "did you mean 'det'"),
        (["compare", DATA, "--heads", ""], "heads must name at least one of det, "),
        (["compare", DATA, "--members", "3"], "members is 3 and baselines off; add --baselines"),
        (["train", DATA, "--mc-dropout", "0.1"], "mc_dropout = 0.1 needs head = det, found het-xl"),
        (["train", DATA, "--config", "none.toml"], "no such file"),
        (["train", "synthetic:rows=600,clases=6"], "classes"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, message):
    result = call(*words, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_unknown_key_in_the_options_file_raises(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\ndata = "synthetic:rows=600,classes=6,features=4"\n[training]\nsteps = 4\nlerning_rate = 1.0\n'
    )
    result = call("train", "--config", file, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "unknown key 'lerning_rate'" in result.stderr
    assert "did you mean 'learning_rate'" in result.stderr


def test_a_comparison_of_data_that_a_file_names_has_its_preset(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text(f'data = "{DATA}"\nsteps = 4\neval_samples = 4\ndevice = "cpu"\n')
    result = call("compare", "--config", file, "--heads", "det", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out" / "runs" / "det-seed0" / "config.json").read_text())
    assert (config["head"]["rank"], config["training"]["batch_size"]) == (8, 1024)
