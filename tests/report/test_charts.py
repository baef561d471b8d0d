import re
from xml.etree import ElementTree

import pytest

from hetxl.report import format as form
from hetxl.report.charts import Axis, Dot, line_chart, scatter_chart
from hetxl.report.lines import Line, Point
from hetxl.report.palette import styles

LOOKS = styles(["DET", "HET-XL", "<b>"])
X, Y = Axis("steps", form.count), Axis("NLL", lambda value: form.decimal(value, 2))


def line(label, values, seeds=1, spread=0.0):
    return Line(label, tuple(Point(x, y, y - spread, y + spread) for x, y in enumerate(values)), seeds)


def draw(lines, **options):
    return ElementTree.fromstring(line_chart("plot", "Title", lines, LOOKS, X, Y, **options))


def of_class(figure, name):
    return [element for element in figure.iter() if name in (element.get("class") or "").split()]


def numbers(element):
    return [float(value) for value in re.findall(r"-?\d+\.?\d*", element.get("d"))]


def test_lines_are_drawn_in_their_look_and_told_in_words():
    figure = draw([line("DET", [5, 4, 3]), line("HET-XL", [5, 3, 2])])
    drawn = of_class(figure, "line")
    assert [path.get("stroke") for path in drawn] == [LOOKS["DET"].colour, LOOKS["HET-XL"].colour]
    described = next(figure.iter("desc")).text
    assert "DET falls from 5.00 to 3.00 (steps 0 to 2)." in described
    assert "HET-XL falls from 5.00 to 2.00" in described


def test_higher_values_are_higher_up():
    (path,) = of_class(draw([line("DET", [1, 2, 4])]), "line")
    heights = numbers(path)[1::2]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.05)


def test_bands_only_over_several_seeds():
    assert not of_class(draw([line("DET", [1, 2, 3])]), "band")
    figure = draw([line("DET", [1, 2, 3], seeds=3, spread=0.2)])
    assert len(of_class(figure, "band")) == 1


def test_a_high_start_is_cut_and_said_to_be():
    values = [100.0, 20.0] + [4.0 - 0.01 * place for place in range(18)]
    figure = draw([line("DET", values)], cut=True)
    assert "are cut off" in figure.find("p").text
    assert "100" not in [text.text for text in figure.iter("text")]
    assert "from 100.00 to 3.83" in next(figure.iter("desc")).text
    assert figure.find("p") is not None
    assert draw([line("DET", [4.0, 3.5, 3.0, 2.5, 2.0])], cut=True).find("p") is None


def test_a_reference_is_drawn_and_told():
    figure = draw([line("DET", [5, 4])], reference=("true model", 3.5))
    assert len(of_class(figure, "reference")) == 1
    assert "true model at 3.50" in next(figure.iter("desc")).text


def test_a_reference_far_off_does_not_squeeze_the_lines():
    figure = draw([line("DET", [5, 4])], reference=("true model", 1.0))
    assert not of_class(figure, "reference")
    assert figure.find("p").text == "The true model is at 1.00, beyond the plot."


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0], [0.0, 0.0]])
def test_single_points_and_flat_lines(values):
    (path,) = of_class(draw([line("DET", values)], cut=True), "line")
    assert all(0 <= value <= 400 for value in numbers(path))


def test_numbers_side_by_side_when_the_places_are_shared():
    cells = [cell.text for cell in draw([line("DET", [5, 4]), line("<b>", [3, 2])]).iter("td")]
    assert cells == ["5.00", "3.00", "4.00", "2.00"]
    cells = [cell.text for cell in draw([line("DET", [5, 4]), line("<b>", [3])]).iter("td")]
    assert cells == ["0", "5.00", "1", "4.00", "0", "3.00"]


def test_scatter_points_lie_where_their_values_say():
    dots = [Dot("DET", 1e6, 4.3, 0.01), Dot("HET-XL", 1e8, 4.2), Dot("<b>", 1e7, 4.25)]
    x = Axis("parameters", form.short_count, log=True)
    figure = ElementTree.fromstring(scatter_chart("s", "T", dots, LOOKS, x, Y))
    assert len(of_class(figure, "whisker")) == 1
    titles = [element.text for element in figure.iter("title")]
    assert "DET: 1.00M, 4.30" in titles
    circle = next(element for element in figure.iter("circle") if float(element.get("r")) == 6)
    left, right = 52, 382
    assert (left + right) / 2 < float(circle.get("cx")) < right
    assert "<b>: 10.00M parameters, NLL 4.25." in next(figure.iter("desc")).text
