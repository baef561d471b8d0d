import copy

import pytest

from hetxl.studies.memory import STUDY, fitting, lower_share

SIZES = {"D": 8, "K": 30, "R": 2, "batches": [1], "samples": [1, 10], "budget": 100_000_000}


def summary(xl=50.0):
    cells = {"B=1,S=1": 60.0, "B=1,S=10": 120.0}
    both = {"engine": dict(cells), "paper": {"B=1,S=1": 90.0, "B=1,S=10": None}}
    ours = {"engine": {"B=1,S=1": xl, "B=1,S=10": xl + 1}, "paper": dict(both["paper"])}
    measured = {"DET": {"engine": {"B=1,S=1": 10.0}}, "HET": both, "HET-H": copy.deepcopy(both), "HET-XL": ours}
    predicted = {
        label: {way: {name: 2 * (value or 400.0) for name, value in cells.items()} for way, cells in ways.items()}
        for label, ways in measured.items()
    }
    return {"megabytes": measured, "predicted": predicted, "sizes": SIZES}


def test_miniature(studied):
    text, found = studied("memory")
    assert found["megabytes"]["HET"]["paper"]["B=4,S=200"] is None
    assert found["predicted"]["HET"]["paper"]["B=4,S=200"] > found["predicted"]["HET"]["paper"]["B=2,S=200"]
    assert all(value is not None for value in found["megabytes"]["DET"]["engine"].values())
    assert "Cells that fit the budget" in text
    assert "far above the budget" in text


def test_what_fits():
    found = fitting(summary())
    assert found["HET", "engine"] == {"cells": 2, "measured": 1, "predicted": 0, "ratio": 0.5}
    assert found["HET", "paper"]["measured"] == 1
    assert found["HET-XL", "engine"]["measured"] == 2
    assert found["HET-XL", "engine"]["predicted"] == 1


@pytest.mark.parametrize(("xl", "word"), [(50.0, "holds here"), (500.0, "does not hold here"), (70.0, "do not decide")])
def test_the_conclusion_follows_the_numbers(xl, word):
    assert word in STUDY.conclusion(summary(xl))
    assert lower_share(summary(50.0), "HET-H") == 1
