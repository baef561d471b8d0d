import pytest

from hetxl_lab.studies.verdicts import (
    against,
    agree,
    change,
    cost_text,
    count_verdicts,
    difference_text,
    heads_table,
    holds,
    insensitive,
    judge,
    lower_in,
    mean_cell,
    mean_text,
    p_text,
    same,
    sign,
    verdict_table,
    within,
)
from hetxl_train.report.statistics import PairedTest, paired_test

LOWER, HIGHER = PairedTest(-0.0123, 0.001, 0.0004, 3), PairedTest(0.0123, 0.002, 0.03, 3)
UNSURE, SINGLE = PairedTest(-0.01, 0.02, 0.6, 3), PairedTest(-0.01, None, None, 1)


def test_differences_are_paired_over_seeds():
    test = against({"nll": [1.0, 2.0]}, {"nll": [1.5, 2.5]})
    assert test.difference == -0.5
    assert against(None, {"nll": [1.0]}) is None
    assert against({"x": [2.0]}, {"x": [1.0]}, "x").difference == 1.0


def test_cells_of_values_over_seeds():
    assert mean_cell([]) is None
    assert mean_cell([2.0], 100) == 200.0
    assert mean_cell([1.0, 3.0]) == (2.0, 1.0)


def test_sign_follows_significance():
    assert [sign(test) for test in (LOWER, HIGHER, UNSURE, SINGLE, None)] == [-1, 1, 0, None, None]


def test_change_names_direction_error_and_p():
    assert change(LOWER) == "lower by 0.012 ± 0.001 (p < 0.001)"
    assert change(HIGHER, 2, 100, " %") == "higher by 1.23 ± 0.20 % (p = 0.030)"
    assert change(SINGLE) == "lower by 0.010"
    assert change(PairedTest(0.0004, 0.1, 0.9, 3)) == "the same"
    assert change(None) == "not known, as a loss did not stay finite"


def test_lower_in_counts_lower_and_significant():
    assert lower_in([LOWER, HIGHER, UNSURE, None]) == (2, 1, 1)


def test_holds_writes_the_conclusion():
    assert holds(True, "x is y") == "The paper's conclusion, that x is y, holds here."
    assert holds(False, "x is y", "z") == "The paper's conclusion, that x is y, does not hold here: z."
    assert holds(None, "x is y").startswith(
        "The numbers here do not decide whether the paper's conclusion holds, that x"
    )


def test_agree_needs_significant_signs():
    assert agree([-1, 0, None], -1) is True
    assert agree([-1, 1], -1) is False
    assert agree([0, None], -1) is None
    assert agree([1, 0], 1) is True


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([PairedTest(0.009, 0.0001, 0.001, 3)], True),  # significant, and too small to matter
        ([PairedTest(0.02, 0.001, 0.001, 3)], False),
        ([PairedTest(0.02, 0.02, 0.4, 3)], None),
        ([PairedTest(0.0, 0.1, 1.0, 3), PairedTest(-0.02, 0.001, 0.001, 3)], False),
        ([None], None),
        ([], None),
    ],
)
def test_no_difference_needs_a_margin(differences, expected):
    assert insensitive(differences, {"nll": [1.0, 1.0]}) is expected
    assert insensitive(differences, None) is None
    assert "1%" in within()


def test_the_same_within_a_margin():
    small = PairedTest(0.001, 0.001, 0.4, 3)
    assert same([small], 0.01)
    assert same([small, HIGHER], 0.01) is False
    assert same([small], 0.002) is None  # its interval is wider
    assert same([PairedTest(0.0123, 0.0001, 0.001, 3)], 0.02)  # it counts, and is small
    assert same([small, UNSURE], 0.02) is None
    assert same([SINGLE], 0.02) is None
    assert same([small, None], 0.01) is None
    assert same([None, HIGHER], 0.01) is False
    assert same([], 0.01) is None


def summary(name="data", nll=(-0.1, -0.11, -0.09, -0.1, -0.12), precision=(0.0, 0.01, -0.01, 0.0, 0.0)):
    seeds = list(range(len(nll)))
    base = {
        "nll": [2.0 + 0.01 * seed for seed in seeds],
        "precision@1": [0.5 for _ in seeds],
        "calibration_error": [0.02 for _ in seeds],
        "brier": [0.6 for _ in seeds],
        "steps": 100,
        "temperature": [1.0 for _ in seeds],
        "seeds": seeds,
    }
    other = dict(base)
    other["nll"] = [value + difference for value, difference in zip(base["nll"], nll, strict=True)]
    other["precision@1"] = [
        value + difference for value, difference in zip(base["precision@1"], precision, strict=True)
    ]
    pace = {"det": 1.0, "het-xl": 2.5}
    return {
        "setting": name,
        "num_classes": 8192,
        "steps": 100,
        "pace": pace,
        "heads": {"DET": base, "HET-XL": other},
    }


def test_better_worse_and_neither():
    better = judge(summary())
    assert better.better
    assert not better.worse
    assert not better.less_precise
    worse = judge(summary(nll=(0.1, 0.11, 0.09, 0.1, 0.12), precision=(-0.01, -0.011, -0.009, -0.01, -0.01)))
    assert worse.worse
    assert worse.less_precise
    assert not worse.better
    tie = judge(summary(nll=(0.1, -0.1, 0.05, -0.05, 0.01)))
    assert not tie.better
    assert not tie.worse


def test_a_better_one_needs_more_evidence_than_a_worse_one():
    # p = 0.03: enough to be called worse, not enough to be called better.
    spread = (0.1, 0.03, 0.17, 0.02, 0.12)
    assert 0.01 < judge(summary(nll=spread)).nll.p < 0.05
    assert judge(summary(nll=spread)).worse
    assert not judge(summary(nll=tuple(-value for value in spread))).better


def test_only_seeds_of_both_count():
    results = summary()
    for values in results["heads"]["HET-XL"].values():
        if isinstance(values, list):
            del values[0]
    assert judge(results).nll.pairs == 4
    del results["heads"]["HET-XL"]
    with pytest.raises(ValueError, match="HET-XL"):
        judge(results)


def test_verdict_tables_have_settings_and_heads():
    summaries = [summary("one"), summary("two", nll=(0.1, 0.11, 0.09, 0.1, 0.12))]
    table = verdict_table(summaries)
    assert "| one | 8,192 | 2.020 ± 0.007 | 1.916 ± 0.007 | −0.104 ± 0.005 | < 0.001 |" in table
    assert [line.split("|")[-2].strip() for line in table.splitlines()[2:]] == ["better", "worse"]
    assert "in 2 settings: NLL significantly better (p < 0.01) in 1, significantly worse (p < 0.05) in 1" in (
        count_verdicts(summaries)
    )
    heads = heads_table(summaries[0])
    assert "| DET | 2.020 ± 0.007 | – | – | 50.00 ± 0.00 % | 2.00 ± 0.00 % | 0.600 ± 0.000 | 1.00 | 1.0× |" in heads
    assert "| −0.104 ± 0.005 | < 0.001 | 50.00 ± 0.32 %" in heads
    summaries[0]["heads"]["DET ensemble"] = summaries[0]["heads"]["DET"] | {"nll": [1.9]}
    assert "| DET ensemble | 1.900 | – | – |" in heads_table(summaries[0])
    del summaries[0]["heads"]["DET"]["temperature"]
    assert "| – | 1.0× |" in heads_table(summaries[0])


def test_means_differences_and_p_values_are_formatted():
    assert mean_text([1.0, 2.0]) == "1.500 ± 0.500"
    assert mean_text([-0.012], 1, 100) == "−1.2"
    assert difference_text(paired_test([1.0], [3.0]), 2) == "−2.00"
    assert difference_text(paired_test([3.0, 3.0], [1.0, 2.0]), 1, 100) == "+150.0 ± 50.0"
    assert p_text(None) == "–"
    assert p_text(paired_test([1.0, 2.0, 3.1], [1.0, 1.0, 1.0]).p) == "0.231"


def test_time_is_steps_at_the_pace_of_a_head():
    results = summary()
    heads = results["heads"]
    heads["DET, as much time as HET-XL"] = heads["DET"] | {"steps": 250}
    heads["HET-XL + scaling"] = heads["HET-XL"]
    heads["DET ensemble"] = heads["DET"] | {"nll": [1.9]}
    heads["HET"] = heads["DET"]
    assert {label: cost_text(results, label) for label in heads} == {
        "DET": "1.0×",
        "HET-XL": "2.5×",
        "DET, as much time as HET-XL": "2.5×",
        "HET-XL + scaling": "2.5×",
        "DET ensemble": "5×",
        "HET": "–",  # whose pace was not measured
    }
    del results["pace"]
    assert cost_text(results, "HET-XL") == "–"
