"""The ways to choose τ, end to end on small data; the parallel ones in processes of their own."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hetxl.training.files import read_json
from hetxl.training.train import open_data
from hetxl.tuning.methods import Search
from hetxl.tuning.trial import Outcome, Trial
from hetxl.tuning.tune import choose, default_directory, recommended, tune
from support.training import QUIET, small

KILLED = """
import json, sys
from hetxl.training.config import TrainConfig
from hetxl.training.progress import Narrator
from hetxl.tuning.methods import Search
from hetxl.tuning.tune import tune
tune(TrainConfig(**json.loads(sys.argv[1])), Search("grid", grid=(0.5, 1.0), jobs=1), narrator=Narrator(quiet=True))
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
def test_methods_with_one_training(tmp_path, head, method):
    config = small(tmp_path / "out", head=head, log_every=1, steps=3, learning_rate=0.1)
    found = read_json(tune(config, Search(method), narrator=QUIET))
    assert found["trainings"] == 1
    assert found["single_training"]
    assert found["needs_validation"] == (method in ("bilevel", "gradient", "posthoc"))
    assert set(found["metrics"]) == {"validation", "test"}
    assert len(found["path"]) == 3
    moved = found["temperature"] != 1.0
    assert moved == (method != "fixed")
    if method in ("bilevel", "gradient", "train"):
        assert found["path"][-1][1] == pytest.approx(found["temperature"])
    assert (tmp_path / "out" / found["run"] / "model.safetensors").exists()
    assert (tmp_path / "out" / "tune.html").exists()
    trial = read_json(tmp_path / "out" / found["run"] / "result.json")
    assert "test" not in trial["metrics"]  # it was looked at once, by the search


def test_a_held_out_share_needs_no_validation_split_and_lengthens_the_training(tmp_path):
    config = small(tmp_path / "out", steps=8)
    found = read_json(tune(config, Search("bilevel", held_out=0.25), narrator=QUIET))
    assert not found["needs_validation"]
    assert read_json(tmp_path / "out" / found["run"] / "result.json")["steps"] == 10
    assert found["label"] == "Luketina et al. (25.0 %)"


def test_a_grid_chooses_on_validation_and_keeps_the_chosen_weights(tmp_path):
    config = small(tmp_path / "out", steps=20, learning_rate=0.1)
    path = tune(config, Search("grid", grid=(0.05, 1.0), retrain=True, jobs=2), narrator=QUIET)
    found = read_json(path)
    assert found["trainings"] == 3
    assert found["seconds"] > 0
    best = min(found["trials"], key=lambda trial: trial["nll"])
    assert found["temperature"] == best["temperature"]
    assert found["run"] == "trials/retrained"
    other = next(trial for trial in found["trials"] if trial["name"] != best["name"])
    assert not (tmp_path / "out" / "trials" / other["name"] / "model.safetensors").exists()
    assert tune(config, Search("grid", grid=(0.05, 1.0), retrain=True), narrator=QUIET) == path
    with pytest.raises(ValueError, match="steps 20 there, 21 here"):
        tune(dataclasses.replace(config, steps=21), Search("grid", grid=(0.05, 1.0), retrain=True), narrator=QUIET)
    with pytest.raises(ValueError, match="retrain True there, False here"):
        tune(config, Search("grid", grid=(0.05, 1.0)), narrator=QUIET)


def test_bayes_and_two_folds(tmp_path):
    config = small(tmp_path / "out", steps=2)
    search = Search("bayes", trials=3, parallel=2, folds=2, sampler="tpe", jobs=1)
    found = read_json(tune(config, search, narrator=QUIET))
    assert len(found["trials"]) == 3
    assert found["note"] == "chosen on the test split: for the paper's check only"
    best = min(found["trials"], key=lambda trial: trial["nll"])
    assert found["metrics"]["test"]["nll"] == best["nll"]
    assert (tmp_path / "out" / "study.journal").exists()


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on(tmp_path):
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
    found = read_json(tune(small(**options), Search("grid", grid=(0.5, 1.0), jobs=1), narrator=QUIET))
    assert (trials / "tau-0.5" / "result.json").stat().st_mtime_ns == before
    assert found["trainings"] == 2
    assert found["failed"] == 0


def test_all_failed(tmp_path):
    trials = [Outcome(Trial("tau-1", small(tmp_path)), error="too warm")]
    with pytest.raises(ValueError, match="all 1 trainings failed; tau-1: too warm"):
        choose(trials, "validation")


def test_mistakes_are_named_before_anything_is_trained(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="has files but no search"):
        tune(small(tmp_path / "full"), Search("train"), narrator=QUIET)
    dataset = open_data(small())
    blind = dataclasses.replace(dataset, splits={"train": dataset.splits["train"]})
    monkeypatch.setattr("hetxl.tuning.tune.open_data", lambda config: blind)
    with pytest.raises(ValueError, match="method = grid needs a validation split"):
        tune(small(tmp_path / "out"), Search("grid"), narrator=QUIET)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        tune(small(tmp_path / "out"), Search("train"), narrator=QUIET)


def test_where_and_how_without_being_told():
    assert str(default_directory(small(head="det"), Search("bayes"))) == "runs/tune-synthetic-det-bayes"
    assert recommended(small(), 1, QUIET) == "fixed"
