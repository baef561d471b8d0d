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
    ("gain", "short", "ahead", "helps", "part", "size"),
    [
        (-0.1, -0.3, 0.01, "holds here", "holds here", "the gain is larger in the shorter training"),
        (-0.1, -0.05, -0.01, "holds here", "does not hold here", "the gain is not larger in the shorter training"),
        (0.1, 0.2, 0.01, "does not hold here", "holds here", "no gain in either"),
    ],
)
def test_the_conclusion_follows_the_numbers(lines, gain, short, ahead, helps, part, size):
    values = {}
    for place, head in enumerate(("DET", "HET", "HET-XL")):
        values |= {(f"{head}, τ = 1", "d"): 2.0, (f"{head}, learned τ", "d"): 2.0 + gain - ahead * place}
    values |= {("HET-XL, τ = 1", "d, short"): 3.0, ("HET-XL, learned τ", "d, short"): 3.0 + short}
    text = STUDY.conclusion(lines(values))
    assert f"that learning τ helps all methods, {helps}." in text
    assert f"that learning τ explains only part of its gains, {part}." in text
    assert f"compared with DET's is {'lower' if ahead > 0 else 'higher'} by 0.020" in text
    assert size in text
    assert f"HET-XL on {1 if gain < 0 else 0} of 1 datasets" in text
