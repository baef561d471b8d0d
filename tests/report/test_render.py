import io
from pathlib import Path

import pytest
from rich.console import Console

from hetxl.report import as_html, as_markdown, as_rich, compare_table, find_runs
from hetxl.report.read import Run
from support.runs import write_comparison

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
    for row in table.rows:
        for cell in row.cells.values():
            assert cell.text in text
    assert "…" not in text
    assert all(note.split()[0] in text for note in table.notes)


def test_labels_are_no_markup_in_the_terminal(awkward):
    assert "[bold]" in terminal(awkward, 120)
    assert "+0.500 worse" in terminal(awkward, 120)


def test_markdown(table, awkward):
    lines = as_markdown(table).splitlines()
    assert lines[0].startswith("| head | NLL | difference to DET | p |")
    assert all(line.count("|") == lines[0].count("|") for line in lines[: 2 + len(table.rows)])
    het_xl = next(line for line in lines if line.startswith("| HET-XL"))
    assert f"**{table.row('HET-XL').cells['nll'].text}**" in het_xl
    assert r"\<script\>\[bold\]\|x\_y" in as_markdown(awkward)
    assert as_markdown(table).endswith(f"{table.notes[-1]}\n")


def test_html(table, awkward):
    html = as_html(table)
    assert html.count("<tr") == 1 + len(table.rows)
    assert "<strong>4.2" in html
    assert 'class="worse"' in html
    assert 'scope="row"' in html
    assert "<script>" not in as_html(awkward)
    assert "&lt;script&gt;" in as_html(awkward)
