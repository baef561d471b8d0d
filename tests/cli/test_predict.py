import csv

import numpy as np
import pytest
from typer.testing import CliRunner

from hetxl.cli import app
from support.small_run import small_run


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run") / "run")


def test_arrays_to_a_table(run, tmp_path):
    np.save(tmp_path / "new.npy", np.random.default_rng(0).normal(size=(7, 4)).astype("float32"))
    result = call("predict", run, tmp_path / "new.npy", "--out", tmp_path / "out.csv", "--top-k", "2")
    assert result.exit_code == 0, result.output
    assert "7 rows" in result.stdout
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    assert 0 < float(rows[0]["probability_2"]) <= float(rows[0]["probability_1"]) <= 1
    assert rows[0]["confused_with"] == rows[0]["class_2"]


def test_errors_are_one_line(run, tmp_path):
    np.save(tmp_path / "bad.npy", np.zeros((3, 5), dtype="float32"))
    for words, message in (
        ((run, tmp_path / "bad.npy", "--out", tmp_path / "x.csv"), "bad.npy"),
        ((run, tmp_path / "bad.npy", "--out", tmp_path / "x.xlsx"), ".parquet"),
        ((tmp_path, tmp_path / "bad.npy", "--out", tmp_path / "x.csv"), "is no run"),
    ):
        result = call("predict", *words)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not (tmp_path / "x.csv").exists()
