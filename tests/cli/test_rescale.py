import json

from typer.testing import CliRunner

from hetxl.cli import app
from support.small_run import small_run


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_a_run_is_rescaled_into_one_beside_it(tmp_path):
    run = small_run(tmp_path / "run")
    result = call("rescale", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "run-scaled")
    found = json.loads((tmp_path / "run-scaled" / "result.json").read_text())
    assert found["derived_from"] == "run"
    assert call("evaluate", tmp_path / "run-scaled", "--examples", "10").exit_code == 0
    again = call("rescale", run)
    assert again.exit_code == 2
    assert "is there already" in again.stderr


def test_errors_are_one_line(tmp_path):
    result = call("rescale", tmp_path)
    assert result.exit_code == 2
    assert "is no run" in result.stderr
