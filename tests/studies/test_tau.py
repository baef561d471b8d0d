import dataclasses
import json

import pytest

from hetxl.studies import tau
from hetxl.studies.tau import SLOW_LABEL, Size, study
from hetxl.studies.tau_page import OURS, PAPER
from hetxl.studies.tau_settings import Setting
from hetxl.training.progress import Narrator


@pytest.fixture
def tiny(monkeypatch):
    options = {"steps": 2, "batch_size": 32, "rank": 2, "train_samples": 2, "eval_samples": 4, "learning_rate": 0.05}
    options |= {"evaluation_examples": 40, "test_examples": 40, "log_every": 1}
    setting = Setting("tiny one", "Small.", lambda folder: "synthetic:rows=400,classes=6,features=4", options)
    monkeypatch.setattr(tau, "QUICK", {"tiny one": setting})
    monkeypatch.setattr(tau, "SMALL", Size((0.4, 1.5), 2, 2))


@pytest.mark.slow
def test_the_whole_study(tiny, tmp_path):
    path = study(seeds=(3,), out=tmp_path / "out", quick=True, jobs=1, narrator=Narrator(quiet=True))
    [setting] = json.loads(path.read_text())["settings"]
    methods = setting["methods"]
    assert set(methods) == {*PAPER, *OURS}
    assert SLOW_LABEL in OURS
    assert methods["τ = 1"]["temperature"] == [1.0]
    assert methods["τ = 1"]["nll"] != methods["Fitted afterwards"]["nll"]
    assert methods["Grid search"]["temperature"][0] in (0.4, 1.5)
    assert methods["Grid search"]["trainings"] == [2]
    assert methods["Grid search (+ retrain)"]["trainings"] == [3]
    assert methods["Bayesian optimization"]["trainings"] == [2]
    # By the test split itself, nothing among the same trainings can be better.
    assert methods["Grid search (2 folds)"]["nll"] <= methods["Grid search"]["nll"]
    # A slower τ is nearer to where it began.
    fast, slow = (abs(methods[label]["temperature"][0] - 1) for label in ("Simple training", SLOW_LABEL))
    assert 0 < slow < fast
    assert "tiny one" in (tmp_path / "out" / "study.md").read_text()
    assert "τ over training" in (tmp_path / "out" / "study.html").read_text()
    # What is finished is kept: no process is needed to say it again.
    before = path.read_text()
    study(seeds=(3,), out=tmp_path / "out", quick=True, jobs=1, narrator=Narrator(quiet=True))
    assert path.read_text() == before


@pytest.mark.slow
def test_longer_trainings_are_a_setting_more(tiny, tmp_path, monkeypatch):
    setting = dataclasses.replace(tau.QUICK["tiny one"], name="tiny one, longer", searches=False)
    monkeypatch.setattr(tau, "SETTINGS", {})
    monkeypatch.setattr(tau, "LONGER", setting)
    options = {"seeds": (3,), "out": tmp_path / "out", "jobs": 1, "narrator": Narrator(quiet=True)}
    [found] = json.loads(study(longer=True, **options).read_text())["settings"]
    assert found["setting"] == "tiny one, longer"
    assert set(found["methods"]) == {"Simple training", SLOW_LABEL, "Fitted afterwards", "τ = 1"}
    assert (tmp_path / "out" / "tiny-one-longer").is_dir()


def test_longer_trainings_have_no_quick_form(tiny, tmp_path):
    with pytest.raises(ValueError, match="leave quick or longer out"):
        study(longer=True, quick=True, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_seeds_must_differ(tiny, tmp_path):
    with pytest.raises(ValueError, match="different numbers"):
        study(seeds=(1, 1), out=tmp_path / "out", quick=True)
    assert not (tmp_path / "out").exists()
