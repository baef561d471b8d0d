"""Tables of the studies: ours and the paper's have one form, and become markdown or lines of a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetxl.report.format import MISSING, decimal, with_error
from hetxl.report.statistics import mean

Cell = float | tuple[float, float] | str | None
"""A number, a mean with its error, a text, or nothing."""


@dataclass(frozen=True)
class Column:
    """What a column of numbers is.

    Attributes:
        name: its heading.
        digits: decimals.
        better: "lower" or "higher"; None where neither is.
    """

    name: str
    digits: int = 3
    better: str | None = None


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        name: what it is of.
        cells: one for each column.
        group: what several lines belong to, such as a dataset; None for no group.
    """

    name: str
    cells: Sequence[Cell]
    group: str | None = None


@dataclass(frozen=True)
class Table:
    """Numbers with their names.

    Attributes:
        title: of the table.
        columns: of its cells; the names of the rows come before them.
        rows: from the top down.
        note: what is good to know; empty for nothing.
        head: heading of the column of names.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row] = field(default_factory=tuple)
    note: str = ""
    head: str = ""

    def __post_init__(self):
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(
                    f"row {row.name!r} of table {self.title!r} must have {len(self.columns)} cells, "
                    f"found {len(row.cells)}"
                )

    def value(self, name: str, column: str, group: str | None = None) -> float:
        """The number in a cell, without its error.

        Args:
            name: of the row.
            column: its name.
            group: of the row.
        """
        places = [place for place, one in enumerate(self.columns) if one.name == column]
        rows = [row for row in self.rows if row.name == name and row.group == group]
        if not places or not rows:
            raise ValueError(f"table {self.title!r} has no cell for {name!r} (group {group!r}) and {column!r}")
        cell = rows[0].cells[places[0]]
        number = cell[0] if isinstance(cell, tuple) else cell
        if not isinstance(number, int | float):
            raise ValueError(f"table {self.title!r} has no number for {name!r} and {column!r}, found {cell!r}")
        return float(number)


def over(values: Sequence[float] | None, factor: float = 1.0) -> Cell:
    """The cell of values over seeds: mean and standard error; the value alone of one seed, nothing of none."""
    if not values:
        return None
    found = mean([factor * value for value in values])
    return found.value if found.error is None else (found.value, found.error)


def cell_text(cell: Cell, digits: int) -> str:
    """A cell as a reader sees it."""
    if cell is None:
        return MISSING
    if isinstance(cell, str):
        return cell
    return with_error(*cell, digits) if isinstance(cell, tuple) else decimal(cell, digits)


def markdown(table: Table) -> str:
    """The table in markdown; a group stands in a column of its own, once, and the best mean of each group is bold."""
    grouped = any(row.group is not None for row in table.rows)
    heads = [*([""] if grouped else []), table.head, *(_heading(column) for column in table.columns)]
    lines = [_line(heads), _line([*["---"] * (1 + grouped), *["---:"] * len(table.columns)])]
    best = _best(table)
    before: str | None = None
    for number, row in enumerate(table.rows):
        texts = [cell_text(cell, column.digits) for cell, column in zip(row.cells, table.columns, strict=True)]
        texts = [f"**{text}**" if (number, place) in best else text for place, text in enumerate(texts)]
        group = [row.group or "" if row.group != before or number == 0 else ""] if grouped else []
        before = row.group
        lines.append(_line([*group, row.name, *texts]))
    return "\n".join(lines) + "\n"


def _heading(column: Column) -> str:
    arrow = {"lower": " ↓", "higher": " ↑", None: ""}[column.better]
    return column.name + arrow


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _best(table: Table) -> set[tuple[int, int]]:
    """Places of the best means, as printed: of every column that has a better, in every group of two rows or more."""
    found: set[tuple[int, int]] = set()
    for group in dict.fromkeys(row.group for row in table.rows):
        members = [number for number, row in enumerate(table.rows) if row.group == group]
        for place, column in enumerate(table.columns):
            numbers = {}
            for number in members:
                cell = table.rows[number].cells[place]
                value = cell[0] if isinstance(cell, tuple) else cell
                if isinstance(value, int | float):
                    numbers[number] = round(value, column.digits)
            if column.better is None or len(numbers) < 2:
                continue
            target = min(numbers.values()) if column.better == "lower" else max(numbers.values())
            if len(set(numbers.values())) > 1:
                found |= {(number, place) for number, value in numbers.items() if value == target}
    return found
