import pytest

from hetxl.studies.forms import FORMS
from hetxl.studies.sharing import SHARED, STUDY, sizes_of


def test_miniature(studied):
    _, summary = studied("sharing")
    assert [line["label"] for line in summary["lines"]] == [SHARED, "1", "2", "4", "8"]
    parameters = [line["values"]["parameters"] for line in summary["lines"]]
    assert parameters[1:] == sorted(parameters[1:])
    assert parameters[-1] > parameters[0]


def test_sizes_go_from_a_thirty_second_of_the_features_to_all():
    assert sizes_of(FORMS["full"]) == [4, 8, 16, 32, 64, 128]
    assert sizes_of(FORMS["miniature"]) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("own", "small", "word"),
    [(2.005, 2.3, "holds here"), (2.3, 2.5, "does not hold here"), (2.005, 1.8, "does not hold")],
)
def test_the_conclusion_follows_the_numbers(lines, own, small, word):
    summary = lines({(SHARED, "shared"): 2.0, ("4", "own W′"): small, ("128", "own W′"): own})
    text = STUDY.conclusion(summary)
    assert word in text
    assert "with M = D compared with M = 4" in text
