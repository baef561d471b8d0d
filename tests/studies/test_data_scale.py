import pytest

from hetxl.studies.data_scale import STUDY
from hetxl.studies.forms import FORMS


def test_miniature(studied):
    text, summary = studied("data-scale")
    steps = {line["group"]: line["values"]["steps"] for line in summary["lines"]}
    assert steps == {"1×": 3, "2×": 6, "4×": 12}
    assert "1× is 3 steps" in text
    assert len(STUDY.trainings(FORMS["full"], (0,))) == 9


@pytest.mark.parametrize(
    ("xl", "long", "word"),
    [(1.8, 1.5, "holds here"), (2.2, 1.5, "does not hold here"), (1.8, 2.5, "does not hold here")],
)
def test_the_conclusion_follows_the_numbers(lines, xl, long, word):
    values = {}
    for scale, shift in (("1×", 0.0), ("2×", long - 2.0), ("4×", long - 2.0)):
        values |= {("DET", scale): 2.0 + shift, ("HET", scale): 1.9 + shift, ("HET-XL", scale): xl + shift}
    text = STUDY.conclusion(lines(values))
    assert word in text
    assert f"{3 if long < 2 else 0} of 3 methods" in text
