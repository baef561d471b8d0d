import re
from pathlib import Path

import pytest

from hetxl.report import compare_table, verdict
from hetxl.report.read import Run


def said(values, **extra):
    """The verdict on NLLs by label, one for each seed."""
    runs = []
    for label, losses in values.items():
        for seed, nll in enumerate(losses):
            result = {"label": label, "seed": seed, "metrics": {"test": {"nll": nll, **extra.get(label, {})}}}
            result |= {"best_nll": extra.get("best_nll"), "parameters": {"total": 100 if label == "DET" else 150}}
            runs.append(Run(Path(f"{label}-{seed}"), result=result))
    return verdict(compare_table(runs))


def test_a_clear_winner():
    text = said({"DET": [4.30, 4.31, 4.32], "HET-XL": [4.20, 4.212, 4.22]})
    assert text.startswith(
        "HET-XL has the lowest NLL, 4.211 ± 0.006 against 4.310 ± 0.006 for DET (p < 0.001 over 3 seeds)."
    )
    assert "1.50 times the parameters" in text
    assert "chance" not in text


def test_a_difference_that_could_be_chance_is_called_so():
    text = said({"DET": [4.30, 4.20], "HET-XL": [4.20, 4.28]})
    assert "it could be chance" in text
    assert "1 seed: it could be chance" in said({"DET": [4.3], "HET": [4.2]})


def test_heads_that_are_as_good_are_named():
    text = said({"DET": [4.5, 4.6], "HET": [4.2, 4.3], "HET-H": [4.4, 4.41], "HET-XL": [4.19, 4.3]})
    assert text.startswith("HET-XL has the lowest NLL")
    assert "; HET is within one standard error of it" in text
    assert "within" not in said({"DET": [4.5], "HET": [4.2], "HET-XL": [4.19]})


def test_means_over_different_seeds_do_not_hide_a_loss():
    text = said({"DET": [4.0, 4.1, 5.0], "HET": [4.05, 4.16]})
    assert text.startswith("HET has the lowest NLL")
    assert "over 2 seeds" in text
    assert "on the seeds that both have, the difference is +0.055 ± 0.005 worse" in text


def test_when_det_wins_it_says_so():
    text = said({"DET": [4.1, 4.2], "HET": [4.3, 4.41], "HET-XL": [4.15, 4.26]})
    assert text.startswith("DET has the lowest NLL, 4.150 ± 0.050: no other head beats it, the closest is HET-XL")
    assert "0.055 more" in text


def test_heads_that_lose_to_det_are_named():
    assert "HET and HET-H are worse than DET" in said({"DET": [4.2], "HET": [4.3], "HET-H": [4.25], "HET-XL": [4.1]})


@pytest.mark.parametrize(("ours", "word"), [(0.5, "better"), (0.3, "worse"), (0.4, "the same")])
def test_precision_is_told_either_way(ours, word):
    extra = {"DET": {"precision@1": 0.4}, "HET": {"precision@1": ours}}
    assert f"its precision@1 is {word}" in said({"DET": [4.2], "HET": [4.1]}, **extra)


def test_a_lower_calibration_error_is_better():
    extra = {"DET": {"calibration_error": 0.02}, "HET": {"calibration_error": 0.03}}
    assert "its calibration error is worse, 3.00% against 2.00%" in said({"DET": [4.2], "HET": [4.1]}, **extra)


def test_the_true_model_is_named():
    assert "the true model has 4.000" in said({"DET": [4.2], "HET": [4.1]}, best_nll=4.0)


def test_without_a_baseline_the_second_best_is_the_measure():
    assert said({"HET": [4.2], "HET-XL": [4.1]}).startswith("HET-XL has the lowest NLL, 4.100 against 4.200 for HET.")


def test_one_head_and_no_head():
    assert (
        said({"DET": [4.2]}) == "DET has an NLL of 4.200 on the test data. There is no other head to compare it with."
    )
    assert verdict(compare_table([Run(Path("a"))])).startswith("No run has test metrics yet.")


def test_it_is_two_sentences():
    text = said({"DET": [4.3, 4.31], "HET": [4.4, 4.39], "HET-XL": [4.2, 4.21]}, best_nll=4.0)
    assert len(re.findall(r"\.(?: |$)", text)) == 2
