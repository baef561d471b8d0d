"""Charts: what is drawn lies where its value says, inside the plot, and says in words what it shows."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetxl_train import formatting as form
from hetxl_train.report.charts import (
    POINTS,
    Axis,
    Dot,
    Frame,
    Line,
    Point,
    Reliability,
    grouped_bars,
    histogram,
    line_chart,
    lines_over_seeds,
    pairs,
    reliability_charts,
    scatter_chart,
    styles,
)
from hetxl_train.report.statistics import Mean
from support.charts import cells, numbers, of_class, parse, texts

LOOKS = styles(["DET", "HET-XL", "<b>"])
X, Y = Axis("steps", form.count), Axis("NLL", lambda value: form.decimal(value, 2))
FRAME = Frame()


def line(label, values, seeds=1, spread=0.0):
    return Line(label, tuple(Point(x, y, y - spread, y + spread) for x, y in enumerate(values)), seeds)


def draw(lines, x=X, y=Y, **options):
    return line_chart("plot", "Title", lines, LOOKS, x, y, **options)


@given(
    values=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=30),
    spread=st.floats(0, 10),
    log=st.booleans(),
)
def test_every_point_lies_inside_the_plot(values, spread, log):
    figure = draw([line("DET", values, 3, spread)], y=Axis("y", log=log))
    for element in of_class(figure, "line") + of_class(figure, "band"):
        xs, ys = numbers(element)[::2], numbers(element)[1::2]
        assert all(FRAME.across[0] - 0.01 <= x <= FRAME.across[1] + 0.01 for x in xs)
        assert all(FRAME.up[1] - 0.01 <= y <= FRAME.up[0] + 0.01 for y in ys)


def test_lines_have_the_look_of_their_label_and_a_description():
    figure = draw([line("DET", [5, 4, 3]), line("HET-XL", [5, 3, 2])])
    assert [path.get("stroke") for path in of_class(figure, "line")] == [LOOKS["DET"].colour, LOOKS["HET-XL"].colour]
    assert "DET falls from 5.00 to 3.00 (steps 0 to 2)." in figure.panels[0].description
    assert "HET-XL falls from 5.00 to 2.00" in figure.panels[0].description
    assert [label for label, _, _ in figure.samples()] == ["DET", "HET-XL"]


def test_higher_values_are_higher_up():
    (path,) = of_class(draw([line("DET", [1, 2, 4])]), "line")
    heights = numbers(path)[1::2]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.05)


def test_equal_ratios_take_equal_room_on_a_log_axis():
    (path,) = of_class(draw([line("DET", [1, 10, 100])], y=Axis("ms", log=True)), "line")
    heights = numbers(path)[1::2]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.05)


def test_bands_only_over_several_seeds():
    assert not of_class(draw([line("DET", [1, 2, 3])]), "band")
    assert len(of_class(draw([line("DET", [1, 2, 3], seeds=3, spread=0.2)]), "band")) == 1


def test_high_start_is_cut_with_a_note():
    values = [100.0, 20.0] + [4.0 - 0.01 * step for step in range(18)]
    figure = draw([line("DET", values)], cut=True)
    assert "are cut off" in figure.note
    assert "100" not in texts(figure)
    assert "from 100.00 to 3.83" in figure.panels[0].description
    assert not draw([line("DET", [4.0, 3.5, 3.0, 2.5, 2.0])], cut=True).note


def test_levels_are_drawn_and_described_unless_far_off():
    figure = draw([line("DET", [5, 4])], levels={"true model": 3.5}, cut=True)
    assert len(of_class(figure, "reference")) == 1
    assert "true model at 3.50" in figure.panels[0].description
    figure = draw([line("DET", [5, 4])], levels={"true model": 1.0}, cut=True)
    assert not of_class(figure, "reference")
    assert figure.note == "The true model is at 1.00, beyond the plot."
    assert of_class(draw([line("DET", [5, 4])], levels={"budget": 1.0}), "reference")


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0], [0.0, 0.0]])
def test_single_points_and_flat_lines(values):
    (path,) = of_class(draw([line("DET", values)], cut=True), "line")
    assert all(0 <= value <= 400 for value in numbers(path))


def test_numbers_are_side_by_side_when_lines_share_their_x():
    assert cells(draw([line("DET", [5, 4]), line("<b>", [3, 2])])) == [("0", "5.00", "3.00"), ("1", "4.00", "2.00")]
    rows = cells(draw([line("DET", [5, 4]), line("<b>", [3])]))
    assert rows == [("DET", "0", "5.00"), ("DET", "1", "4.00"), ("<b>", "0", "3.00")]


def test_axes_have_titles_and_ticks_that_do_not_touch():
    figure = draw([line("DET", [0, 1])], Axis("x <steps>"), Axis("NLL & more"))
    assert {"x <steps>", "NLL & more", "0", "0.5", "1"} <= set(texts(figure))
    wide = Axis("x", tick=lambda value: f"{value:.8f}", ticks=[value / 10 for value in range(11)])
    figure = draw([line("DET", [0, 1])], wide)
    positions = [float(e.get("x")) for e in parse(figure).iter("text") if re.fullmatch(r"\d\.\d{8}", e.text or "")]
    assert len(positions) >= 2
    assert all(after - before > 70 for before, after in itertools.pairwise(positions))


def test_pairs_leave_out_incomplete_records():
    records = [{"step": 2, "nll": 1.0}, {"step": 1, "nll": None}, {"nll": 3.0}, {"step": 0, "nll": 5.0}, 7, "text"]
    assert pairs(records, "step", "nll") == [(0, 0, 5.0), (2, 2, 1.0)]
    assert pairs([[0.5, 0.1], [0.2, float("nan")], [1], None], 0, 1) == [(0.5, 0.5, 0.1)]


def test_seeds_at_the_same_steps_become_one_line_of_means():
    first = [(100, 1.0, 4.0), (200, 2.0, 3.0)]
    second = [(100, 3.0, 6.0), (200, 4.0, 3.5)]
    (merged,) = lines_over_seeds("HET", [(0, first), (1, second), (2, [])])
    assert merged.seeds == 2
    assert [(p.x, p.y, p.low, p.high) for p in merged.points] == [(2, 5, 4, 6), (3, 3.25, 3, 3.5)]


def test_seeds_at_other_steps_stay_lines_of_their_own():
    first = [(step, step, 1.0) for step in (10, 20, 30)]
    second = [(step, step, 2.0) for step in (15, 25, 35)]
    lines = lines_over_seeds("HET", [(0, first), (1, second)])
    assert [(line.note, line.seeds, line.points[0].y) for line in lines] == [("seed 0", 1, 1.0), ("seed 1", 1, 2.0)]
    assert lines_over_seeds("DET", [(0, [])]) == []


def test_long_lines_are_shortened_without_losing_a_spike():
    points = [(step, step, 50.0 if step == 1234 else 1.0) for step in range(10_000)]
    (short,) = lines_over_seeds("DET", [(0, points)])
    assert len(short.points) <= POINTS
    assert max(point.y for point in short.points) == 50
    assert (short.points[0].x, short.points[-1].x) == (0, 9999)


def test_scatter_points_lie_where_their_values_say():
    dots = [Dot("DET", 1e6, 4.3, 0.01), Dot("HET-XL", 1e8, 4.2), Dot("<b>", 1e7, 4.25)]
    figure = scatter_chart("s", "T", dots, LOOKS, Axis("parameters", form.short_count, log=True), Y)
    assert len(of_class(figure, "whisker")) == 1
    assert "DET: 1.00M, 4.30" in [element.text for element in parse(figure).iter("title")]
    positions = [re.findall(r"[\d.]+", mark.get("transform")) for mark in of_class(figure, "marker")]
    across = [float(position[0]) for position in positions]
    assert FRAME.across[0] < across[0] < across[2] < across[1] < FRAME.across[1]
    assert across[2] == pytest.approx((across[0] + across[1]) / 2, abs=0.05)  # ratios of ten, equal room
    assert "<b>: 10.00M parameters, NLL 4.25." in figure.panels[0].description


def test_bars_are_as_high_as_their_values():
    values = {"DET": [Mean(0.6, 0.01, 3), Mean(0.3, None, 1)], "<b>": [Mean(0.45, None, 1), None]}
    figure = grouped_bars("b", "T", ("frequent", "rare"), values, LOOKS, "precision@1", "classes")
    bars = {bar.find("title").text: float(bar.get("height")) for bar in parse(figure).iter("rect")}
    assert list(bars) == ["DET, frequent: 60.0% ± 1.0%", "<b>, frequent: 45.0%", "DET, rare: 30.0%"]
    heights = list(bars.values())
    assert heights[0] == pytest.approx(2 * heights[2], rel=1e-3)
    assert heights[1] == pytest.approx(1.5 * heights[2], rel=1e-3)
    assert len(of_class(figure, "spread")) == 1
    assert "<b>: 45.0% frequent and – rare." in figure.panels[0].description


def test_bars_of_many_labels_stay_inside_the_plot():
    labels = [f"head {number}" for number in range(12)]
    values = {label: [Mean(0.5, None, 1)] * 3 for label in labels}
    figure = grouped_bars("b", "T", ("a", "b", "c"), values, styles(labels), "y", "x")
    boxes = sorted((float(bar.get("x")), float(bar.get("width"))) for bar in parse(figure).iter("rect"))
    assert boxes[0][0] >= FRAME.left
    assert all(a + width <= b + 0.02 for (a, width), (b, _) in itertools.pairwise(boxes))


def test_a_histogram_names_bins_that_fit():
    bins = [(f"{number:,}", f"{number}", float(number)) for number in range(1000, 1040)]
    figure = histogram("h", "T", bins, "examples", "classes", "40 bins.")
    assert len(of_class(figure, "bar")) == 40
    positions = [float(text.get("x")) for text in parse(figure).iter("text") if text.get("y") == "233"]
    assert 2 <= len(positions) < 12
    assert all(b - a > 36 for a, b in itertools.pairwise(positions))
    assert of_class(histogram("h", "T", [("1", "1", 0.0)], "x", "y", ""), "bar")[0].get("height") == "0"


@pytest.mark.parametrize(("sure", "end"), [(0.08, "10%"), (0.35, "40%"), (0.9, "100%"), (1.0, "100%")])
def test_reliability_diagrams_end_where_the_heads_do(sure, end):
    items = [Reliability("DET", [(0, [(sure, 0.05, 10)])]), Reliability("<b>", [(0, [(0.01, 0.01, 10)])])]
    figure = reliability_charts("r", "Reliability", items, LOOKS)
    shown = [text.text for index in (0, 1) for text in parse(figure, index).iter("text")]
    assert shown.count(end) == 4


def test_reliability_diagrams_have_a_line_for_each_seed():
    over = Reliability("DET", [(0, [(0.5, 0.4, 100), (0.9, 0.7, 300)]), (1, [(0.5, 0.45, 100)])], 0.12)
    under = Reliability("<b>", [(None, [(0.5, 0.6, 10)])])
    figure = reliability_charts("r", "Reliability", [over, under], LOOKS)
    first, second = figure.panels
    assert first.description == "DET is on average 15.0% more sure than right; its calibration error is 12.0%."
    assert "less sure than right." in second.description
    assert first.ident != second.ident
    assert len(of_class(figure, "line")) == 2
    assert len(figure.numbers.rows) == 4
