import json

import pytest

from hetxl.studies import settings, tune
from hetxl.studies.defaults import ENSEMBLE, LONGER, study
from hetxl.studies.settings import Setting
from hetxl.training.progress import Narrator
from hetxl.training.rescale import SCALED, SCALED_XL

TINY = {
    "steps": 6,
    "batch_size": 32,
    "rank": 2,
    "train_samples": 2,
    "eval_samples": 8,
    "evaluation_examples": 40,
    "test_examples": 40,
    "evaluate_every": 3,
}
SETTING = Setting("tiny", "synthetic:rows=400,classes=8,features=6", options=TINY)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A whole study of a setting that trains in a second, run twice."""
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "SETTINGS", None)
        patch.setattr("hetxl.studies.defaults.SETTINGS", {"tiny": SETTING})
        patch.setattr(tune, "WEIGHT_DECAYS", (0.01, 0.1))
        options = {"seeds": (0, 1), "heads": ("det", "het-xl"), "out": out, "jobs": 1, "narrator": Narrator(quiet=True)}
        (path,) = study(("tiny",), **options)
        first = path.read_text()
        before = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
        (again,) = study(("tiny",), **options)
        after = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
        with pytest.raises(ValueError, match="tiny"):
            study(("other",), **options)
        with pytest.raises(ValueError, match="jobs must be at least 1, found 0"):
            study(("tiny",), **(options | {"jobs": 0}))
    assert again.read_text() == first
    assert before == after  # nothing was trained again
    return out, json.loads(first)


def test_what_takes_part(results):
    _, summary = results
    assert set(summary["heads"]) == {"DET", SCALED, LONGER, "HET-XL", SCALED_XL, ENSEMBLE}
    for label in ("DET", SCALED, LONGER, "HET-XL"):
        assert summary["heads"][label]["seeds"] == [0, 1]
        assert len(summary["heads"][label]["nll"]) == 2
    assert len(summary["heads"][ENSEMBLE]["nll"]) == 1
    assert summary["heads"][LONGER]["steps"] >= summary["heads"]["DET"]["steps"]


def test_an_ensemble_is_no_worse_than_its_members_on_average(results):
    _, summary = results
    members = summary["heads"]["DET"]["nll"]
    assert summary["heads"][ENSEMBLE]["nll"][0] <= sum(members) / len(members)


def test_tuning_comes_first_and_does_not_see_the_test_split(results):
    out, summary = results
    tuned = sorted((out / "tiny" / "tuning").iterdir())
    assert len(tuned) == len(summary["tuning"]) >= 4
    for place in tuned:
        metrics = json.loads((place / "result.json").read_text())["metrics"]
        assert set(metrics) == {"validation"}
    best = min(summary["tuning"], key=lambda trial: trial["nll"])
    assert (summary["learning_rate"], summary["weight_decay"]) == (best["learning_rate"], best["weight_decay"])
    config = json.loads((out / "tiny" / "compare" / "runs" / "het-xl-seed1" / "config.json").read_text())
    assert config["training"]["learning_rate"] == summary["learning_rate"]
    assert config["training"]["weight_decay"] == summary["weight_decay"]
