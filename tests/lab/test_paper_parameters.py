"""The paper's table of parameters, typed in here a second time from the paper."""

import pytest

from hetxl_lab.paper_parameters import CLASSES, compare_with_paper, paper_table

RESNET = """
JFT-300M     95.6  171.5 104.1 104.1
ImageNet-21k 102.9 193.5 111.4 111.4
JFT-4B       118.8 241.6 -     127.2
"""
VIT = """
JFT-300M     325.3 363.7 327.5 327.5
ImageNet-21k 328.9 374.8 331.1 331.1
JFT-4B       336.9 399.1 -     339
"""


def figures():
    for backbone, text in (("resnet152", RESNET), ("vit-l/32", VIT)):
        for line in text.strip().splitlines():
            dataset, *numbers = line.split()
            for head, number in zip(("det", "het", "het-h", "het-xl"), numbers, strict=True):
                yield backbone, dataset, head, None if number == "-" else float(number)


@pytest.fixture(scope="module")
def cells():
    return {(cell.backbone, cell.dataset, cell.head): cell for cell in compare_with_paper()}


@pytest.mark.parametrize(("backbone", "dataset", "head", "millions"), list(figures()))
def test_every_cell_is_the_papers(cells, backbone, dataset, head, millions):
    cell = cells[backbone, dataset, head]
    assert cell.paper == millions
    if millions is None:
        assert cell.difference is None
    else:
        assert abs(cell.ours / 1e6 - millions) < 0.1
        assert cell.difference == pytest.approx(cell.ours / 1e6 - millions)


def test_table_has_24_cells(cells):
    assert len(cells) == 2 * 3 * 4


@pytest.mark.parametrize(
    ("backbone", "features", "own"), [("resnet152", 2048, 58_143_808), ("vit-l/32", 1024, 306_560_000)]
)
@pytest.mark.parametrize("dataset", CLASSES)
def test_our_counts_follow_the_formula(cells, backbone, features, own, dataset):
    classes = {"JFT-300M": 18_291, "ImageNet-21k": 21_843, "JFT-4B": 29_593}[dataset]
    det = own + features * classes + classes
    noise = 2 * (features * features + features) + 50 * features + 1
    assert cells[backbone, dataset, "det"].ours == det
    assert cells[backbone, dataset, "het-xl"].ours == cells[backbone, dataset, "het-h"].ours == det + noise
    assert cells[backbone, dataset, "het"].ours == det + 2 * (features * classes + classes) + 50 * classes + 1


def test_het_xl_adds_a_ninth_of_what_het_adds(cells):
    """The paper's sentence on ResNet152 and JFT-300M: about 9 times fewer additional parameters."""
    det, het, xl = (cells["resnet152", "JFT-300M", head].ours for head in ("det", "het", "het-xl"))
    assert (het - det) / (xl - det) == pytest.approx(9, abs=0.1)


def test_the_table_has_a_row_for_each_head_and_dataset(cells):
    assert paper_table(list(cells.values())).row_count == 12
