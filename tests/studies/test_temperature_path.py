import pytest

from hetxl.studies.cache import Cache
from hetxl.studies.forms import FORMS
from hetxl.studies.study import Lab
from hetxl.studies.temperature_path import FIXED, MOVING, STUDY, fixed_training, learned_line

FORM = FORMS["miniature"]


def test_miniature(studied):
    _, summary = studied("tau-dynamics")
    moving, fixed = (line["values"]["temperature"] for line in summary["lines"])
    assert fixed == pytest.approx(moving, abs=1e-5)
    for seed, temperature in zip(("0", "1"), moving, strict=True):
        step, last = summary["paths"][seed][-1]
        assert step == FORM.base.steps
        assert last == pytest.approx(temperature, abs=1e-6)


def test_each_seed_is_fixed_where_it_ended(studied):
    studied("tau-dynamics")
    lab = Lab(FORM, (0, 1), Cache(studied.cache))
    for seed in lab.seeds:
        end = lab.cache.result(learned_line(FORM).training(seed))["temperature"]
        config = fixed_training(lab, seed).config
        assert float(config.temperature) == pytest.approx(end, abs=1e-5)
        assert config.seed == seed


def test_of_a_training_that_diverged_there_is_no_end(tmp_path):
    lab = Lab(FORM, (0,), Cache(tmp_path))
    place = lab.cache.place(learned_line(FORM).training(0))
    place.mkdir()
    (place / "diverged.json").write_text("{}")
    assert fixed_training(lab, 0).config.temperature == "1.0"


@pytest.mark.parametrize(("nll", "word"), [(2.001, "holds here"), (2.5, "does not hold here")])
def test_the_conclusion_follows_the_numbers(lines, nll, word):
    paths = {"0": [[1, 1.0], [2, 0.5], [3, 0.8]], "1": [[1, 1.0], [3, 0.9]]}
    text = STUDY.conclusion(lines({(MOVING, None): 2.0, (FIXED, None): nll}, paths=paths))
    assert word in text
    assert "ends at 0.800 to 0.900; in 1 of 2 trainings it goes beyond both" in text
