import dataclasses
import json
from pathlib import Path

import pytest

from hetxl.contrastive.config import ContrastiveConfig
from hetxl.studies.cache import DIVERGED, Cache
from hetxl.studies.forms import FORMS
from hetxl.studies.noise_at_test_time import STUDY
from hetxl.studies.pair_study import percent, percents, share_text
from hetxl.studies.registry import load_study
from hetxl.studies.study import Lab

FULL = FORMS["full"]


def on(form, data):
    return dataclasses.replace(form, pairs=dataclasses.replace(form.pairs, data=data))


def test_directories_are_of_a_form_and_of_data():
    assert STUDY.home(FULL) == Path("runs/study-contrastive/runs")
    assert STUDY.home(FORMS["quick"]) == Path("runs/study-contrastive-quick/runs")
    assert STUDY.home(on(FULL, "some/where/mine.npz")) == Path("runs/study-contrastive-mine/runs")


def test_seeds_are_others_than_that_of_the_options():
    assert STUDY.seeds(FULL) == (1, 2, 3, 4, 5)
    assert STUDY.seeds(FORMS["quick"]) == (0, 1)


def test_trainings_are_shared_between_the_studies():
    keys = {
        name: {one.key for one in load_study(name).trainings(FULL, (1,))}
        for name in ("contrastive", "normalisation", "test-noise")
    }
    assert {name: len(found) for name, found in keys.items()} == {"contrastive": 6, "normalisation": 4, "test-noise": 3}
    assert keys["test-noise"] < keys["contrastive"]
    assert keys["normalisation"] & keys["contrastive"] == {"het-xl-swap0-seed1"}


def test_seeds_are_paired_and_values_are_those_of_the_runs(studied):
    _, summary = studied("test-noise")
    places = [studied.cache / f"het-xl-swap40-seed{seed}" for seed in (0, 1)]
    swaps = [(place / "swaps.npz").read_bytes() for place in places]
    assert swaps[0] != swaps[1]
    studied("contrastive")
    assert (studied.cache / "det-swap40-seed1" / "swaps.npz").read_bytes() == swaps[1]
    config = ContrastiveConfig.from_dict(json.loads((places[1] / "config.json").read_text()))
    assert (config.seed, config.data_seed, config.swap, config.eval_samples) == (1, 1, 0.4, 3)
    stored = json.loads((places[1] / "result.json").read_text())
    assert summary["runs"]["het-xl-swap40"]["sampled_top1"][1] == stored["metrics"]["test"]["zero_shot_sampled"]["top1"]
    assert summary["samples"] == 3


def test_a_loss_that_was_not_finite(studied, tmp_path):
    studied("test-noise")
    form = on(FORMS["miniature"], str(studied.pairs))
    for setting in STUDY.settings:
        place = tmp_path / form.pairs.training(setting, 0).key
        place.mkdir()
        (place / DIVERGED).write_text("{}")
    lab = Lab(form, (0,), Cache(tmp_path))
    with pytest.raises(FloatingPointError, match="nothing to measure"):
        STUDY.measure(lab)
    kept = STUDY.settings[0]
    result = (studied.cache / f"{kept}-seed0" / "result.json").read_text()
    (tmp_path / f"{kept}-seed0" / "result.json").write_text(result)
    found = STUDY.measure(lab)["runs"]
    assert [run is None for run in found.values()] == [False, True, True]


def test_cells():
    assert percent({"a": [0.1, 0.3]}, "a") == pytest.approx((20, 10))
    assert percent({"a": [0.1]}, "b") is None
    assert percent(None, "a") == "not finite"
    assert percents({"a": [0.5]}, "a") == [50]
    assert percents(None, "a") == []
    assert share_text(0.2) == "20 %"
