import math

from hetxl.data import describe
from hetxl.studies import tune
from hetxl.studies.settings import Setting
from hetxl.training.progress import Narrator
from hetxl.training.train import open_data


def test_the_search_goes_on_beyond_an_end_and_keeps_the_best(tmp_path, monkeypatch):
    # So few steps that a larger learning rate is always better: the search must leave its first three values.
    options = {"steps": 3, "batch_size": 64, "evaluation_examples": 100, "evaluate_every": 3}
    options |= {"learning_rate": 1e-4, "weight_decay": 0.01}
    config = Setting("tiny", "synthetic:rows=400,classes=8,features=6", options=options).config()
    dataset = open_data(config)
    monkeypatch.setattr(tune, "WEIGHT_DECAYS", (0.01, 0.1))
    tuned = tune.tune_det(config, tmp_path, dataset, describe(dataset), Narrator(quiet=True))
    rates = sorted({trial.learning_rate for trial in tuned.trials})
    assert rates[0] == 0.5e-4
    assert rates[-1] > 2e-4
    assert tuned.learning_rate == min(tuned.trials, key=lambda trial: trial.nll).learning_rate
    decays = {trial.weight_decay for trial in tuned.trials if trial.learning_rate == tuned.learning_rate}
    assert decays >= {0.01, 0.1}


def test_an_end_that_is_the_best_is_stepped_over_until_it_no_longer_is():
    def asked(best, values, both):
        seen = []

        def costs(some):
            seen.extend(some)
            return [abs(math.log(value / best)) for value in some]

        return tune._lowest(costs, values, both), seen

    assert asked(2.0, [0.01, 0.1, 0.5], False) == (2.0, [0.01, 0.1, 0.5, 1.0, 2.0, 4.0])
    assert asked(0.1, [0.01, 0.1, 0.5], False) == (0.1, [0.01, 0.1, 0.5])
    assert asked(0.001, [0.01, 0.1], False) == (0.01, [0.01, 0.1])
    assert asked(0.3, [0.5, 1.0, 2.0], True) == (0.25, [0.5, 1.0, 2.0, 0.25, 0.125])
    # it ends at eight times the last value, however far the best is
    assert asked(1e9, [1.0, 2.0], True) == (16.0, [1.0, 2.0, 4.0, 8.0, 16.0])
