"""The ways to choose τ, end to end on small data; the parallel ones in processes of their own."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hetxl._files import read_json
from hetxl_train.data.open import open_data
from hetxl_train.runner import PlannedRun
from hetxl_train.search.methods import Search
from hetxl_train.search.trial import Outcome
from hetxl_train.search.tune import choose, default_directory, recommended, tune
from support.training import QUIET, small

KILLED = """
import json, sys
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.search.methods import Search
from hetxl_train.search.tune import tune
tune(TrainConfig(**json.loads(sys.argv[1])), Search("grid", grid=(0.5, 1.0), jobs=1), console=Console(quiet=True))
"""


@pytest.mark.parametrize(
    ("head", "method"),
    [
        *(("het-xl", method) for method in ("bilevel", "gradient", "train", "posthoc", "fixed")),
        *((head, "bilevel") for head in ("het", "het-h")),
        ("det", "posthoc"),
        ("det", "train"),
    ],
)
def test_methods_that_take_one_run(tmp_path, head, method):
    config = small(tmp_path / "out", head=head, log_every=1, steps=3, learning_rate=0.1)
    result = read_json(tune(config, Search(method), console=QUIET))
    assert result["trainings"] == 1
    assert result["single_training"]
    assert result["needs_validation"] == (method in ("bilevel", "gradient", "posthoc"))
    assert set(result["metrics"]) == {"validation", "test"}
    assert len(result["path"]) == 3
    moved = result["temperature"] != 1.0
    assert moved == (method != "fixed")
    if method in ("bilevel", "gradient", "train"):
        assert result["path"][-1][1] == pytest.approx(result["temperature"])
    assert (tmp_path / "out" / result["run"] / "model.safetensors").exists()
    assert (tmp_path / "out" / "tune.html").exists()
    trial = read_json(tmp_path / "out" / result["run"] / "result.json")
    assert "test" not in trial["metrics"]  # it was looked at once, by the search


def test_a_held_out_share_needs_no_validation_split_and_lengthens_the_run(tmp_path):
    config = small(tmp_path / "out", steps=8)
    result = read_json(tune(config, Search("bilevel", held_out=0.25), console=QUIET))
    assert not result["needs_validation"]
    assert read_json(tmp_path / "out" / result["run"] / "result.json")["steps"] == 10
    assert result["label"] == "Luketina et al. (25.0 %)"


def test_a_grid_chooses_on_validation_and_keeps_the_chosen_weights(tmp_path):
    config = small(tmp_path / "out", steps=20, learning_rate=0.1)
    path = tune(config, Search("grid", grid=(0.05, 1.0), retrain=True, jobs=2), console=QUIET)
    result = read_json(path)
    assert result["trainings"] == 3
    assert result["seconds"] > 0
    best = min(result["trials"], key=lambda trial: trial["nll"])
    assert result["temperature"] == best["temperature"]
    assert result["run"] == "trials/retrained"
    other = next(trial for trial in result["trials"] if trial["name"] != best["name"])
    assert not (tmp_path / "out" / "trials" / other["name"] / "model.safetensors").exists()
    assert tune(config, Search("grid", grid=(0.05, 1.0), retrain=True), console=QUIET) == path
    with pytest.raises(ValueError, match="steps 20 there, 21 here"):
        tune(dataclasses.replace(config, steps=21), Search("grid", grid=(0.05, 1.0), retrain=True), console=QUIET)
    with pytest.raises(ValueError, match="retrain True there, False here"):
        tune(config, Search("grid", grid=(0.05, 1.0)), console=QUIET)


def test_bayes_with_two_folds_chooses_on_the_test_split(tmp_path):
    config = small(tmp_path / "out", steps=2)
    search = Search("bayes", trials=3, parallel=2, folds=2, sampler="tpe", jobs=1)
    result = read_json(tune(config, search, console=QUIET))
    assert len(result["trials"]) == 3
    assert result["note"] == "chosen on the test split: for the paper's check only"
    best = min(result["trials"], key=lambda trial: trial["nll"])
    assert result["metrics"]["test"]["nll"] == best["nll"]
    assert (tmp_path / "out" / "study.journal").exists()


@pytest.mark.slow
def test_a_killed_search_resumes(tmp_path):
    options = {"data": "synthetic:rows=2000,classes=8,features=4", "steps": 60, "batch_size": 64, "rank": 3}
    options |= {"eval_samples": 16, "device": "cpu", "checkpoint_every": 5, "out": str(tmp_path / "out")}
    trials = tmp_path / "out" / "trials"
    process = subprocess.Popen([sys.executable, "-c", KILLED, json.dumps(options)])
    deadline = time.monotonic() + 120
    while not (trials / "tau-1" / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (trials / "tau-0.5" / "result.json").exists()
    assert not (trials / "tau-1" / "result.json").exists()
    time.sleep(0.5)  # what it had started ends with it, and writes no more
    reached = sorted((trials / "tau-1" / "checkpoints").iterdir())
    time.sleep(0.3)
    assert sorted((trials / "tau-1" / "checkpoints").iterdir()) == reached
    before = (trials / "tau-0.5" / "result.json").stat().st_mtime_ns
    result = read_json(tune(small(**options), Search("grid", grid=(0.5, 1.0), jobs=1), console=QUIET))
    assert (trials / "tau-0.5" / "result.json").stat().st_mtime_ns == before
    assert result["trainings"] == 2
    assert result["failed"] == 0


def test_an_error_if_all_runs_failed(tmp_path):
    trials = [Outcome(PlannedRun("tau-1", small(tmp_path)), error="too warm")]
    with pytest.raises(ValueError, match="all 1 runs failed; tau-1: too warm"):
        choose(trials, "validation")


def test_errors_come_before_any_run(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="has files but no search"):
        tune(small(tmp_path / "full"), Search("train"), console=QUIET)
    dataset = open_data(small())
    blind = dataclasses.replace(dataset, splits={"train": dataset.splits["train"]})
    monkeypatch.setattr("hetxl_train.search.tune.open_data", lambda config: blind)
    with pytest.raises(ValueError, match="method = grid needs a validation split"):
        tune(small(tmp_path / "out"), Search("grid"), console=QUIET)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        tune(small(tmp_path / "out"), Search("train"), console=QUIET)


def test_default_directory_and_recommended_method():
    assert str(default_directory(small(head="det"), Search("bayes"))) == "runs/tune-synthetic-det-bayes"
    assert recommended(small(), 1, QUIET) == "fixed"
