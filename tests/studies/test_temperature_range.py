import pytest

from hetxl.studies.forms import FORMS
from hetxl.studies.paper import paper_table
from hetxl.studies.temperature_range import PAPER, RANGES, SETTINGS, STARTS, STUDY


def test_the_settings_are_the_papers():
    for label, settings in (("tab:tau_start_point", STARTS), ("tab:tau_range", RANGES)):
        assert [one.label for one in settings] == [row.name for row in paper_table(label).rows]
    assert len(SETTINGS) == 8


def test_miniature(studied):
    text, summary = studied("tau-range")
    assert [line["label"] for line in summary["lines"]] == [one.label for one in SETTINGS]
    ends = [line["values"]["temperature"][0] for line in summary["lines"]]
    for one, end in zip(SETTINGS, ends, strict=True):
        assert abs(end - one.init) < 0.2  # three steps do not go far
    assert "The range of τ" in text


def test_bounds_are_options_of_the_training():
    lines = {line.label: line.options for line in STUDY.lines(FORMS["full"])}
    narrow = lines["2.525 in 0.05 … 3"]
    assert (narrow["temperature_low"], narrow["temperature_high"], narrow["temperature_init"]) == (0.05, 3.0, 2.525)


@pytest.mark.parametrize(("other", "word"), [(2.005, "holds here"), (2.3, "does not hold here")])
def test_the_conclusion_follows_the_numbers(lines, other, word):
    summary = lines({(one.label, None): 2.0 if one == PAPER else other for one in STARTS})
    text = STUDY.conclusion(summary)
    assert word in text
    assert "Over 4 settings" in text
