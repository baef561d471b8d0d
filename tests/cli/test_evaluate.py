import json

import pytest
from typer.testing import CliRunner

from hetxl.cli import app
from support.small_run import small_run


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run") / "run")


def test_the_runs_own_test_split(run):
    result = call("evaluate", run, "--json", "--examples", "40", "--device", "cpu")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((run / "result.json").read_text())["metrics"]["test"]
    assert "precision@1" in call("evaluate", run, "--examples", "10").stdout


def test_errors_are_one_line(run, tmp_path):
    for words, message in (
        ((tmp_path,), "is no run"),
        ((run, "--split", "tset"), "did you mean 'test'"),
        ((run, "no/such/file.npy"), "no/such/file.npy"),
        ((run, "--method", "magic"), "method must be one of"),
    ):
        result = call("evaluate", *words)
        assert result.exit_code == 2
        assert message in result.stderr
