"""Tables for the terminal, for markdown and for the page."""

from rich import box
from rich.console import Group as Renderables
from rich.table import Table as RichTable
from rich.text import Text

from hetxl.report.markup import Markup, join, tag
from hetxl.report.tables import Cell, Column, Table

COSTS = ("parameters", "train_seconds", "predict_seconds_per_1000")
"""The columns that tell what a head costs."""


def as_rich(table: Table) -> Renderables:
    """The table for a terminal: three narrow ones, so that nothing is cut at 80 characters, and the notes."""
    quality = ("precision@1", "precision@5", "calibration_error", "brier")
    parts: list[RichTable | Text] = [
        _rich_part(table, ("nll", "difference", "p"), table.title),
        _rich_part(table, quality, None),
        _rich_part(table, COSTS, None),
    ]
    parts += [Text(note, style="dim") for note in table.notes]
    return Renderables(*parts)


def as_markdown(table: Table) -> str:
    """The table in markdown, the best values bold, the notes below."""
    header = ["head", *(column.title for column in table.columns)]
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * len(table.columns)}"]
    for row in table.rows:
        cells = [_markdown_text(row.label)]
        for column in table.columns:
            cell = row.cells[column.key]
            cells.append(f"**{cell.text}**" if cell.best else cell.text)
        lines.append(f"| {' | '.join(cells)} |")
    notes = [_markdown_text(note) for note in table.notes]
    return "\n".join([*lines, "", *"\n\n".join(notes).split("\n")]).rstrip() + "\n"


def as_html(table: Table) -> Markup:
    """The table as HTML, the best values bold; it scrolls by itself where the page is narrow."""
    head = tag("tr", tag("th", "head", scope="col"), *(_heading(column) for column in table.columns))
    rows = []
    for row in table.rows:
        cells = [_html_cell(row.cells[column.key]) for column in table.columns]
        rows.append(tag("tr", tag("th", row.label, scope="row"), *cells, class_="truth" if row.truth else None))
    caption = tag("caption", table.title)
    body = tag("table", caption, tag("thead", head), tag("tbody", *rows), class_="comparison")
    notes = tag("ul", *(tag("li", note) for note in table.notes), class_="notes") if table.notes else None
    return join([scrolling(body, table.title), notes])


def scrolling(content: Markup, name: str) -> Markup:
    """Wide content in a box of its own that scrolls, by keyboard too.

    Args:
        content: what is wide.
        name: what it is, for those who do not see it.
    """
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=name)


def _heading(column: Column) -> Markup:
    return tag("th", column.title, scope="col")


def _html_cell(cell: Cell) -> Markup:
    value, _, error = cell.text.partition(" ±")
    spread = tag("span", f" ±{error}", class_="error") if error else None
    shown = tag("strong", value) if cell.best else value
    return tag("td", shown, spread, class_="worse" if cell.worse else None)


def _rich_part(table: Table, keys: tuple[str, ...], title: str | None) -> RichTable:
    part = RichTable(title=title and Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    part.add_column("head", overflow="fold", min_width=10)
    columns = [column for column in table.columns if column.key in keys]
    for column in columns:
        part.add_column(column.title, justify="right", overflow="fold", min_width=_widest(table, column))
    for row in table.rows:
        cells = [row.cells[column.key] for column in columns]
        if row.truth and all(cell.value is None for cell in cells):
            continue
        styles = ["bold" if cell.best else "red" if cell.worse else "" for cell in cells]
        shown = [Text(cell.text, style=style) for cell, style in zip(cells, styles, strict=True)]
        part.add_row(Text(row.label), *shown)  # Text: a label in brackets is no markup
    return part


def _widest(table: Table, column: Column) -> int:
    """The characters that the values of a column need: labels break over lines, numbers do not."""
    return max(8, *(len(row.cells[column.key].text) for row in table.rows))


def _markdown_text(text: str) -> str:
    """Text that markdown leaves alone, in one line."""
    plain = " ".join(text.split())
    for character in "\\`*_[]<>|":
        plain = plain.replace(character, f"\\{character}")
    return plain
