import json

import pytest

from hetxl.studies.cache import DIVERGED, Cache
from hetxl.studies.forms import FORMS
from hetxl.studies.registry import ENTRIES, load_study
from hetxl.studies.study import Lab

FORM = FORMS["miniature"]
NAMES = [entry.name for entry in ENTRIES.values() if entry.module]


def result(seed, nll):
    metrics = dict.fromkeys(("nll", "precision@1", "precision@5", "calibration_error", "brier"), 0.5) | {"nll": nll}
    return {
        "seed": seed,
        "metrics": {"test": metrics, "validation": metrics},
        "train_seconds": 1.0,
        "steps": 3,
        "temperature": 1.0,
        "parameters": {"total": 7},
    }


def test_results_over_seeds(tmp_path):
    lab = Lab(FORM, (0, 1), Cache(tmp_path))
    trainings = [FORM.base.training("det", seed) for seed in lab.seeds]
    for training, nll in zip(trainings, (2.0, 3.0), strict=True):
        lab.cache.place(training).mkdir()
        (lab.cache.place(training) / "result.json").write_text(json.dumps(result(training.config.seed, nll)))
    assert lab.results(trainings)["nll"] == [2.0, 3.0]
    place = lab.cache.place(trainings[1])
    (place / "result.json").unlink()
    (place / DIVERGED).write_text("{}")
    assert lab.results(trainings) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_study_says_what_it_is(name):
    study = load_study(name)
    assert study.name == name
    assert study.question[0].isupper()
    assert study.question[-1] in ".?"
    assert not study.claim.endswith(".")
    assert len(study.paper_tables()) >= len(study.paper)


def test_studies_share_their_trainings():
    """The full forms: those of the ablations are the main table's where they can be."""
    keys = {name: {one.key for one in load_study(name).trainings(FORMS["full"], (0,))} for name in NAMES}
    for name in ("tau-dynamics", "alignment", "equal-params"):
        assert keys[name] <= keys["main"], name
    for name in ("data-scale", "model-scale", "learn-tau", "sharing", "residual"):
        assert keys[name] & keys["main"], name
    assert len(keys["main"]) == (4 + 2) * 6
    assert len(set().union(*keys.values())) < sum(map(len, keys.values())) - 20
