import pytest

from hetxl.studies.forms import FORMS
from hetxl.studies.model_scale import STUDY, widened


def test_miniature(studied):
    _, summary = studied("model-scale")
    parameters = [line["values"]["parameters"] for line in summary["lines"]]
    assert parameters[2] > 1.5 * parameters[0]
    assert parameters[3] > 1.5 * parameters[1]


def test_twice_the_width():
    config = FORMS["full"].base.config("det")
    assert widened(config, 2) == {"width": 1024, "features": 256}
    wide = STUDY.trainings(FORMS["full"], (0,))[-1].config
    assert (wide.width, wide.features, wide.temperature) == (1024, 256, "learned")


@pytest.mark.parametrize(("xl", "word"), [(1.8, "holds here"), (2.2, "does not hold here")])
def test_the_conclusion_follows_the_numbers(lines, xl, word):
    values = {
        ("DET", "1× width"): 2.0,
        ("HET-XL", "1× width"): xl,
        ("DET", "2× width"): 1.9,
        ("HET-XL", "2× width"): xl,
    }
    assert word in STUDY.conclusion(lines(values))
