import math

import pytest

from hetxl_train.search.bayes import HIGH, LOW, Bayes, best_of, open_storage, run_steps

ABOUT = {"data": "somewhere", "steps": 10}


def cost(temperature: float) -> float:
    """Lowest at τ = 0.7."""
    return math.log(temperature / 0.7) ** 2


def trained(asked):
    return [(cost(trial.temperature), {"seconds": 2.0, "error": None}) for trial in asked]


@pytest.mark.parametrize("sampler", ["gp", "tpe"])
def test_a_search_finds_the_minimum(tmp_path, sampler):
    search = Bayes(tmp_path, "study", ABOUT, sampler=sampler, seed=1)
    run_steps(search, 15, 5, trained)
    trials = search.trials()
    assert len(trials) == 15
    assert all(LOW <= trial["temperature"] <= HIGH for trial in trials)
    best = best_of(trials)
    assert abs(math.log(best["temperature"] / 0.7)) < 0.4
    assert best["seconds"] == 2.0
    # Later steps look nearer to the minimum than the first, which is drawn at random.
    assert min(trial["nll"] for trial in trials[5:]) < min(trial["nll"] for trial in trials[:5])


def test_values_of_one_step_differ(tmp_path):
    search = Bayes(tmp_path, "study", ABOUT)
    run_steps(search, 5, 5, trained)
    asked = [trial.temperature for trial in search.ask(5)]
    assert len({round(tau, 3) for tau in asked}) >= 4


def test_a_stopped_search_resumes_its_suggestions(tmp_path):
    search = Bayes(tmp_path, "study", ABOUT)
    run_steps(search, 4, 2, trained)
    asked = search.ask(2)
    search.tell(asked[0].number, 0.5)
    again = Bayes(tmp_path, "study", ABOUT)
    assert again.unfinished() == [asked[1]]
    seen = []

    def train(several):
        seen.append([trial.number for trial in several])
        return trained(several)

    run_steps(again, 8, 2, train)
    assert seen == [[5], [6, 7]]
    assert again.count() == 8
    assert [trial["nll"] for trial in again.trials()][4] == 0.5


def test_the_same_seed_suggests_the_same(tmp_path):
    trials = []
    for name in ("a", "b"):
        search = Bayes(tmp_path / name, "study", ABOUT, seed=3)
        run_steps(search, 6, 3, trained)
        trials.append([trial["temperature"] for trial in search.trials()])
    assert trials[0] == trials[1]


def test_a_failed_trial_does_not_stop_the_search(tmp_path):
    search = Bayes(tmp_path, "study", ABOUT)

    def train(asked):
        return [
            (None, {"error": "too warm", "seconds": 0.0}) if trial.number == 1 else trained([trial])[0]
            for trial in asked
        ]

    run_steps(search, 6, 3, train)
    trials = search.trials()
    assert trials[1]["nll"] is None
    assert trials[1]["error"] == "too warm"
    assert best_of(trials)["nll"] is not None
    assert best_of(trials[1:2]) is None


def test_two_machines_share_a_study(tmp_path):
    storage = str(tmp_path / "shared.journal")
    first = Bayes(tmp_path / "one", "study", ABOUT, storage=storage)
    second = Bayes(tmp_path / "two", "study", ABOUT, storage=storage)
    asked = first.ask(3)
    assert second.unfinished() == []  # they are the other's
    assert second.count() == 3
    run_steps(second, 5, 5, trained)
    assert [trial.number for trial in asked] == [0, 1, 2]
    assert [trial["number"] for trial in second.trials()] == [3, 4]
    assert {trial["here"] for trial in first.trials()} == {False}


def test_a_study_with_other_options_is_an_error(tmp_path):
    Bayes(tmp_path, "study", ABOUT)
    with pytest.raises(ValueError, match="steps 10 there, 20 here"):
        Bayes(tmp_path, "study", ABOUT | {"steps": 20})


def test_storage_kind_follows_its_address(tmp_path):
    database = open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path / "unused")
    assert type(database).__name__ == "RDBStorage"
    assert (tmp_path / "study.db").exists()
    assert type(open_storage(None, tmp_path / "new" / "study.journal")).__name__ == "JournalStorage"
    with pytest.raises(ValueError, match="HOST:PORT"):
        open_storage("grpc://somewhere", tmp_path)
    with pytest.raises(ValueError, match="cannot be used"):
        open_storage("nothing://of/the/kind", tmp_path)


def test_unknown_sampler_raises(tmp_path):
    with pytest.raises(ValueError, match="sampler"):
        Bayes(tmp_path, "study", ABOUT, sampler="cma")
