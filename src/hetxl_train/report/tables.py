"""Tables that can be rendered for a terminal, as markdown and as HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from markupsafe import Markup

from hetxl_train.formatting import MISSING, with_error
from hetxl_train.report.render import render
from hetxl_train.report.scales import thin

if TYPE_CHECKING:
    from rich.console import Group

Value = float | tuple[float, float] | str | None
"""A value of a cell: a number, a mean with its standard error, a text, or nothing."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    value: float | None = None  # the number; None for a text or nothing
    error: float | None = None  # its standard error, if any
    text: str = MISSING
    best: bool = False  # whether no other row of the group shows a better value
    worse: bool = False  # for differences, whether the value is worse than the baseline

    @property
    def short(self) -> str:
        """The text without the error."""
        return self.text.split(" ±")[0]


@dataclass(frozen=True)
class Column:
    """A column of a table; without `better`, no cell is marked as best."""

    title: str  # heading, including the unit
    digits: int = 3  # decimals of its numbers
    better: Literal["lower", "higher"] | None = None
    key: str = ""  # name in JSON and in `Table.cell`; by default the title
    part: int = 0  # in a terminal, columns of the same part share a table


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    label: str
    cells: Sequence[Cell | Value]  # one for each column
    group: str | None = None  # group of rows, such as those of a dataset; best cells are marked within a group
    reference: bool = False  # whether the row is a bound rather than a candidate, and never marked as best


@dataclass(frozen=True)
class Table:
    """A table with a column of labels, followed by the columns of cells."""

    title: str
    columns: Sequence[Column]  # without the column of labels
    rows: Sequence[Row] = ()
    note: str = ""  # notes for the reader, one per line
    head: str = ""  # heading of the column of labels

    def __post_init__(self):
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"row {row.label!r} of table {self.title!r} must have {len(self.columns)} cells, "
                    f"found {len(row.cells)}"
                )

    @property
    def notes(self) -> list[str]:
        """The lines of the note."""
        return self.note.splitlines()

    @property
    def grouped(self) -> bool:
        """Whether any row has a group."""
        return any(row.group is not None for row in self.rows)

    @cached_property
    def grid(self) -> list[list[Cell]]:
        """The cells of every row, with the best cells of each group and column marked.

        Cells that show the same text as the best one are marked too. If all show the same text, no cell is marked.
        """
        grid = [
            [_cell(value, column.digits) for value, column in zip(row.cells, self.columns, strict=True)]
            for row in self.rows
        ]
        for group in dict.fromkeys(row.group for row in self.rows):
            members = [c for row, c in zip(self.rows, grid, strict=True) if row.group == group and not row.reference]
            for index, column in enumerate(self.columns):
                shown = [cells[index] for cells in members]
                known = {cell.short: cell.value for cell in shown if cell.value is not None}
                if column.better is not None and len(known) > 1:
                    best = (min if column.better == "lower" else max)(known, key=lambda text: known[text])
                    for cells in members:
                        cells[index] = replace(cells[index], best=cells[index].short == best)
        return grid

    def cell(self, row: Row, key: str) -> Cell:
        """Return the cell of a row in the column with a key."""
        index = next(number for number, column in enumerate(self.columns) if (column.key or column.title) == key)
        return self.grid[next(number for number, other in enumerate(self.rows) if other is row)][index]


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts; the first column has the labels."""
    return Table(title, [Column(name) for name in header[1:]], [Row(row[0], row[1:]) for row in rows], head=header[0])


def as_rich(table: Table) -> "Group":
    """Return the table for a terminal, as a narrow table for each part of the columns, and its notes."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    tables: list[RichTable] = []
    for part in sorted({column.part for column in table.columns}):
        indexes = [index for index, column in enumerate(table.columns) if column.part == part]
        title = Text(table.title) if table.title and not tables else None
        rich = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        tables.append(rich)
        if table.grouped:
            rich.add_column("", no_wrap=True)
        longest = max((len(row.label) for row in table.rows), default=0)
        rich.add_column(table.head, overflow="fold", min_width=min(10, longest))
        for index in indexes:
            # Labels may wrap; numbers may not.
            widest = max((len(cells[index].text) for cells in table.grid), default=0)
            rich.add_column(table.columns[index].title, justify="right", overflow="fold", min_width=max(5, widest))
        for number, ((group, row), cells) in enumerate(zip(_groups(table), table.grid, strict=True), 1):
            shown = [cells[index] for index in indexes]
            if row.reference and all(cell.value is None for cell in shown):
                continue
            texts = [Text(cell.text, "bold" if cell.best else "red" if cell.worse else "") for cell in shown]
            last = number == len(table.rows) or table.rows[number].group != row.group
            # Wrap in Text, because rich would parse a label in brackets as markup.
            rich.add_row(*([Text(group)] if table.grouped else []), Text(row.label), *texts, end_section=last)
    return Group(*tables, *(Text(note, style="dim") for note in table.notes))


def as_markdown(table: Table, *, escape: bool = True) -> str:
    """Return the table as markdown, with the best values bold; groups have their own column, each named once.

    With `escape=False`, labels and headings may contain markdown. The caller adds the title and the notes.
    """
    clean = _escape if escape else (lambda text: text.replace("|", "\\|"))
    arrows = {"lower": " ↓", "higher": " ↑", None: ""}
    heads = [*([""] if table.grouped else []), table.head, *(c.title + arrows[c.better] for c in table.columns)]
    rules = ["---"] * (1 + table.grouped) + ["---:"] * len(table.columns)
    lines = [[clean(head) for head in heads], rules]
    for (group, row), cells in zip(_groups(table), table.grid, strict=True):
        texts = [f"**{cell.text}**" if cell.best else cell.text.replace("|", "\\|") for cell in cells]
        lines.append([*([clean(group)] if table.grouped else []), clean(row.label), *texts])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def as_html(table: Table, *, style: str = "", limit: int | None = None) -> Markup:
    """Return the table as HTML with its notes, the best values bold; on a narrow page, the table scrolls.

    A table with more than `limit` rows shows `limit` evenly spread ones, and a note says so.
    """
    shown = thin(range(len(table.rows)), limit or len(table.rows))
    groups = _groups(table)
    rows = [(*groups[index], table.grid[index]) for index in shown]
    cut = f"{len(rows)} of {len(table.rows):,} points, evenly spread." if len(rows) < len(table.rows) else ""
    return Markup(render("table.html", table=table, rows=rows, style=style, cut=cut))


def _cell(value: Cell | Value, digits: int) -> Cell:
    if isinstance(value, Cell):
        return value
    if value is None or isinstance(value, str):
        return Cell(text=MISSING if value is None else value)
    number, error = value if isinstance(value, tuple) else (value, None)
    return Cell(float(number), error, with_error(number, error, digits))


def _groups(table: Table) -> list[tuple[str, Row]]:
    """Return every row with its text in the column of groups, which names a group only at its first row."""
    before = [object(), *(row.group for row in table.rows)]
    return [(row.group or "" if row.group != last else "", row) for last, row in zip(before, table.rows, strict=False)]


def _escape(text: str) -> str:
    """Return text as one line, with the special characters of markdown escaped."""
    return re.sub(r"([\\`*_[\]<>|])", r"\\\1", " ".join(text.split()))
