import io
from pathlib import Path

import pytest
from rich.console import Console

from hetxl_train.report import Column, Row, Table, as_html, as_markdown, as_rich, compare_table, find_runs
from hetxl_train.report.read import Run
from hetxl_train.report.tables import text_table
from support.runs import write_comparison

NLL, PRECISION = Column("NLL", 2, "lower"), Column("Prec@1", 3, "higher")
AWKWARD = "<script>[bold]|x_y"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return compare_table(find_runs(write_comparison(tmp_path_factory.mktemp("out"), steps=20, best_nll=4.05)))


@pytest.fixture
def awkward():
    result = {"label": AWKWARD, "seed": 0, "metrics": {"test": {"nll": 4.5}}}
    det = {"label": "DET", "seed": 0, "metrics": {"test": {"nll": 4.0}}}
    return compare_table([Run(Path("a"), result=result), Run(Path("b"), result=det)])


def terminal(table, width=80):
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=False)
    console.print(as_rich(table))
    return console.export_text()


def test_a_terminal_of_80_characters_shows_every_number(table):
    text = terminal(table)
    assert max(map(len, text.splitlines())) <= 80
    assert all(cell.text in text for row in table.grid for cell in row)
    assert "…" not in text
    assert all(note.split()[0] in text for note in table.notes)


def test_labels_are_no_markup_in_the_terminal(awkward):
    assert "[bold]" in terminal(awkward, 120)
    assert "+0.500 worse" in terminal(awkward, 120)


def test_markdown_is_escaped_and_marks_the_best(table, awkward):
    lines = as_markdown(table).splitlines()
    assert lines[0].startswith("| head | NLL ↓ | difference to DET | p |")
    assert all(line.count("|") == lines[0].count("|") for line in lines[: 2 + len(table.rows)])
    het_xl = next(line for line in lines if line.startswith("| HET-XL"))
    assert f"**{table.cell(table.row('HET-XL'), 'nll').text}**" in het_xl
    assert r"\<script\>\[bold\]\|x\_y" in as_markdown(awkward)


def test_html_is_escaped_and_marks_the_best(table, awkward):
    html = as_html(table)
    assert html.count("<tr") == 1 + len(table.rows)
    assert "<strong>4.2" in html
    assert 'class="worse"' in html
    assert 'scope="row"' in html
    assert "<script>" not in as_html(awkward)
    assert "&lt;script&gt;" in as_html(awkward)


def test_markdown_marks_the_best_of_each_group_as_printed():
    rows = [
        Row("a", [1.234, 0.5], "first"),
        Row("b", [(1.231, 0.02), 0.4], "first"),
        Row("c", [1.5, 0.6], "first"),
        Row("d", [9.0, None], "second"),
    ]
    text = as_markdown(Table("t", [NLL, PRECISION], rows, head="method"))
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
    assert "**" not in as_markdown(Table("t", [NLL, Column("time", 1)], rows))


def test_bars_do_not_break_a_table():
    assert "a \\| b" in as_markdown(Table("t", [NLL], [Row("a | b", [1.0])]))


def test_cells_show_missing_and_uncertain_values():
    column, row = Column("x", 2), Row("a", [None, "not finite", -1.5, (1.0, 0.25)])
    texts = [cell.text for cell in Table("t", [column] * 4, [row]).grid[0]]
    assert texts == ["–", "not finite", "−1.50", "1.00 ± 0.25"]


def test_rows_must_fit():
    with pytest.raises(ValueError, match="row 'a' of table 't' must have 1 cells, found 2"):
        Table("t", [NLL], [Row("a", [1.0, 2.0])])


def test_groups_are_named_once_in_a_terminal_and_on_a_page():
    rows = [Row("a", [1.0], "first"), Row("b", [2.0], "first"), Row("c", [3.0], "second")]
    grouped = Table("t", [NLL], rows, head="method")
    assert terminal(grouped).count("first") == 1
    assert as_html(grouped).count("first") == 1


def test_long_tables_are_thinned_with_a_note():
    table = text_table("T", ("x", "y"), [(f"row {number}", "<y>") for number in range(1000)])
    html = as_html(table, limit=40)
    assert html.count("<tr") == 1 + 40
    assert "row 0<" in html
    assert "row 999<" in html
    assert "40 of 1,000 points" in html
    assert "&lt;y&gt;" in html
