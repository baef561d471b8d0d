import json

import pytest

from hetxl.studies.pace import HEADS, pace
from hetxl.training.config import TrainConfig
from hetxl.training.train import open_data

CONFIG = TrainConfig(data="synthetic:rows=300,classes=40,features=6", batch_size=32, rank=2, train_samples=64)


@pytest.fixture(scope="module")
def dataset():
    return open_data(CONFIG)


def test_steps_of_every_head_are_timed_in_turns(dataset, tmp_path):
    found = pace(CONFIG, dataset, tmp_path / "new" / "pace.json", rounds=3)
    assert list(found) == list(HEADS)
    assert found["det"] == 1
    assert all(ratio > 0 for ratio in found.values())
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "pace.json"]  # no checkpoint, no log


def test_what_was_measured_is_kept(dataset, tmp_path):
    path = tmp_path / "pace.json"
    first = pace(CONFIG, dataset, path, heads=("det", "het-xl"), rounds=2)
    assert json.loads(path.read_text()) == first
    assert pace(CONFIG, dataset, path, heads=("det", "het-xl"), rounds=2) == first


def test_samples_cost_something(dataset, tmp_path):
    # 4,000 draws an example take many times DET's step on any machine, however busy.
    config = CONFIG.__class__(**{**vars(CONFIG), "train_samples": 4000})
    assert pace(config, dataset, tmp_path / "pace.json", heads=("det", "het-xl"), rounds=3)["het-xl"] > 2
