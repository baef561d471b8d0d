"""The parameters that the paper reports (Table "Method comparison on 3 datasets"), beside those of our modules."""

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from hetxl.profiling.backbones import build_backbone
from hetxl.profiling.parameters import compare_heads

BACKBONES = {"resnet152": "ResNet152x1", "vit-l/32": "ViT-L/32"}
"""Our names for the paper's."""

CLASSES = {"JFT-300M": 18_291, "ImageNet-21k": 21_843, "JFT-4B": 29_593}
"""K of each dataset."""

MILLIONS: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "JFT-300M": {"det": (95.6, 325.3), "het": (171.5, 363.7), "het-h": (104.1, 327.5), "het-xl": (104.1, 327.5)},
    "ImageNet-21k": {"det": (102.9, 328.9), "het": (193.5, 374.8), "het-h": (111.4, 331.1), "het-xl": (111.4, 331.1)},
    "JFT-4B": {"det": (118.8, 336.9), "het": (241.6, 399.1), "het-h": (None, None), "het-xl": (127.2, 339.0)},
}
"""Millions of parameters, in the order of BACKBONES. The paper has no HET-H on JFT-4B."""


@dataclass(frozen=True)
class PaperCell:
    """One number of the table.

    Attributes:
        backbone: a key of BACKBONES.
        dataset: a key of CLASSES.
        head: a key of `hetxl.nn.HEADS`.
        ours: parameters of our modules.
        paper: the paper's figure in millions; None where it gives none.
    """

    backbone: str
    dataset: str
    head: str
    ours: int
    paper: float | None

    @property
    def difference(self) -> float | None:
        """Ours − the paper's, in millions."""
        return None if self.paper is None else self.ours / 1e6 - self.paper

    def as_dict(self) -> dict[str, Any]:
        """The cell as plain numbers, for JSON."""
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
    """Every cell of the table, counted on the real modules with the paper's R = 50; 2 × 3 × 4 of them."""
    cells = []
    for column, name in enumerate(BACKBONES):
        backbone = build_backbone(name)
        for dataset, classes in CLASSES.items():
            for row in compare_heads(backbone.features, classes, backbone=backbone.parameters, rank=50):
                assert row.count is not None
                paper = MILLIONS[dataset][row.head][column]
                cells.append(PaperCell(name, dataset, row.head, row.count.total, paper))
    return cells


def paper_table(cells: list[PaperCell]) -> Table:
    """The cells as the paper lays them out, the backbones side by side, in millions of parameters."""
    table = Table(
        title="Millions of parameters, ours beside the paper's",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # nine columns in a terminal of 80
    )
    table.add_column("dataset", no_wrap=True)
    table.add_column("head", no_wrap=True)
    for backbone in BACKBONES.values():
        for column in (backbone, "paper", "diff"):
            table.add_column(column, justify="right", no_wrap=True)
    by_place = {(cell.dataset, cell.head, cell.backbone): cell for cell in cells}
    for dataset, heads in MILLIONS.items():
        labels = [dataset, f"K = {CLASSES[dataset]:,}"]
        for row, head in enumerate(heads):
            numbers = []
            for backbone in BACKBONES:
                numbers += _formatted(by_place[dataset, head, backbone])
            label = labels[row] if row < len(labels) else ""
            table.add_row(label, head.upper(), *numbers, end_section=row == len(heads) - 1)
    return table


def _formatted(cell: PaperCell) -> tuple[str, str, str]:
    """Ours, the paper's and the difference; dashes where the paper has no figure."""
    ours = f"{cell.ours / 1e6:.2f}"
    if cell.paper is None or cell.difference is None:
        return ours, "–", "–"
    # Adding zero turns −0.00 into +0.00.
    return ours, f"{cell.paper:.1f}", f"{round(cell.difference, 2) + 0.0:+.2f}"
