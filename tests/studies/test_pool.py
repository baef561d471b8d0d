import dataclasses
import json

import pytest

from hetxl.studies import pool
from hetxl.studies.cache import Cache, Training
from hetxl.studies.forms import FORMS
from hetxl.studies.pool import run_trainings
from hetxl.training.train import train
from support.training import QUIET, Listening

BENCH = FORMS["miniature"].base


def test_each_training_once_and_never_again(tmp_path, monkeypatch):
    cache, started = Cache(tmp_path), []

    def counting(config, **options):
        started.append(config.seed)
        return train(config, **options)

    monkeypatch.setattr(pool, "train", counting)
    trainings = [BENCH.training("det", seed) for seed in (0, 1, 0)]
    narrator = Listening()
    run_trainings(trainings, cache, jobs=1, narrator=narrator)
    assert started == [0, 1]
    assert narrator.said[0] == f"2 trainings, 0 of them done before; in {tmp_path}"
    assert narrator.said[1].startswith("[1/2] synthetic:rows=400,classes=20,features=8 DET seed 0: test NLL ")
    run_trainings([*trainings, BENCH.training("det", 2)], cache, jobs=1, narrator=QUIET)
    assert started == [0, 1, 2]
    place = cache.place(trainings[0])
    assert (place / "model.safetensors").exists()
    assert not (place / "checkpoints").exists()
    assert json.loads((place / "result.json").read_text())["steps"] == BENCH.steps


def test_two_processes_give_what_one_gives(tmp_path):
    trainings = [BENCH.training("het-xl", seed) for seed in (0, 1)]
    caches = Cache(tmp_path / "one"), Cache(tmp_path / "two")
    for jobs, cache in enumerate(caches, 1):
        run_trainings(trainings, cache, jobs=jobs, narrator=QUIET)
    for training in trainings:
        one, two = (cache.result(training)["metrics"]["test"]["nll"] for cache in caches)
        assert two == one


def test_a_loss_that_is_not_finite_is_a_result(tmp_path, monkeypatch):
    def fragile(config, **options):
        raise FloatingPointError("the loss is nan after step 2")

    monkeypatch.setattr(pool, "train", fragile)
    cache, narrator = Cache(tmp_path), Listening()
    training = BENCH.training("det", 0)
    cache.place(training).mkdir(parents=True)
    run_trainings([training], cache, jobs=1, narrator=narrator)
    assert narrator.said[-1].endswith("the loss did not stay finite")
    assert cache.result(training) is None


def test_a_mistake_stops_everything(tmp_path):
    wrong = Training(dataclasses.replace(BENCH.config("det"), data="synthetic:rows=400,colour=3"))
    with pytest.raises(TypeError, match="colour"):
        run_trainings([wrong], Cache(tmp_path), jobs=1, narrator=QUIET)


def test_jobs(tmp_path):
    with pytest.raises(ValueError, match="jobs must be at least 1, found 0"):
        run_trainings([], Cache(tmp_path), jobs=0, narrator=QUIET)
    assert run_trainings([], Cache(tmp_path), jobs=2, narrator=QUIET) < 1
    assert not list(tmp_path.iterdir())
