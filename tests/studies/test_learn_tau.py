import pytest

from hetxl.studies.forms import FORMS
from hetxl.studies.learn_tau import STUDY


def test_miniature(studied):
    _, summary = studied("learn-tau")
    for line in summary["lines"]:
        learned = "learned" in line["label"]
        assert all((one != 1.0) == learned for one in line["values"]["temperature"])
    assert [line["values"]["steps"] for line in summary["lines"][-2:]] == [1, 1]


def test_all_data_and_a_short_training():
    trainings = STUDY.trainings(FORMS["full"], (0,))
    assert len(trainings) == 3 * 2 * 3 + 2
    assert trainings[-1].config.steps == FORMS["full"].base.steps // 4


@pytest.mark.parametrize(
    ("gain", "short", "word", "size"),
    [(-0.1, -0.3, "holds here", "is larger"), (0.1, 0.2, "does not hold here", "is not larger")],
)
def test_the_conclusion_follows_the_numbers(lines, gain, short, word, size):
    values = {}
    for place, head in enumerate(("DET", "HET", "HET-XL")):
        values |= {(f"{head}, τ = 1", "d"): 2.0, (f"{head}, learned τ", "d"): 2.0 + gain + 0.01 * place}
    values |= {("HET-XL, τ = 1", "d, short"): 3.0, ("HET-XL, learned τ", "d, short"): 3.0 + short}
    text = STUDY.conclusion(lines(values))
    assert word in text
    assert f"the gain {size} in the shorter training" in text
    assert f"HET-XL on {1 if gain < 0 else 0} of 1 datasets" in text
