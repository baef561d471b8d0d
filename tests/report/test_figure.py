import itertools
from xml.etree import ElementTree

from hetxl.report.figure import TABLE_ROWS, DataTable, Frame, axes, data_details, drawing, figure
from hetxl.report.markup import tag
from hetxl.report.scales import scale


def test_a_drawing_says_what_it_shows():
    svg = ElementTree.fromstring(drawing("one", "A & B", 'falls from "9" to <4>', Frame()))
    assert svg.get("role") == "img"
    names = {element.get("id"): element.text for element in svg}
    assert [names[ident] for ident in svg.get("aria-labelledby").split()] == ["A & B", 'falls from "9" to <4>']
    assert svg.get("viewBox") == "0 0 400 260"


def test_axes_name_their_titles_and_ticks():
    frame = Frame()
    made = axes(frame, scale([0, 10], *frame.across), scale([0, 1], *frame.up), "steps", "NLL <nats>")
    texts = [element.text for element in ElementTree.fromstring(tag("g", made)).iter("text")]
    assert "steps" in texts
    assert "NLL <nats>" in texts
    assert {"0", "10", "0.25", "1"} <= set(texts)


def test_texts_of_ticks_do_not_touch():
    frame = Frame()
    wide = scale([0, 10], *frame.across, count=10)
    made = axes(frame, wide, scale([0, 1], *frame.up), "", "", x_format=lambda value: f"{value:.8f}")
    places = [
        float(element.get("x"))
        for element in ElementTree.fromstring(tag("g", made)).iter("text")
        if element.text and len(element.text) >= 10
    ]
    assert len(places) >= 2
    assert all(after - before > 70 for before, after in itertools.pairwise(places))


def test_a_figure_has_its_numbers_beneath():
    made = ElementTree.fromstring(figure("Title", tag("svg"), DataTable(("x", "y"), [("1", "<2>")]), note="Cut off."))
    assert made.find("figcaption").text == "Title"
    assert made.find("p").text == "Cut off."
    assert [cell.text for cell in made.find("details").iter("td")] == ["<2>"]


def test_long_tables_are_thinned_and_say_so():
    rows = [(str(place), "y") for place in range(1000)]
    made = ElementTree.fromstring(data_details("T", DataTable(("x", "y"), rows)))
    shown = [cell.text for cell in made.iter("th")][2:]
    assert len(shown) == TABLE_ROWS
    assert (shown[0], shown[-1]) == ("0", "999")
    assert f"{TABLE_ROWS} of 1,000 points" in "".join(made.itertext())
