import json

import pytest

from hetxl.contrastive.config import ContrastiveConfig
from hetxl.studies.pair_trainings import SETTINGS, PairBench, pair_values

BENCH = PairBench("icons", {"steps": 3})


def test_settings_differ_from_the_defaults_in_what_they_say():
    assert set(SETTINGS) == {f"{head}-swap{swap}" for head in ("det", "het-xl") for swap in (0, 20, 40)} | {
        f"het-xl-normalize-{placement}" for placement in ("after", "both", "none")
    }
    usual = ContrastiveConfig(steps=3, eval_samples=22, seed=4, data_seed=4)
    assert BENCH.training("het-xl-swap0", 4).config == usual
    found = BENCH.training("het-xl-normalize-none", 4).config
    assert (found.normalize, found.swap, found.head) == ("none", 0, "het-xl")
    assert BENCH.training("det-swap40", 4).config.swap == 0.4


def test_a_training_has_a_name_and_a_title():
    training = BENCH.training("det-swap20", 3)
    assert training.key == "det-swap20-seed3"
    assert training.title == "icons DET (det-swap20) seed 3"


def test_another_run_under_its_name_is_an_error(tmp_path):
    training = BENCH.training("det-swap20", 3)
    training.check(tmp_path)  # nothing there
    (tmp_path / "config.json").write_text(json.dumps(training.config.to_dict()))
    training.check(tmp_path)
    (tmp_path / "log.jsonl").touch()
    other = PairBench("icons", {"steps": 4}).training("det-swap20", 3)
    with pytest.raises(ValueError, match=r"holds a run with other options \(steps 3 there, 4 here\)"):
        other.check(tmp_path)


def test_mistakes():
    with pytest.raises(ValueError, match=r"setting must be one of .*did you mean 'det-swap20'"):
        BENCH.training("det-swap2", 0)
    with pytest.raises(ValueError, match="data must be given"):
        PairBench("").training("det-swap0", 0)


def test_metrics_that_one_run_has_not_are_left_out():
    full = {"metrics": {"test": {"zero_shot": {"top1": 0.1, "top5": 0.2}}}, "swaps": {"noise_auroc": 0.6}}
    part = {"metrics": {"test": {"zero_shot": {"top1": 0.3, "top5": 0.4}}}}
    assert pair_values([full, part]) == {"zero_shot_top1": [0.1, 0.3], "zero_shot_top5": [0.2, 0.4]}
    assert pair_values([full])["noise_auroc"] == [0.6]
