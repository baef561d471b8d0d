import pytest

from hetxl.data.dataset import InputSpec
from hetxl.studies.equal_params import DET, STUDY, WIDE, XL, matching_width, parameters_of
from hetxl.studies.forms import FORMS

SPEC = InputSpec("tokens", (16,), 8195)


def test_the_nearest_number_of_parameters():
    config = FORMS["full"].base.config("det")
    target = parameters_of(FORMS["full"].base.config("het-xl"), SPEC, 8192)
    width = matching_width(config, target, SPEC, 8192)
    sizes = {}
    for features in (width - 1, width, width + 1):
        sizes[features] = abs(parameters_of(FORMS["full"].base.config("det", features=features), SPEC, 8192) - target)
    assert min(sizes, key=sizes.get) == width
    assert width > 128


def test_miniature(studied):
    _, summary = studied("equal-params")
    parameters = [line["values"]["parameters"] for line in summary["lines"]]
    assert [line["label"] for line in summary["lines"]] == [DET, WIDE, XL]
    assert summary["widths"][0] == summary["widths"][2] == 8
    step = 8 + 1 + 2 + 20  # what one more feature adds: a row of the layer before, its norm, a column of W
    assert abs(parameters[1] - parameters[2]) <= step
    assert parameters[1] > parameters[0]


@pytest.mark.parametrize(("xl", "word"), [(1.8, "holds here"), (2.2, "does not hold here")])
def test_the_conclusion_follows_the_numbers(lines, xl, word):
    summary = lines({(DET, None): 2.01, (WIDE, None): 2.0, (XL, None): xl}, widths=[128, 132, 128])
    text = STUDY.conclusion(summary)
    assert word in text
    assert "With 132 features instead of 128" in text
