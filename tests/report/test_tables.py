import json
import math
from pathlib import Path

import pytest

from hetxl.report import as_dict, compare_table, find_runs, verdict
from hetxl.report.read import Comparison, Run
from hetxl.report.statistics import paired_test
from support.runs import HEADS, write_comparison


def run(label, seed=0, nll=None, split="test", comparison=None, **result):
    metrics = {split: {"nll": nll, **result.pop("metrics", {})}}
    return Run(
        Path(f"{label}-{seed}"),
        result={"label": label, "seed": seed, "metrics": metrics, **result},
        comparison=comparison,
    )


def test_means_errors_and_the_paired_test():
    det, het = [4.0, 4.2, 4.4], [3.9, 4.05, 4.2]
    runs = [run("DET", seed, nll) for seed, nll in enumerate(det)] + [
        run("HET", seed, nll) for seed, nll in enumerate(het)
    ]
    table = compare_table(runs)
    row = table.row("HET")
    assert row.seeds == 3
    assert row.cells["nll"].value == pytest.approx(4.05)
    assert row.cells["nll"].error == pytest.approx(0.15 / math.sqrt(3))
    assert row.cells["nll"].text == "4.050 ± 0.087"
    expected = paired_test(het, det)
    assert row.cells["difference"].value == pytest.approx(-0.15)
    assert row.cells["difference"].error == pytest.approx(expected.error)
    assert row.cells["p"].value == pytest.approx(expected.p)
    assert row.cells["p"].value == pytest.approx(0.0351, abs=1e-4)
    assert table.row("DET").cells["difference"].value is None


def test_seeds_are_paired_by_their_number_not_their_place():
    runs = [run("DET", 1, 5.0), run("DET", 2, 6.0), run("HET", 2, 5.5), run("HET", 1, 4.6), run("HET", 7, 1.0)]
    cell = compare_table(runs).row("HET").cells["difference"]
    assert cell.value == pytest.approx(-0.45)


def test_no_common_seed_gives_no_difference():
    row = compare_table([run("DET", 0, 5.0), run("HET", 1, 4.0)]).row("HET")
    assert row.cells["difference"].value is None
    assert row.cells["p"].text == "no common seed"


def test_one_seed_is_not_tested():
    table = compare_table([run("DET", 0, 4.2), run("HET", 0, 4.1)])
    cells = table.row("HET").cells
    assert (cells["nll"].text, cells["difference"].text, cells["p"].text) == ("4.100", "−0.100", "1 seed")
    assert any("1 seed" in note for note in table.notes)


def test_one_seed_is_tested_over_its_examples_where_these_are_known(tmp_path):
    table = compare_table(find_runs(write_comparison(tmp_path, ("DET", "HET-XL"), seeds=1, steps=20)))
    row = table.row("HET-XL")
    assert row.tested == "examples"
    assert row.cells["nll"].error is None
    assert row.cells["difference"].value == pytest.approx(row.nll - table.row("DET").nll)
    assert 0 < row.cells["difference"].error < 0.1
    assert 0 < row.cells["p"].value < 0.05
    assert any("over examples" in note for note in table.notes)
    assert "over the examples of 1 seed, another may differ" in verdict(table)
    assert as_dict(table)["rows"][1]["tested_over"] == "examples"


def test_a_head_that_is_worse_is_shown_as_worse():
    cell = compare_table([run("DET", 0, 4.0), run("HET", 0, 4.2)]).row("HET").cells["difference"]
    assert cell.worse
    assert cell.text == "+0.200 worse"
    cell = compare_table([run("DET", 0, 4.0), run("HET", 0, 4.0000001)]).row("HET").cells["difference"]
    assert (cell.worse, cell.text) == (False, "0.000")


def test_best_values_by_column():
    runs = [
        run("DET", 0, 4.2, metrics={"precision@1": 0.5, "brier": 0.3}, parameters={"total": 10}),
        run("HET", 0, 4.1, metrics={"precision@1": 0.4, "brier": 0.3}, parameters={"total": 20}),
    ]
    det, het = compare_table(runs).rows
    assert (det.cells["nll"].best, het.cells["nll"].best) == (False, True)
    assert (det.cells["precision@1"].best, het.cells["precision@1"].best) == (True, False)
    assert (det.cells["parameters"].best, het.cells["parameters"].best) == (True, False)
    assert not det.cells["brier"].best  # the same for all: none is best
    assert not compare_table([runs[0]]).rows[0].cells["nll"].best  # nothing to be better than


def test_what_shows_the_same_as_the_best_is_best_too():
    runs = [run("DET", 0, 4.10001), run("HET", 0, 4.10002), run("HET-XL", 0, 4.3)]
    assert [row.cells["nll"].best for row in compare_table(runs).rows] == [True, True, False]


def test_the_true_model_is_the_first_row_and_never_best():
    table = compare_table([run("DET", 0, 4.2, best_nll=4.0), run("HET", 0, 4.1, best_nll=4.0)])
    truth = table.rows[0]
    assert (truth.label, truth.truth) == ("true model", True)
    assert truth.cells["nll"].text == "4.000"
    assert truth.cells["difference"].value == pytest.approx(-0.2)
    assert not truth.cells["nll"].best
    assert [row.label for row in table.heads] == ["DET", "HET"]


def test_validation_metrics_only_when_nobody_has_test_metrics():
    table = compare_table([run("DET", 0, 4.2, split="validation"), run("HET", 0, 4.1, split="validation")])
    assert table.split == "validation"
    assert any("validation" in note for note in table.notes)
    table = compare_table([run("DET", 0, 4.2, split="validation"), run("HET", 0, 4.1)])
    assert table.split == "test"
    assert table.row("DET").cells["nll"].value is None
    assert "DET, seed 0: no test metrics yet." in table.notes


def test_notes_say_what_is_missing_or_derived():
    plan = Comparison(Path("out"), heads=("DET", "HET-H", "HET"))
    table = compare_table([run("HET", 0, 4.0, comparison=plan), run("scaled", 0, 4.0, derived_from="det-0")])
    assert "HET-H: no run yet." in table.notes
    assert "No run of DET: there is nothing to take differences to." in table.notes
    assert "scaled is not trained by itself but derived from det-0." in table.notes
    table = compare_table([run("DET", 0, 4.0), run("scaled", 0, 4.0, derived_from="DET-0")])
    assert "scaled is not trained by itself but derived from DET." in table.notes


def test_runs_without_anything_give_dashes():
    table = compare_table([Run(Path("a")), Run(Path("b"))])
    assert all(cell.text == "–" for row in table.rows for cell in row.cells.values())


def test_small_losses_get_more_decimals():
    assert compare_table([run("DET", 0, 0.01234)]).rows[0].cells["nll"].text == "0.0123"


def test_as_dict_is_plain_json(tmp_path):
    table = compare_table(find_runs(write_comparison(tmp_path, seeds=2, steps=20, best_nll=4.0)))
    plain = json.loads(json.dumps(as_dict(table), allow_nan=False))
    assert [row["label"] for row in plain["rows"]] == ["true model", *HEADS]
    assert plain["baseline"] == "DET"
    last = plain["rows"][-1]
    assert last["seeds"] == 2
    assert last["nll"]["mean"] == pytest.approx(table.row("HET-XL").cells["nll"].value)
    assert 0 < last["p"] < 1
