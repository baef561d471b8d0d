import pytest

from hetxl.studies.tables import Column, Row, Table, cell_text, markdown, over

NLL, PRECISION = Column("NLL", 2, "lower"), Column("Prec@1", 3, "higher")


def test_markdown_marks_the_best_of_each_group_as_printed():
    rows = [
        Row("a", [1.234, 0.5], "first"),
        Row("b", [(1.231, 0.02), 0.4], "first"),
        Row("c", [1.5, 0.6], "first"),
        Row("d", [9.0, None], "second"),
    ]
    text = markdown(Table("t", [NLL, PRECISION], rows, head="method"))
    lines = text.splitlines()
    assert lines[0] == "|  | method | NLL ↓ | Prec@1 ↑ |"
    assert lines[1] == "| --- | --- | ---: | ---: |"
    # 1.234 and 1.231 are both 1.23: both are bold. A group of one has no best.
    assert lines[2] == "| first | a | **1.23** | 0.500 |"
    assert lines[3] == "|  | b | **1.23 ± 0.02** | 0.400 |"
    assert lines[4] == "|  | c | 1.50 | **0.600** |"
    assert lines[5] == "| second | d | 9.00 | – |"


def test_nothing_is_best_where_all_are_the_same_or_nothing_is_better():
    rows = [Row("a", [1.0, 3.0]), Row("b", [1.0, 4.0])]
    assert "**" not in markdown(Table("t", [NLL, Column("time", 1)], rows))


def test_bars_do_not_break_a_table():
    assert "a \\| b" in markdown(Table("t", [NLL], [Row("a | b", [1.0])]))


def test_cells():
    assert over([]) is None
    assert over([2.0], 100) == 200.0
    assert over([1.0, 3.0]) == (2.0, 1.0)
    assert cell_text(None, 2) == "–"
    assert cell_text("not finite", 2) == "not finite"
    assert cell_text(-1.5, 1) == "−1.5"
    assert cell_text((1.0, 0.25), 2) == "1.00 ± 0.25"


def test_values_by_name():
    table = Table("t", [NLL], [Row("a", [(1.0, 0.1)], "g"), Row("b", ["none"])])
    assert table.value("a", "NLL", "g") == 1.0
    with pytest.raises(ValueError, match="no cell for 'a'"):
        table.value("a", "NLL")
    with pytest.raises(ValueError, match=r"no cell for .* 'time'"):
        table.value("a", "time", "g")
    with pytest.raises(ValueError, match=r"no number for 'b'.*found 'none'"):
        table.value("b", "NLL")


def test_rows_must_fit():
    with pytest.raises(ValueError, match="row 'a' of table 't' must have 1 cells, found 2"):
        Table("t", [NLL], [Row("a", [1.0, 2.0])])
