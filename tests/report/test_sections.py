from pathlib import Path
from xml.etree import ElementTree

import pytest

from hetxl.report import find_runs, sections
from hetxl.report.groups import group_runs
from hetxl.report.palette import styles
from hetxl.report.read import Run
from support.runs import write_comparison

EMPTY = Run(Path("empty"), result={"label": "DET", "seed": 0})


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    return group_runs(
        find_runs(write_comparison(tmp_path_factory.mktemp("out"), ("DET", "HET-XL"), seeds=2, steps=200))
    )


@pytest.fixture(scope="module")
def looks(groups):
    return styles([group.label for group in groups])


def idents(parts):
    return [
        svg.get("id")
        for part in parts
        for svg in ElementTree.fromstring(f"<div>{part}</div>").iter("svg")
        if svg.get("role") == "img"
    ]


def test_every_section_draws_its_plots(groups, looks):
    assert idents(sections.training(groups, looks, 4.0)) == ["nll-steps", "nll-time", "temperature"]
    assert idents(sections.calibration(groups, looks, "test")) == ["reliability-0", "reliability-1", "risk-coverage"]
    assert idents(sections.cost(groups, looks, "test")) == ["parameters-nll"]
    assert idents(sections.frequency(groups, looks, "test")) == ["bands", "frequencies"]


@pytest.mark.parametrize("build", [sections.calibration, sections.cost, sections.frequency])
def test_sections_without_data_say_so(build):
    parts = build(group_runs([EMPTY]), styles(["DET"]), "test")
    assert parts
    assert all('class="missing"' in part and "left out: no run" in part for part in parts)


def test_bands_are_explained_where_there_are_several_seeds(groups):
    assert "bands reach from the lowest to the highest seed" in sections.spread(groups)
    assert sections.spread(group_runs([EMPTY])) is None


def test_training_without_a_log_says_so():
    parts = sections.training(group_runs([EMPTY]), styles(["DET"]), None)
    assert idents(parts) == []
    assert "Validation NLL left out: no log.jsonl has evaluations." in parts[0]
    assert "Temperature over steps left out" in parts[1]


def test_a_run_without_times_keeps_its_steps():
    run = Run(Path("a"), result={"label": "DET"}, evaluations=[{"kind": "evaluation", "step": 5, "nll": 4.0}])
    parts = sections.training(group_runs([run]), styles(["DET"]), None)
    assert idents(parts) == ["nll-steps"]
    assert "have no times" in parts[1]


@pytest.mark.parametrize(
    ("seconds", "unit"), [(30.0, "training time, s"), (600.0, "training time, min"), (50_000.0, "training time, h")]
)
def test_times_in_the_unit_that_suits_them(seconds, unit):
    evaluations = [{"step": step, "seconds": seconds * step, "nll": 4.0} for step in (0, 1)]
    run = Run(Path("a"), result={"label": "DET"}, evaluations=evaluations)
    assert unit in sections.training(group_runs([run]), styles(["DET"]), None)[1]


def test_frequencies_name_their_bins():
    data = {"frequencies": [[0, 5], [1, 10], [3, 20], [1000, 2]]}
    run = Run(Path("a"), result={"label": "DET", "data": data})
    plot = sections.frequency(group_runs([run]), styles(["DET"]), "test")[1]
    rows = [[cell.text for cell in row] for row in ElementTree.fromstring(plot).iter("tr")][1:]
    assert rows == [["0", "5"], ["1", "10"], ["2 to 3", "20"], ["4 to 1,000", "2"]]
    assert "37 classes. Most of them, 20, have 2 to 3 training examples; the most frequent have up to 1,000." in plot


def test_curves_of_the_wrong_kind_are_left_out():
    curves = {"reliability": [[0.5, None, 3], "x", [1, 2]], "risk_coverage": {"a": 1}}
    parts = sections.calibration(group_runs([Run(Path("a"), curves=curves)]), styles(["a"]), "test")
    assert idents(parts) == []
