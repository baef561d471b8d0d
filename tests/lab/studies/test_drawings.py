import math
import re
from xml.etree import ElementTree

import pytest

from hetxl_lab.studies.drawings import Range, RangeRow, cloud_chart, range_chart, write_svg
from hetxl_train.report.charts import Axis, Line, Point, line_chart, styles
from support.charts import cells, numbers, of_class, parse, texts

LOOKS = styles(["DET", "HET-XL", "<b>"])
X = Axis("x")


def line(label, values):
    return Line(label, tuple(Point(x, y, y, y) for x, y in enumerate(values)))


def test_error_bars_are_symmetric_and_inside():
    rows = [
        RangeRow("data", heading=True),
        RangeRow("a", [Range("DET", -0.5, 0.25)]),
        RangeRow("b", [Range("DET", 0.3), Range("HET-XL", 0.1, 0.2)]),
    ]
    figure = range_chart("r", "T", rows, LOOKS, Axis("difference"), levels=[0.0], legend=True)
    frame = figure.panels[0].frame
    whiskers = [numbers(path)[:4] for path in of_class(figure, "whisker")]
    assert len(whiskers) == 2
    centre = float(re.findall(r"[\d.]+", of_class(figure, "marker")[0].get("transform"))[0])
    assert centre == pytest.approx((whiskers[0][0] + whiskers[0][2]) / 2, abs=0.05)
    assert all(frame.across[0] <= x <= frame.across[1] for ends in whiskers for x in ends[::2])
    assert {"data", "a", "b", "difference"} <= set(texts(figure))
    assert [label for label, _ in figure.legend] == ["DET", "HET-XL"]
    assert ("a", "DET", "−0.5 ± 0.25") in cells(figure)


def test_horizontal_bars_start_at_zero():
    rows = [RangeRow("a", [Range("DET", 50.0, 5.0)]), RangeRow("b", [Range("HET-XL", -10.0)])]
    figure = range_chart("r", "T", rows, LOOKS, Axis("%"), bars=True)
    first, second = ((float(r.get("x")), float(r.get("width"))) for r in parse(figure).iter("rect"))
    assert second[0] + second[1] == pytest.approx(first[0], abs=0.02)
    assert first[1] == pytest.approx(5 * second[1], abs=0.05)


def test_a_cloud_has_as_many_dots_as_points():
    points = [(math.sin(i), math.cos(i)) for i in range(500)]
    figure = cloud_chart("c", "T", points, LOOKS["DET"], Axis("x", low=-1, high=1), Axis("y", low=-1, high=1))
    assert of_class(figure, "cloud")[0].get("d").count("M") == 500


def test_a_file_stands_alone_and_is_reproducible(tmp_path):
    other = line_chart("other", "T", [line("DET", [1])], LOOKS, X, X)
    figures = [line_chart("plot", "T", [line("DET", [1, 2]), line("<b>", [2, 3])], LOOKS, X, X), other]
    path = write_svg(figures, tmp_path / "new" / "a.svg")
    root = ElementTree.fromstring(path.read_text())
    assert "prefers-color-scheme: dark" in path.read_text()
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert shown[:2] == ["DET", "<b>"]  # one legend for both panels
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == 2
    assert path.read_bytes() == write_svg(figures, tmp_path / "b.svg").read_bytes()
