"""The paper's figures, as data: `paper.json` in this directory has every value with its table, row and column.

This module and its imports do not need torch, training or another study, so any part of the package can use it.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from hetxl_train.report.tables import Column, Row, Table, Value

FILE = "paper.json"


@lru_cache(maxsize=1)
def figures() -> Mapping[str, Any]:
    """Return the whole file: source, settings, complexity and tables."""
    text = resources.files("hetxl_lab.studies").joinpath(FILE).read_text(encoding="utf-8")
    return json.loads(text)


def labels() -> list[str]:
    """Return the labels of all tables, as in the paper's source."""
    return list(figures()["tables"])


def paper_table(label: str) -> Table:
    """Return a table of the paper by its label in the paper's source, such as "tab:results"."""
    table = figures()["tables"].get(label)
    if table is None:
        raise ValueError(f"label must be that of a table of the paper, one of {', '.join(labels())}; found {label!r}")
    return Table(
        title=table["title"],
        columns=[Column(column["name"], column["digits"], column["better"]) for column in table["columns"]],
        rows=[Row(row["name"], [_cell(value) for value in row["values"]], row["group"]) for row in table["rows"]],
        note=table["setting"],
        head=table["head"],
    )


def classes_of(dataset: str) -> int:
    """Return K of a dataset of the paper."""
    return int(figures()["settings"]["datasets"][dataset]["classes"])


def features_of(backbone: str) -> int:
    """Return D of a backbone of the paper."""
    return int(figures()["settings"]["backbones"][backbone]["features"])


def value_in(table: Table, label: str, column: str, group: str | None = None) -> float:
    """Return the number in a cell of a table, without its error."""
    indexes = [index for index, other in enumerate(table.columns) if other.title == column]
    rows = [index for index, row in enumerate(table.rows) if (row.label, row.group) == (label, group)]
    if not indexes or not rows:
        raise ValueError(f"table {table.title!r} has no cell for {label!r} (group {group!r}) and {column!r}")
    cell = table.grid[rows[0]][indexes[0]]
    if cell.value is None:
        raise ValueError(f"table {table.title!r} has no number for {label!r} and {column!r}, found {cell.text!r}")
    return cell.value


def _cell(value: Any) -> Value:
    return (value[0], value[1]) if isinstance(value, list) else value
