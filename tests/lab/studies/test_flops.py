import pytest

from hetxl_lab.studies.flops import WAYS, counted, crossing, line_in_samples, paper_operations, predicted
from hetxl_lab.studies.measure import HeadSize
from hetxl_lab.studies.registry import load_study

PAPER = {"D": 2048, "K": 21_843, "R": 50}
SIZE = HeadSize(2048, 21_843, 50)


def test_operations_match_the_papers_terms():
    sizes = {"D": 2, "K": 3, "R": 5, "S": 7}
    assert paper_operations("HET", sizes) == [6, 21 + 105, 6 + 21, 6 + 21]
    assert paper_operations("HET-XL", sizes) == [4, 14 + 70, 4 + 14, 14 + 42]


def test_the_crossing_by_the_papers_formulas():
    """(3DK − 2D²) / (3D + DR + DK − 3K − KR), by hand."""
    first, second = line_in_samples("HET", PAPER), line_in_samples("HET-XL", PAPER)
    assert first == (3 * 2048 * 21_843, 3 * 21_843 + 50 * 21_843)
    assert second == (2 * 2048**2, 3 * 2048 + 50 * 2048 + 2048 * 21_843)
    crossing_point = crossing(first, second)
    assert crossing_point == pytest.approx(2.880, abs=1e-3)
    for samples, cheaper in ((2, True), (3, False)):
        sizes = {**PAPER, "S": samples}
        assert (sum(paper_operations("HET-XL", sizes)) < sum(paper_operations("HET", sizes))) == cheaper


@pytest.mark.parametrize("label", ["HET", "HET-XL"])
@pytest.mark.parametrize("order", ["samples", "factors"])
@pytest.mark.parametrize("samples", [1, 7])
def test_our_modules_do_what_the_formula_says(label, order, samples):
    assert counted(label, SIZE, samples, order) == predicted(label, SIZE, samples, order)


def test_our_modules_cross_where_the_paper_says_up_to_the_mean_logits():
    """Ours go through W once more, for the mean: 2D² + DK instead of 2D²."""
    lines = []
    for label in ("HET", "HET-XL"):
        single, double = (counted(label, SIZE, samples, "samples") / 2 for samples in (1, 2))
        lines.append((2 * single - double, double - single))
    het, xl = lines
    assert crossing(het, (xl[0] - 2048 * 21_843, xl[1])) == pytest.approx(2.880, rel=0.01)
    assert 1 < crossing(het, xl) < 2.880


@pytest.mark.parametrize("label", ["DET", "HET", "HET-H", "HET-XL"])
def test_training_takes_three_times_the_products_of_a_prediction(label):
    """Each product has two in the backward pass, one for either factor; that of the normals with J has one."""
    once, trained = (counted(label, SIZE, 1, "samples", mode) for mode in ("eval", "train"))
    assert 2.9 < trained / once <= 3


@pytest.mark.parametrize("way", ["HET, samples first", "HET-H, samples first", "HET-XL, factors first"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_counts_are_straight_lines_in_the_samples(studied, way, mode):
    _, summary = studied("flops")
    label, order = WAYS[way]
    assert summary["counts"]["ResNet152x1, ImageNet-21k"][mode][way]["16"] == counted(label, SIZE, 16, order, mode)


def test_backbones_take_what_is_known_of_them(studied):
    """11.5 G multiplications for ResNet152 at 224 × 224, as its authors and torchvision say; ViT-L/32 has 15.4."""
    _, summary = studied("flops")
    counts = [counts["eval"] / 2e9 for counts in summary["backbones"].values()]
    assert counts == [pytest.approx(11.5, abs=0.1), pytest.approx(15.4, abs=0.1)]


def test_factors_first_makes_samples_cheap():
    few, many = (counted("HET-XL", SIZE, samples, "factors") for samples in (1, 1000))
    assert many / few < 2
    assert counted("HET-XL", SIZE, 1000, "samples") / many > 10


def test_lines_that_do_not_cross():
    assert crossing((1, 2), (5, 2)) is None
    assert crossing((1, 2), (5, 3)) is None
    assert crossing((5, 1), (1, 0.5)) is None
    assert crossing((5, 1), (1, 2)) == 4


STUDY = load_study("flops")


def test_page_has_formulas_and_crossing(studied):
    text, summary = studied("flops")
    counts = summary["counts"]["ResNet152x1, ImageNet-21k"]["eval"]
    assert {name: counts[name] for name in summary["predicted"]} == summary["predicted"]
    assert len(summary["predicted"]) == 4
    assert "up to S = 2.9" in text
    assert "3DK + 3KS + KRS" in text
    assert "| logits | O(DK + KS) | O(DS + DKS) |" in text
    assert summary["crossing_factors"] is None
    assert "holds here" in text


def test_the_conclusion_follows_the_numbers(studied):
    _, summary = studied("flops")
    counts = {
        setting: {mode: {name: dict.fromkeys(terms, 1) for name, terms in ways.items()} for mode, ways in modes.items()}
        for setting, modes in summary["counts"].items()
    }
    text = STUDY.conclusion({**summary, "counts": counts, "crossing_ours": None, "crossing_factors": 7.0})
    assert "does not hold here" in text
    assert "they cross at S = 7.0" in text
    assert "up to S = –" in text
