"""benchmarks/_report.py: bars, verdicts and rows of the table, and the page they go into."""

import pytest


@pytest.fixture(scope="module")
def report(load):
    return load("_report")


@pytest.mark.parametrize(("measured", "verdict"), [(9.9, "fail"), (10, "pass"), (13.9, "pass"), (14, "stretch")])
def test_speed_up_passes_above_its_bar(report, measured, verdict):
    assert report.Bar(10, 14, at_least=True).verdict(measured) == verdict


@pytest.mark.parametrize(("measured", "verdict"), [(401, "fail"), (400, "pass"), (201, "pass"), (-3, "stretch")])
def test_cost_passes_below_its_bar(report, measured, verdict):
    assert report.Bar(400, 200, unit="MB").verdict(measured) == verdict


@pytest.mark.parametrize("at_least", [True, False])
def test_bar_fails_on_nan(report, at_least):
    assert report.Bar(1, at_least=at_least).verdict(float("nan")) == "fail"


def test_bar_without_a_stretch_gives_pass(report):
    assert report.Bar(1.2).verdict(0.1) == "pass"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (14.26, "×", "14.3×"),
        (1.05, "×", "1.05×"),
        (1234.5, "×", "1,234×"),
        (1234.5, "MB", "1,234 MB"),
        (0.9941, "%", "99.4 %"),
        (2e-4, "", "0.0002"),
    ],
)
def test_amounts_have_three_digits(report, value, unit, text):
    assert report.amount(value, unit) == text


def test_a_row_fills_the_header(report):
    row = report.Row("loss", 12.0, report.Bar(10, 14, at_least=True), "1 s against 12 s")
    assert row.cells() == ["loss", "1 s against 12 s", "12×", "≥ 10×", "≥ 14×", "pass"]
    assert len(row.cells()) == len(report.HEADER)


def test_missed_finds_the_failures(report):
    good, bad = (report.Row(name, value, report.Bar(1.2), "") for name, value in (("good", 1.1), ("bad", 1.3)))
    assert report.missed([good, bad]) == [bad]


def test_replace_between_keeps_the_rest(report):
    start, end = report.markers("speed.py")
    before = f"before\n{start}\nold\n{end}\nafter\n"
    once = report.replace_between(before, "new", "speed.py")
    assert once == f"before\n{start}\n\nnew\n\n{end}\nafter\n"
    assert report.replace_between(once, "new", "speed.py") == once


@pytest.mark.parametrize("script", ["speed.py", "other.py"])
def test_replace_between_refuses_a_page_without_its_markers(report, script):
    start, end = report.markers("speed.py")
    text = f"{start}{end}{end}" if script == "speed.py" else f"{start}{end}"
    with pytest.raises(SystemExit, match="markers"):
        report.replace_between(text, "new", script)


def test_markdown_table_aligns_words_left_and_numbers_right(report):
    table = report.markdown_table(["name", "ms"], [["a", "1.5"], ["b", "20"]])
    assert table == "| name | ms |\n| --- | ---: |\n| a | 1.5 |\n| b | 20 |"


def test_panels_share_their_scale_and_are_written_the_same_each_time(report, tmp_path):
    panels = {"B = 8": {"DET": [3.0, 4.0], "hetxl": [5.0, None]}, "B = 64": {"DET": [30.0, 40.0]}}
    for name in ("a.svg", "b.svg"):
        report.plot_panels(tmp_path / "img" / name, panels, [1, 16], "seconds")
    first, second = ((tmp_path / "img" / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    assert first.count('class="row-heading"') == 2
    assert first.count(">10</text>") == 2
