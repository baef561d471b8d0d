import pytest

from hetxl.report.markup import Markup, coordinate, escape, join, tag


def test_plain_text_is_escaped_and_markup_is_not():
    assert tag("p", "<b>", Markup("<i></i>")) == "<p>&lt;b&gt;<i></i></p>"
    assert escape("\"'&") == "&quot;&#x27;&amp;"


def test_attributes_are_escaped_so_that_none_can_end_early():
    assert tag("p", title='" onclick="x') == '<p title="&quot; onclick=&quot;x"></p>'


def test_names_of_attributes():
    made = tag("svg", class_="plot", aria_hidden="true", viewbox="0 0 1 1", id=None, hidden=True, x=0)
    assert made == '<svg class="plot" aria-hidden="true" viewBox="0 0 1 1" hidden x="0"></svg>'


def test_elements_without_content_have_no_end():
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_joining_escapes_the_parts_and_what_is_between():
    assert join(["<", Markup("<br>"), None, 3], " & ") == "&lt; &amp; <br> &amp;  &amp; 3"


def test_characters_that_cannot_be_written_are_replaced():
    text = escape("a\x00b\ud800c\td\n")
    assert text == "a�b�c\td\n"
    text.encode("utf-8")


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1.0, "1"), (1.256, "1.26"), (-0.5, "-0.5"), (100.0, "100")])
def test_coordinates_are_short(value, text):
    assert coordinate(value) == text
