"""The paper's figures, as data: `paper.json` beside this file has every value with its table, row and column.

Neither this nor what it imports needs torch, training or another study, so that any part of the package can ask.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from hetxl.studies.tables import Cell, Column, Row, Table

FILE = "paper.json"


@lru_cache(maxsize=1)
def figures() -> Mapping[str, Any]:
    """All of the file: source, settings, complexity and tables."""
    text = resources.files("hetxl.studies").joinpath(FILE).read_text(encoding="utf-8")
    return json.loads(text)


def labels() -> list[str]:
    """The labels of all tables, as in the paper's source."""
    return list(figures()["tables"])


def paper_table(label: str) -> Table:
    """A table of the paper.

    Args:
        label: as in the paper's source, such as "tab:results".
    """
    found = figures()["tables"].get(label)
    if found is None:
        raise ValueError(f"label must be that of a table of the paper, one of {', '.join(labels())}; found {label!r}")
    return Table(
        title=found["title"],
        columns=[Column(one["name"], one["digits"], one["better"]) for one in found["columns"]],
        rows=[Row(one["name"], [_cell(value) for value in one["values"]], one["group"]) for one in found["rows"]],
        note=found["setting"],
        head=found["head"],
    )


def classes_of(dataset: str) -> int:
    """K of a dataset of the paper."""
    return int(figures()["settings"]["datasets"][dataset]["classes"])


def features_of(backbone: str) -> int:
    """D of a backbone of the paper."""
    return int(figures()["settings"]["backbones"][backbone]["features"])


def _cell(value: Any) -> Cell:
    return (value[0], value[1]) if isinstance(value, list) else value
