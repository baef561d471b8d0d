from pathlib import Path

import pytest

from hetxl.report.groups import baseline_label, group_runs
from hetxl.report.read import Comparison, Run


def run(name, label, seed=0, comparison=None, **result):
    return Run(Path(name), result={"label": label, "seed": seed, **result}, comparison=comparison)


def test_runs_of_a_label_are_together_by_seed():
    groups = group_runs([run("c", "HET-XL", 1), run("a", "DET", 0), run("b", "HET-XL", 0)])
    assert [(group.label, [member.seed for member in group.runs]) for group in groups] == [
        ("DET", [0]),
        ("HET-XL", [0, 1]),
    ]


def test_the_order_of_the_comparison_comes_first_then_that_of_the_paper():
    plan = Comparison(Path("out"), heads=("own", "HET-XL", "DET"))
    labels = ("DET", "HET-XL", "own")
    assert [group.label for group in group_runs([run(label, label, comparison=plan) for label in labels])] == [
        *plan.heads
    ]
    assert [group.label for group in group_runs([run(label, label) for label in ("zz", "HET-XL", "aa", "DET")])] == [
        "DET",
        "HET-XL",
        "zz",
        "aa",
    ]


def test_the_same_seed_twice_is_two_heads_not_two_seeds():
    groups = group_runs([run("out/rank-10", "HET"), run("out/rank-20", "HET")])
    assert [group.label for group in groups] == ["HET (rank-10)", "HET (rank-20)"]
    groups = group_runs([run("one/a", "HET"), run("two/a", "HET")])
    assert [group.label for group in groups] == ["HET (one/a)", "HET (two/a)"]
    groups = group_runs([run("x/one/a", "HET"), run("y/one/a", "HET")])
    assert [group.label for group in groups] == ["HET (x/one/a)", "HET (y/one/a)"]


def test_the_baseline():
    plan = Comparison(Path("out"), baseline="HET")
    assert baseline_label(group_runs([run("a", "DET"), run("b", "HET", comparison=plan)])) == "HET"
    assert baseline_label(group_runs([run("a", "HET"), run("b", "DET")])) == "DET"
    assert baseline_label(group_runs([run("a", "HET", head="het"), run("b", "plain", head="det")])) == "plain"
    assert baseline_label(group_runs([run("a", "HET")])) is None


def test_runs_of_different_data_are_refused():
    with pytest.raises(ValueError, match="same data to be compared, found birds, pycode"):
        group_runs([run("a", "DET", dataset="pycode"), run("b", "HET", dataset="birds")])
    assert len(group_runs([run("a", "DET", dataset="pycode"), run("b", "HET")])) == 2
    with pytest.raises(ValueError, match="at least one run"):
        group_runs([])


def test_metrics_by_seed_leave_out_what_is_missing():
    (group,) = group_runs(
        [
            run("a", "DET", 0, metrics={"test": {"nll": 4.0}}, train_seconds=3.0, parameters={"total": 5}),
            run("b", "DET", 1, metrics={"test": {"nll": None}}),
        ]
    )
    assert group.metrics("nll", "test") == {0: 4.0}
    assert group.values("train_seconds") == [3.0]
    assert group.parameters() == [5.0]
