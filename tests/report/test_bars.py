import itertools
from xml.etree import ElementTree

import pytest

from hetxl.report.bars import Reliability, grouped_bars, histogram, reliability_charts
from hetxl.report.palette import styles
from hetxl.report.statistics import Mean

LOOKS = styles(["DET", "<b>"])


def test_bars_are_as_high_as_their_values():
    values = {"DET": [Mean(0.6, 0.01, 3), Mean(0.3, None, 1)], "<b>": [Mean(0.45, None, 1), None]}
    figure = ElementTree.fromstring(
        grouped_bars("b", "T", ("frequent", "rare"), values, LOOKS, "precision@1", "classes")
    )
    bars = {bar.find("title").text: float(bar.get("height")) for bar in figure.iter("rect")}
    assert list(bars) == ["DET, frequent: 60.0% ± 1.0%", "<b>, frequent: 45.0%", "DET, rare: 30.0%"]
    heights = list(bars.values())
    assert heights[0] == pytest.approx(2 * heights[2], rel=1e-3)
    assert heights[1] == pytest.approx(1.5 * heights[2], rel=1e-3)
    assert sum(element.get("class") == "spread" for element in figure.iter("path")) == 1
    assert "<b>: 45.0% frequent and – rare." in next(figure.iter("desc")).text


def test_bars_of_many_labels_stay_inside_the_plot():
    labels = [f"head {number}" for number in range(12)]
    values = {label: [Mean(0.5, None, 1)] * 3 for label in labels}
    figure = ElementTree.fromstring(grouped_bars("b", "T", ("a", "b", "c"), values, styles(labels), "y", "x"))
    boxes = sorted((float(bar.get("x")), float(bar.get("width"))) for bar in figure.iter("rect"))
    assert boxes[0][0] >= 52
    assert all(a + width <= b + 0.02 for (a, width), (b, _) in itertools.pairwise(boxes))


def test_a_histogram_names_bins_that_fit():
    bins = [(f"{number:,}", f"{number}", float(number)) for number in range(1000, 1040)]
    figure = ElementTree.fromstring(histogram("h", "T", bins, "examples", "classes", "40 bins."))
    assert len(list(figure.iter("rect"))) == 40
    names = [
        text for text in figure.iter("text") if text.text in {short for short, _, _ in bins} and text.get("y") == "233"
    ]
    places = [float(text.get("x")) for text in names]
    assert 2 <= len(names) < 12
    assert all(b - a > 36 for a, b in itertools.pairwise(places))
    assert next(figure.iter("desc")).text == "40 bins."


def test_an_empty_histogram_is_flat():
    figure = ElementTree.fromstring(histogram("h", "T", [("1", "1", 0.0)], "x", "y", ""))
    assert next(figure.iter("rect")).get("height") == "0"


@pytest.mark.parametrize(("sure", "end"), [(0.08, "10%"), (0.35, "40%"), (0.9, "100%"), (1.0, "100%")])
def test_reliability_diagrams_end_where_the_heads_do(sure, end):
    items = [Reliability("DET", [(0, [(sure, 0.05, 10)])]), Reliability("<b>", [(0, [(0.01, 0.01, 10)])])]
    figure = ElementTree.fromstring(reliability_charts("r", "Reliability", items, LOOKS))
    assert [text.text for text in figure.iter("text")].count(end) == 4


def test_reliability_diagrams():
    over = Reliability("DET", [(0, [(0.5, 0.4, 100), (0.9, 0.7, 300)]), (1, [(0.5, 0.45, 100)])], 0.12)
    under = Reliability("<b>", [(None, [(0.5, 0.6, 10)])])
    figure = ElementTree.fromstring(reliability_charts("r", "Reliability", [over, under], LOOKS))
    first, second = (element for element in figure.iter("svg") if element.get("role") == "img")
    assert "DET is on average 15.0% more sure than right; its calibration error is 12.0%." in first.find("desc").text
    assert "less sure than right." in second.find("desc").text
    assert first.get("id") != second.get("id")
    lines = [element for element in first.iter("path") if "thin" in (element.get("class") or "")]
    assert len(lines) == 2
    assert len(list(figure.iter("tr"))) == 1 + 4
