"""The parameters that the paper reports (Table "Method comparison on 3 datasets"), compared with our modules."""

import json
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hetxl.profiling.backbones import build_backbone
from hetxl.profiling.parameters import compare_heads
from hetxl_lab.studies.paper import classes_of, value_in
from hetxl_lab.studies.paper import paper_table as figures_of

BACKBONES = {"resnet152": "ResNet152x1", "vit-l/32": "ViT-L/32"}  # our names for the paper's

LABEL = "tab:results"  # label of the table in `hetxl_lab.studies.paper`

DATASETS = ("JFT-300M", "ImageNet-21k", "JFT-4B")
CLASSES = {dataset: classes_of(dataset) for dataset in DATASETS}  # K of each dataset

ROWS = {"det": "DET", "het": "HET τ*", "het-h": "HET-H", "het-xl": "HET-XL"}
"""Rows of the table by our names for the heads; HET has as many parameters whatever its τ."""


def paper_millions(backbone: str, dataset: str, head: str) -> float | None:
    """Return the millions of parameters that the paper reports; None if it has no figure, as for HET-H on JFT-4B."""
    table = figures_of(LABEL)
    if not any(row.group == dataset and row.label == ROWS[head] for row in table.rows):
        return None
    return value_in(table, ROWS[head], f"{BACKBONES[backbone]} parameters, M", dataset)


@dataclass(frozen=True)
class PaperCell:
    """One number of the table."""

    backbone: str  # a key of BACKBONES
    dataset: str  # one of DATASETS
    head: str  # a key of ROWS
    ours: int  # parameters of our modules
    paper: float | None  # in millions; None if the paper gives no figure

    @property
    def difference(self) -> float | None:
        """Return ours − the paper's, in millions."""
        return None if self.paper is None else self.ours / 1e6 - self.paper

    def as_dict(self) -> dict[str, Any]:
        """Return the cell as plain numbers, for JSON."""
        return {
            "backbone": self.backbone,
            "dataset": self.dataset,
            "classes": CLASSES[self.dataset],
            "head": self.head,
            "parameters": self.ours,
            "paper_millions": self.paper,
            "difference_millions": self.difference,
        }


def compare_with_paper() -> list[PaperCell]:
    """Return every cell of the table, counted on the real modules with the paper's R = 50; 2 × 3 × 4 of them."""
    cells = []
    for name in BACKBONES:
        backbone = build_backbone(name)
        for dataset, classes in CLASSES.items():
            for row in compare_heads(backbone.features, classes, backbone=backbone.parameters, rank=50):
                assert row.count is not None
                paper = paper_millions(name, dataset, row.head)
                cells.append(PaperCell(name, dataset, row.head, row.count.total, paper))
    return cells


def paper_table(cells: list[PaperCell]) -> Table:
    """Return the cells in the paper's layout, with one column group for each backbone, in millions of parameters."""
    table = Table(
        title="Millions of parameters, ours beside the paper's",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # fits nine columns in a terminal of 80 characters
    )
    table.add_column("dataset", no_wrap=True)
    table.add_column("head", no_wrap=True)
    for backbone in BACKBONES.values():
        for column in (backbone, "paper", "diff"):
            table.add_column(column, justify="right", no_wrap=True)
    by_cell = {(cell.dataset, cell.head, cell.backbone): cell for cell in cells}
    for dataset in DATASETS:
        labels = [dataset, f"K = {CLASSES[dataset]:,}"]
        for row, head in enumerate(ROWS):
            numbers = [text for backbone in BACKBONES for text in _formatted(by_cell[dataset, head, backbone])]
            label = labels[row] if row < len(labels) else ""
            table.add_row(label, head.upper(), *numbers, end_section=row == len(ROWS) - 1)
    return table


def _formatted(cell: PaperCell) -> tuple[str, str, str]:
    """Return ours, the paper's and the difference; dashes if the paper has no figure."""
    ours = f"{cell.ours / 1e6:.2f}"
    if cell.paper is None or cell.difference is None:
        return ours, "–", "–"
    # Adding zero turns −0.00 into +0.00.
    return ours, f"{cell.paper:.1f}", f"{round(cell.difference, 2) + 0.0:+.2f}"


def show_paper(as_json: bool) -> None:
    """Print the table, or its cells as JSON."""
    cells = compare_with_paper()
    if as_json:
        print(json.dumps([cell.as_dict() for cell in cells], indent=2))
    else:
        Console().print(paper_table(cells))
