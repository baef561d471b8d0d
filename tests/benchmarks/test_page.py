"""benchmarks/_page.py: what puts measurements into a page."""

import pytest


@pytest.fixture(scope="module")
def page(load):
    return load("_page")


def test_replace_between_keeps_the_rest(page):
    start, end = page.markers("speed.py")
    before = f"before\n{start}\nold\n{end}\nafter\n"
    once = page.replace_between(before, "new", "speed.py")
    assert once == f"before\n{start}\n\nnew\n\n{end}\nafter\n"
    assert page.replace_between(once, "new", "speed.py") == once


@pytest.mark.parametrize("script", ["speed.py", "other.py"])
def test_replace_between_refuses_a_page_without_its_markers(page, script):
    start, end = page.markers("speed.py")
    text = f"{start}{end}{end}" if script == "speed.py" else f"{start}{end}"
    with pytest.raises(SystemExit, match="markers"):
        page.replace_between(text, "new", script)


def test_markdown_table_aligns_words_left_and_numbers_right(page):
    table = page.markdown_table(["name", "ms"], [["a", "1.5"], ["b", "20"]])
    assert table == "| name | ms |\n| --- | ---: |\n| a | 1.5 |\n| b | 20 |"


def test_panels_are_written_the_same_each_time(page, tmp_path):
    for name in ("a.svg", "b.svg"):
        with page.panels(tmp_path / "img" / name, 2) as axes:
            axes[0].plot([1, 2], [3, 4])
    first, second = ((tmp_path / "img" / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    assert first.startswith("<?xml")
