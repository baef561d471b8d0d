import pytest

from hetxl_train.search.methods import GRID, Search, about, grid_trials, lengthened, single_trial
from hetxl_train.temperature_methods import METHODS
from support.training import small


def test_the_grid_is_the_papers(tmp_path):
    trials = grid_trials(small(), Search("grid"), tmp_path, "blind")
    assert [float(trial.config.temperature) for trial in trials] == list(GRID)
    assert len({trial.directory for trial in trials}) == 8


def test_options_of_the_run_of_each_method(tmp_path):
    def config(method, **options):
        return single_trial(small(steps=80), Search(method, **options), tmp_path, "whole").config

    assert (config("train").temperature, config("train").temperature_method) == ("learned", "train")
    assert config("gradient").temperature_method == "gradient"
    held = config("bilevel", held_out=0.125)
    assert (held.temperature_method, held.temperature_held_out, held.steps) == ("bilevel", 0.125, 90)
    assert config("fixed").temperature == "1"
    assert single_trial(small(), Search("posthoc"), tmp_path, "whole").scaled == tmp_path / "posthoc-fitted"


def test_epochs_are_lengthened_by_the_share():
    assert lengthened(small(steps=None, epochs=4.0), 0.25).epochs == 5.0
    assert lengthened(small(steps=None, epochs=4.0), 0.0).epochs == 4.0


def test_labels_and_needs_of_each_method():
    rows = {
        Search("grid"): ("Grid search", False, True),
        Search("grid", folds=2): ("Grid search (2 folds)", False, True),
        Search("bayes", retrain=True): ("Bayesian optimization (+ retrain)", False, True),
        Search("bilevel"): ("Luketina et al.", True, True),
        Search("bilevel", held_out=0.125): ("Luketina et al. (12.5 %)", True, False),
        Search("gradient"): ("Simple gradient (val)", True, True),
        Search("train"): ("Simple training", True, False),
        Search("posthoc"): ("Fitted afterwards", True, True),
        Search("fixed"): ("τ = 1", True, False),
    }
    for search, expected in rows.items():
        assert (search.label, search.single_training, search.needs_validation) == expected
    assert Search("grid", folds=2).split == "test"
    assert {search.method for search in rows} == set(METHODS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "grids"}, "method"),
        ({"grid": ()}, "grid must hold"),
        ({"grid": (1.0, -1.0)}, "grid must hold"),
        ({"grid": (1.0, 1.0)}, "grid must hold"),
        ({"folds": 4}, "folds must be 3"),
        ({"method": "train", "folds": 2}, "folds = 2 is for grid and bayes"),
        ({"method": "train", "retrain": True}, "retrain is for grid and bayes"),
        ({"folds": 2, "retrain": True}, "exclude each other"),
        ({"held_out": 0.1}, "held_out is for bilevel and gradient"),
        ({"method": "bilevel", "held_out": 1.0}, "held_out must be in"),
        ({"storage": "x.journal"}, "storage is for method = bayes"),
        ({"trials": 0}, "trials"),
        ({"jobs": 0}, "jobs"),
        ({"sampler": "cma"}, "sampler"),
    ],
)
def test_options_that_do_not_go_together_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Search(**options)


def test_common_options_leave_out_those_without_effect():
    assert about(small("somewhere", temperature="0.4")) == about(small("elsewhere", temperature="learned"))
    assert about(small(steps=4)) != about(small(steps=5))
