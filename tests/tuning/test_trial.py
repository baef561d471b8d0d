import pytest

from hetxl.tuning.trial import Trial, check_trial, drop_weights, outcome_of, run_trial
from support.training import small


def test_a_blind_trial_never_sees_the_test_split(tmp_path):
    trial = Trial("one", small(tmp_path / "one", temperature="0.5", log_every=2))
    assert outcome_of(trial).error == "it did not end"
    assert outcome_of(trial, "why").error == "why"
    assert outcome_of(trial).seconds == 0
    run_trial(trial)
    found = outcome_of(trial)
    assert set(found.result["metrics"]) == {"validation"}
    assert found.temperature == 0.5
    assert found.nll("validation") > 0
    assert found.path() == [[2, 0.5], [4, 0.5]]
    assert not (trial.path / "checkpoints").exists()
    before = (trial.path / "result.json").stat().st_mtime_ns
    run_trial(trial)
    assert (trial.path / "result.json").stat().st_mtime_ns == before
    drop_weights(found)
    assert not (trial.path / "model.safetensors").exists()


def test_one_with_all_rows_and_one_that_is_fitted_afterwards(tmp_path):
    joined = Trial("joined", small(tmp_path / "joined", temperature="1.0"), "joined")
    run_trial(joined)
    assert set(outcome_of(joined).result["metrics"]) == {"test"}
    fitted = Trial("fitted", small(tmp_path / "fitted", temperature="1.0"), "whole", posthoc=True)
    run_trial(fitted)
    found = outcome_of(fitted)
    assert fitted.final.name == "fitted-fitted"
    assert found.temperature != 1.0
    assert set(found.result["metrics"]) == {"validation", "test"}


def test_a_directory_with_another_run_is_refused(tmp_path):
    run_trial(Trial("one", small(tmp_path / "one", temperature="0.5", steps=1)))
    check_trial(Trial("one", small(tmp_path / "one", temperature="0.5", steps=1)))
    check_trial(Trial("new", small(tmp_path / "new")))
    with pytest.raises(ValueError, match=r"temperature '0.5' there, '0.7' here"):
        check_trial(Trial("one", small(tmp_path / "one", temperature="0.7", steps=1)))
