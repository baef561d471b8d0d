import pytest

from hetxl.studies.forms import FORMS
from hetxl.studies.latency import OUT, STUDY, ratios, steps_of

SIZES = {"D": 8, "K": 30, "R": 2, "batches": [1, 8], "samples": [1, 10, 100], "budget": 2**30}


def grid(per_sample, shift=0.0):
    cells = {
        f"B={batch},S={count}": batch * (1 + shift + per_sample * count) for batch in (1, 8) for count in (1, 10, 100)
    }
    return {"engine": cells, "paper": dict(cells)}


def summary(xl):
    det = {"engine": {"B=1,S=1": 0.5, "B=8,S=1": 0.6}}
    return {"milliseconds": {"DET": det, "HET": grid(0.1), "HET-H": grid(0.1), "HET-XL": xl}, "sizes": SIZES}


def test_miniature(studied):
    text, found = studied("latency")
    sizes = FORMS["miniature"].sizes
    cells = found["milliseconds"]["HET-XL"]["engine"]
    assert len(cells) == len(sizes.batches) * len(sizes.samples)
    assert all(value > 0 for value in cells.values())
    assert len(found["milliseconds"]["DET"]["engine"]) == len(sizes.batches)
    assert found["milliseconds"]["HET"]["paper"]["B=4,S=200"] is None
    assert OUT in text


def test_steps():
    sizes = FORMS["full"].sizes
    assert len(steps_of("HET", "paper", sizes)) == 12
    assert {step.samples for step in steps_of("DET", "engine", sizes)} == {1}


@pytest.mark.parametrize(("xl", "word"), [(grid(1.0, -0.99), "holds here"), (grid(0.05, -0.5), "does not hold here")])
def test_the_conclusion_follows_the_numbers(xl, word):
    text = STUDY.conclusion(summary(xl))
    assert word in text
    assert "up to 16 samples and HET from 64 on" in text


def test_ratios_are_of_cells_that_both_have():
    values = summary(grid(1.0))["milliseconds"]
    values["HET-XL"]["paper"]["B=8,S=100"] = None
    assert ratios(values, SIZES, "paper")[1][0] == 10
    for count in (10, 100):
        values["HET-XL"]["paper"][f"B=8,S={count}"] = None
    assert ratios(values, SIZES, "paper")[1] == (100, pytest.approx(101 / 11))  # of the smaller batch
    for count in (10, 100):
        values["HET-XL"]["paper"][f"B=1,S={count}"] = None
    with pytest.raises(ValueError, match="no batch size has two cells"):
        ratios(values, SIZES, "paper")


def test_det_has_one_time_for_all_samples():
    (table,) = STUDY.tables(summary(grid(1.0)))
    assert [row.cells[0] for row in table.rows] == [0.5] * 3 + [0.6] * 3
