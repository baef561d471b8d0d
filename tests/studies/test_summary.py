import pytest

from hetxl.report.statistics import paired_test
from hetxl.studies.summary import (
    cost_text,
    count_verdicts,
    difference_text,
    heads_table,
    judge,
    mean_text,
    p_text,
    verdict_table,
)


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
    other["nll"] = [one + difference for one, difference in zip(base["nll"], nll, strict=True)]
    other["precision@1"] = [one + difference for one, difference in zip(base["precision@1"], precision, strict=True)]
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
    found = summary()
    for values in found["heads"]["HET-XL"].values():
        if isinstance(values, list):
            del values[0]
    assert judge(found).nll.pairs == 4
    del found["heads"]["HET-XL"]
    with pytest.raises(ValueError, match="HET-XL"):
        judge(found)


def test_tables():
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


def test_numbers_as_text():
    assert mean_text([1.0, 2.0]) == "1.500 ± 0.500"
    assert mean_text([-0.012], 1, 100) == "−1.2"
    assert difference_text(paired_test([1.0], [3.0]), 2) == "−2.00"
    assert difference_text(paired_test([3.0, 3.0], [1.0, 2.0]), 1, 100) == "+150.0 ± 50.0"
    assert p_text(paired_test([1.0], [3.0])) == "–"
    assert p_text(paired_test([1.0, 2.0, 3.1], [1.0, 1.0, 1.0])) == "0.231"


def test_time_is_steps_at_the_pace_of_a_head():
    found = summary()
    heads = found["heads"]
    heads["DET, as much time as HET-XL"] = heads["DET"] | {"steps": 250}
    heads["HET-XL + scaling"] = heads["HET-XL"]
    heads["DET ensemble"] = heads["DET"] | {"nll": [1.9]}
    heads["HET"] = heads["DET"]
    assert {label: cost_text(found, label) for label in heads} == {
        "DET": "1.0×",
        "HET-XL": "2.5×",
        "DET, as much time as HET-XL": "2.5×",
        "HET-XL + scaling": "2.5×",
        "DET ensemble": "5×",
        "HET": "–",  # whose pace was not measured
    }
    del found["pace"]
    assert cost_text(found, "HET-XL") == "–"
